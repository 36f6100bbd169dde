"""Rewards by name: how they are written, alone and as sums; choice, JSON schema, SQL, time limits."""

import asyncio
import json
import signal
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.errors import ConfigError, MissingExtra
from data_tools.rewards import math_answers
from data_tools.rewards.named import get, spelt
from data_tools.rewards.rules import reward_rule
from data_tools.rewards.spelling import Term, terms
from tests.data_tools.logged import collected, lines, rollouts

HERE = __name__


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("math", [Term("math")]),
        (" math( ) ", [Term("math")]),
        ("json-schema(file=a.json)", [Term("json-schema", {"file": "a.json"})]),
        ("regex(pattern='#### (\\d+), it''s', column=answers)", [
            Term("regex", {"pattern": "#### (\\d+), it's", "column": "answers"})
        ]),
        ('exact(column="a ""b""", ignore_case=true)', [
            Term("exact", {"column": 'a "b"', "ignore_case": True})
        ]),
        ("0.9*math + .1 * my.mod:f(seconds=2.5)", [
            Term("math", {}, 0.9), Term("my.mod:f", {"seconds": 2.5}, 0.1)
        ]),
        ("math - 2e-1*regex(pattern=x)", [Term("math"), Term("regex", {"pattern": "x"}, -0.2)]),
        ("-math", [Term("math", {}, -1.0)]),
    ],
)  # fmt: skip
def test_a_reward_is_a_sum_of_terms_with_options_and_weights(text, expected):
    assert terms(text) == expected


VALUES = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=12), st.booleans(), st.none(), st.integers(-(10**9), 10**9)
)
NAMES = st.from_regex(
    r"[a-z_][a-z0-9_]{0,8}(-[a-z]{1,5})?|[a-z]{1,5}(\.[a-z]{1,5})?:[a-z]{1,5}", fullmatch=True
)
TERMS = st.builds(
    Term,
    NAMES,
    st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), VALUES, max_size=3),
    st.floats(-100, 100).filter(lambda weight: weight == 0 or abs(weight) > 1e-3),
)


def spelling(made: list[Term]) -> str:
    def value(one: Any) -> str:
        quoted = isinstance(one, str)
        return "'" + one.replace("'", "''") + "'" if quoted else json.dumps(one)

    text = ""
    for term in made:
        options = ", ".join(f"{key}={value(one)}" for key, one in term.options.items())
        sign = "-" if term.weight < 0 else "+"
        text += f" {sign} {abs(term.weight)!r}*{term.name}({options})"
    return text


@given(st.lists(TERMS, min_size=1, max_size=4))
def test_every_sum_of_terms_can_be_written_and_is_read_as_it_was_meant(made):
    assert terms(spelling(made)) == made


@given(st.text(max_size=30))
def test_no_text_is_too_odd_to_be_looked_at(text):
    terms(text)
    terms(f"math({text}")


@pytest.mark.parametrize(
    "text",
    [
        "", "(response = 'x')::INT", "contains(response, 'x')", "reward / 10", "math exact", "0.5*", "math +",
        "f(a='x)", "f(a=1", "f(a=1, a=2)", "length(response) - 1", "response LIKE '%math%'", "extra->>'a'",
        "coalesce(reward, 0)", "n_tokens < 5", "f(a=1) g",
    ],
)  # fmt: skip
def test_anything_else_may_be_sql(text):
    assert terms(text) is None


def test_weights_add_up_and_a_part_that_does_not_judge_makes_the_whole_null():
    judge = get("0.75*exact + 0.25*regex(pattern='^<') - 0.5*contains(column=bad)")
    responses = ["4", "<4", "5x", "4"]
    columns = {"answers": ["4", "<4", "4", None], "bad": ["x", "y", "x", "x"]}
    judged = judge.judge(responses, **columns)
    assert judged.rewards == [0.75, 1.0, -0.5, None]
    assert judged.reasons == [None, None, None, "not judged"]
    judged = get(f"exact + {HERE}:fragile").judge(["1", "x"], answers=["1", "x"])
    assert judged.rewards == [2.0, None]
    assert judged.reasons[1].startswith(f"{HERE}:fragile: ValueError: could not convert")


def test_options_come_in_the_text_or_as_arguments():
    assert get("exact", column="gold")(["1"], gold=["1"]) == [1.0]
    assert get("exact(column=gold)", ignore_case=True)(["A"], gold=["a"]) == [1.0]
    with pytest.raises(ConfigError, match="takes no further options"):
        get("exact + math", column="gold")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("exct", "unknown reward 'exct'", "did you mean 'exact'?"),
        ("math + exct", "unknown reward 'exct'", "did you mean 'exact'?"),
        ("exct(column=a)", "unknown reward 'exct'", "did you mean 'exact'?"),
        ("json-shema(file=a)", "unknown reward 'json-shema'", "did you mean 'json-schema'?"),
        ("regex('x')", "", "options are written regex(option=value)"),
        ("exact(colour=red)", "reward exact: got an unexpected keyword argument 'colour'", ""),
        ("regex()", "pattern", ""),
    ],
)
def test_what_is_misspelt_is_named_with_the_nearest(text, message, hint):
    for make in (get, reward_rule) if text != "exct" else (get,):
        with pytest.raises(ConfigError) as caught:
            make(text)
        assert message in caught.value.message
        assert hint in caught.value.hint


def test_the_same_text_judges_rows_of_a_dataset_and_responses_alone(tmp_path):
    records = [
        {"prompt": "q", "response": response, "answers": answer, "tier": "gold"}
        for response, answer in (("<4", "<4"), ("4", "<4"), ("so #### 4", "4"))
    ]
    for number, text in enumerate(
        [
            "0.5*exact + 0.5*regex(pattern='^<')",
            "(response = extra->>'answers')::INT + length(prompt)",
            "math + sql(expression='(extra->>''tier'' = ''gold'')::INT')",
            f"{HERE}:length(batch=2)",
        ]
    ):
        log = tmp_path / f"{number}.jsonl"
        log.write_bytes(lines(*records))
        folder = tmp_path / str(number)
        folder.mkdir()
        collected(folder, log, reward=text)
        logged = [row["reward"] for row in rollouts(folder)]
        columns = {name: [record[name] for record in records] for name in ("prompt", "answers", "tier")}
        assert get(text)([record["response"] for record in records], **columns) == logged, text
        assert None not in logged


def test_sql_that_fails_for_a_response_is_null_with_the_reason():
    judged = get("(extra->>'gold')::INT / length(response)").judge(["ab", "ab", "a"], gold=["4", "x", None])
    assert judged.rewards == [2.0, None, None]
    assert "x" in judged.reasons[1]
    assert judged.reasons[2] == "not judged"
    assert get("(response)").judge(["7", "seven"]).reasons == [None, "not a number: 'seven'"]


def test_a_name_alone_is_never_sql():
    assert spelt("reward / 10") is None
    with pytest.raises(ConfigError, match="unknown reward 'response_length'"):
        get("response_length")


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("The answer is B.", "B", 1.0),
        ("Answer: (B) because A is wrong", "B", 1.0),
        (r"so \boxed{C}", "C", 1.0),
        (r"\boxed{\text{C}}", "(C)", 1.0),
        ("A) no\nB) yes", "B", 1.0),
        ("**b**", "B", 1.0),
        ("(d)", "D) the last one", 1.0),
        ("Clearly better than C is B", "b", 1.0),
        ("Answer: A. No, the answer is D", "D", 1.0),
        ("I think so", "A", 0.0),
        ("I", "I", 1.0),
        ("The answer is a dog", "A", 0.0),
        ("Answer: Because", "B", 0.0),
        ("", "B", 0.0),
        ("B", ["A", "B"], 1.0),
    ],
)
def test_the_letter_that_a_response_settles_on_is_compared(response, answer, reward):
    assert get("choice")([response], answers=[answer]) == [reward]


def test_an_answer_that_is_no_letter_is_null():
    judged = get("choice", letters="ABCD").judge(["A", "A"], answers=["E", 1])
    assert judged.rewards == [None, None]
    assert judged.reasons[0] == "the answer 'E' is none of the letters ABCD"
    with pytest.raises(ConfigError, match="no letters"):
        get("choice", letters="1234")


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def test_json_is_held_against_a_schema_given_in_three_ways(tmp_path):
    responses = ['{"n": 1}', '{"n": "1"}', 'Sure:\n```json\n{"n": 2}\n```\nDone', "n = 1", "[1]"]
    expected = [1.0, 0.0, 1.0, 0.0, 0.0]
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    assert get("json-schema", schema=SCHEMA)(responses) == expected
    assert get(f"json-schema(schema='{json.dumps(SCHEMA)}')")(responses) == expected
    assert get(f"json-schema(file='{tmp_path / 'schema.json'}')")(responses) == expected
    assert get("json-schema(column=form)")(responses, form=[SCHEMA] * 5) == expected
    assert get("json-schema(column=form)")(responses, form=[json.dumps(SCHEMA)] * 5) == expected


def test_a_schema_that_cannot_be_applied_is_null_and_nothing_is_fetched():
    far = {"$ref": "http://127.0.0.1:9/schema.json"}
    judged = get("json-schema(column=form)").judge(["1", "1", "1", "1"], form=[{"type": 7}, None, "{", far])
    assert judged.rewards == [None] * 4
    assert judged.reasons[0].startswith("the schema is broken")
    assert judged.reasons[1] == "not judged"
    assert judged.reasons[2].startswith("the schema is no JSON")
    assert "Unresolvable" in judged.reasons[3]


def test_a_schema_that_is_none_is_refused():
    for options, message in (
        ({}, "one of schema, file and column"),
        ({"schema": {}, "column": "form"}, "one of schema, file and column"),
        ({"schema": {"type": 7}}, "the schema is broken"),
        ({"schema": "{"}, "no JSON"),
    ):
        with pytest.raises(ConfigError, match=message):
            get("json-schema", **options)


# The functions that `module:function` names.


def fragile(responses: list[str]) -> list[float]:
    return [float(text) for text in responses]


def length(responses: list[str]) -> list[int]:
    assert len(responses) <= 2
    return [len(text) for text in responses]


def sleepy(responses: list[str]) -> list[float]:
    while "sleep" in responses:
        try:
            time.sleep(0.01)
        except Exception:  # a function that keeps errors to itself must end as well
            continue
    return [1.0 for _ in responses]


async def dreamy(responses: list[str]) -> list[float]:
    await asyncio.sleep(30 * ("sleep" in responses))
    return [1.0 for _ in responses]


@pytest.mark.parametrize("function", ["sleepy", "dreamy"])
def test_a_function_that_takes_too_long_is_given_up_in_any_thread(function):
    judge = get(f"{HERE}:{function}(seconds=0.2, batch=2)")
    late = "took longer than 0.2 s"
    found: list[Any] = []

    def judged() -> None:
        found.append(judge.judge(["a", "sleep", "b"]))

    start = time.monotonic()
    judged()
    thread = threading.Thread(target=judged)
    thread.start()
    thread.join()
    assert time.monotonic() - start < 10
    for one in found:
        assert one.rewards == [None, None, 1.0]
        assert one.reasons == [late, late, None]


def alarmed(responses: list[str]) -> list[float]:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    return [1.0 for _ in responses]


def test_a_function_may_use_the_alarm_clock_of_the_main_thread():
    assert get(f"{HERE}:alarmed")(["a"]) == [1.0]
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("module", "reward", "options"),
    [("math_verify", "math", {}), ("jsonschema", "json-schema", {"schema": {}})],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch, module, reward, options):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(math_answers, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra) as caught:
        get(reward, **options)
    assert f"offline-rec[{reward}]" in caught.value.hint


def test_limits_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="seconds > 0"):
        get(f"{HERE}:fragile(seconds=0)")
