"""The reward `math`: final answers as numbers and expressions, and that what cannot be compared is null."""

import json
import multiprocessing
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.errors import ConfigError
from data_tools.rewards import math_answers
from data_tools.rewards.math_answers import final_answer, plain_number
from data_tools.rewards.named import get

EXCERPT = Path(__file__).parent.parent / "cases" / "gsm8k_excerpt.jsonl"
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def test_the_last_box_is_the_answer_then_the_last_mark_then_a_line_that_says_so():
    assert final_answer(r"\boxed{1} so \boxed{\frac{1}{2}} #### 3") == r"\frac{1}{2}"
    assert final_answer(r"\boxed{7} and then \boxed{8") == "7"
    assert final_answer(r"\boxed{\{1\}}") == r"\{1\}"
    assert final_answer("#### 3\nno: #### 1,000\nmore") == "1,000"
    assert final_answer("2 + 2 = 4\nA: 4") == "4"
    assert final_answer("**Answer:** 4 eggs") == "4 eggs"
    assert final_answer("So the final answer is: 12.") == "12."
    assert final_answer("A robe takes 2 bolts") is None
    assert final_answer("") is None


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so #### 18", "9 * 2 = 18\n#### 18", 1.0),
        ("#### $1,000.", "1000", 1.0),
        ("18.00", "18", 1.0),
        ("-18", "18", 0.0),
        ("", "18", 0.0),
        ("I give up", "18", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"it is $\frac{3}{4}$", "3/4", 1.0),
        (r"\boxed{2x+1}", "1+2x", 1.0),
        (r"\boxed{2x+1}", "1+3x", 0.0),
        (r"\boxed{(1,2)}", "(1,2)", 1.0),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", 1.0),
        (r"\boxed{50\%}", "50%", 1.0),
        ("I count 3 and then 18", "18", 1.0),
        ("18", ["17", "18"], 1.0),
        ("18", 18, 1.0),
    ],
)
def test_numbers_and_expressions_are_compared_by_their_value(response, answer, reward):
    assert get("math")([response], answers=[answer]) == [reward]


def test_solutions_of_gsm8k_are_judged_as_their_labels_say():
    judge = get("math")
    for line in EXCERPT.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        truth = question["ground_truth"]
        assert judge([truth], answers=[truth]) == [1.0]
        labels = [float(question[model]["is_correct"]) for model in MODELS]
        assert judge([question[model]["solution"] for model in MODELS], answers=[truth] * 4) == labels


def test_what_cannot_be_compared_is_null_with_the_reason():
    judged = get("math").judge(["yes", "4", "4"], answers=["yes", None, []])
    assert judged.rewards == [None, None, None]
    assert judged.reasons == ["no number or expression in the answer 'yes'", "not judged", "not judged"]


def test_a_computation_without_end_is_given_up_and_the_next_one_is_judged():
    endless = r"\boxed{9^{9^{9^{9^9}}}}"
    judged = get("math", seconds=0.5).judge([endless, r"\boxed{\frac12}"], answers=["5", "0.5"])
    assert judged.rewards == [None, 1.0]
    assert judged.reasons == ["took longer than 0.5 s", None]


def test_a_process_that_is_killed_is_started_again():
    judge = get("math")
    assert judge([r"\boxed{\frac12}"], answers=["0.5"]) == [1.0]
    math_answers._worker._process.kill()
    math_answers._worker._process.wait()
    assert judge([r"\boxed{\frac12}"], answers=["0.5"]) == [1.0]


def test_it_judges_in_threads():
    judge = get("math")
    assert threading.current_thread() is threading.main_thread()
    halves = [rf"\boxed{{\frac{{1}}{{{n}}}}}" for n in range(2, 10)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: judge([halves[at]], answers=["1/5"]), range(len(halves))))
    assert found == [[float(n == 5)] for n in range(2, 10)]


def _judged_in_a_process(queue):
    queue.put((os.getpid(), get("math")([r"\boxed{\frac12}"], answers=["0.5"])))


def test_it_judges_in_a_fork_of_a_process_that_judged():
    judge = get("math")
    assert judge([r"\boxed{\frac13}"], answers=["1/3"]) == [1.0]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_judged_in_a_process, args=(queue,))
    child.start()
    pid, found = queue.get(timeout=60)
    child.join()
    assert (pid != os.getpid(), found) == (True, [1.0])
    assert judge([r"\boxed{\frac13}"], answers=["1/3"]) == [1.0]


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "${}", "${:,}.", "{}.00", " {} "]))
def test_a_plain_number_is_read_however_it_is_written(number, form):
    assert plain_number(form.format(number)) == Decimal(number)


@pytest.mark.parametrize("text", ["", "1/2", "1e3", "1,00", "10%", "1 2", "x", "1.2.3", "1,2", "٣"])
def test_what_is_no_plain_number_is_left_to_math_verify(text):
    assert plain_number(text) is None


def test_plain_numbers_are_judged_as_math_verify_does():
    rng = random.Random(0)
    forms = ("{}", "{:,}", "${}", "{}.", "{:.1f}", "${:,}", "{:.2f}")
    for _ in range(200):
        number = rng.choice([rng.randint(-50, 50), rng.randint(0, 10**6), rng.randint(-(10**12), 10**12)])
        other = rng.choice([number, number, number + 1, -number, number * 10])
        one, two = rng.choice(forms).format(number), rng.choice(forms).format(other)
        assert math_answers._worker.equal(one, two, 10.0) == (plain_number(one) == plain_number(two)), (
            one,
            two,
        )


def test_options_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="seconds"):
        get("math", seconds=0)
    with pytest.raises(ConfigError, match="'answers'; given: gold"):
        get("math")(["1"], gold=["1"])
    assert get("math")(["1"], answer=["1"]) == [1.0]
    assert get("math(column=gold)")(["1"], gold=["1"]) == [1.0]
