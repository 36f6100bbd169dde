"""Rewards by name: what they judge right, and that what they cannot judge is null and never 0."""

import asyncio
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_tools.errors import ConfigError, DataError
from offline_rec import rewards


def test_exact_compares_text_without_the_space_around_it() -> None:
    judge = rewards.get("exact")
    assert judge([" 42\n", "42.", "b", "B"], answers=["42", 42, ["a", "b"], "b"]) == [1.0, 0.0, 1.0, 0.0]
    assert rewards.get("exact", ignore_case=True)(["B"], answers=["b"]) == [1.0]


def test_a_response_without_an_answer_is_not_judged() -> None:
    judged = rewards.get("exact").judge(["42", "42"], answers=[None, []])
    assert judged.rewards == [None, None]
    assert judged.reasons == ["not judged", "not judged"]


def test_another_column_can_hold_the_answers() -> None:
    assert rewards.get("exact", column="truth")(["1"], truth=[1], answers=[2]) == [1.0]
    with pytest.raises(ConfigError, match="'answers'; given: truth"):
        rewards.get("exact")(["1"], truth=[1])


def test_contains_looks_for_the_answer_anywhere() -> None:
    assert rewards.get("contains")(["so it is 7 apples", "six"], answers=[7, 7]) == [1.0, 0.0]


def test_regex_finds_a_pattern_or_compares_its_last_match_with_the_answer() -> None:
    assert rewards.get("regex", pattern=r"\d")(["a1", "b"]) == [1.0, 0.0]
    judge = rewards.get("regex", pattern=r"#### *(-?\d+)", column="answers")
    responses = ["2+2 #### 4", "#### 4 no, #### 5", "4"]
    assert judge(responses, answers=["4", "4", "4"]) == [1.0, 0.0, 0.0]


def test_wrong_names_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="'exakt'") as caught:
        rewards.get("exakt")
    assert "did you mean 'exact'" in caught.value.hint
    with pytest.raises(ConfigError, match="pattern"):
        rewards.get("regex")
    with pytest.raises(ConfigError, match="not a regular expression"):
        rewards.get("regex", pattern="(")
    with pytest.raises(ConfigError, match="unexpected"):
        rewards.get("exact", colour="red")


def test_columns_of_another_length_are_refused() -> None:
    with pytest.raises(DataError, match="answers has 1 values for 2 responses"):
        rewards.get("exact")(["1", "2"], answers=["1"])


# The functions that `module:function` names below.


def length(responses: list[str]) -> list[int]:
    return [len(text) for text in responses]


def matches(responses: list[str], *, answers: list[str], prompt: list[str] | None = None) -> list[bool]:
    return [text == answer for text, answer in zip(responses, answers, strict=True)]


def all_columns(responses: list[str], **columns: list[Any]) -> list[float]:
    return [float(len(columns)) for _ in responses]


async def slow(responses: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return [0.5 for _ in responses]


def fragile(responses: list[str]) -> list[float]:
    return [float(text) for text in responses]


def odd_values(responses: list[str]) -> list[Any]:
    return [math.nan, None, "0.25", "good", ValueError("why not")]


def too_few(responses: list[str]) -> list[float]:
    return []


HERE = __name__


def test_a_function_gets_all_responses_and_the_columns_that_it_names() -> None:
    assert rewards.get(f"{HERE}:length")(["", "abc"], answers=["x", "y"]) == [0.0, 3.0]
    assert rewards.get(f"{HERE}:matches")(["a", "b"], answers=["a", "c"], tier=[1, 2]) == [1.0, 0.0]
    assert rewards.get(f"{HERE}:all_columns")(["a"], answers=["a"], tier=[1]) == [2.0]
    with pytest.raises(ConfigError, match="takes the column 'answers'; given: tier"):
        rewards.get(f"{HERE}:matches")(["a"], tier=[1])


def test_an_async_function_works_with_and_without_a_running_loop() -> None:
    judge = rewards.get(f"{HERE}:slow")
    assert judge(["a", "b"]) == [0.5, 0.5]

    async def inside() -> list[float | None]:
        return judge(["a"])

    assert asyncio.run(inside()) == [0.5]


def test_only_the_responses_that_fail_are_null() -> None:
    judged = rewards.get(f"{HERE}:fragile").judge(["1", "x", "2"])
    assert judged.rewards == [1.0, None, 2.0]
    assert judged.reasons[1] == "ValueError: could not convert string to float: 'x'"


def test_results_that_are_no_numbers_are_null_with_a_reason() -> None:
    judged = rewards.get(f"{HERE}:odd_values").judge(["a"] * 5)
    assert judged.rewards == [None, None, 0.25, None, None]
    assert judged.reasons == [
        "not a finite number: nan",
        "not judged",
        None,
        "not a number: 'good'",
        "ValueError: why not",
    ]
    assert rewards.get(f"{HERE}:too_few")(["a", "b"]) == [None, None]


def test_a_function_that_does_not_exist_is_named() -> None:
    for name in ("no_such_module:f", f"{HERE}:no_such_function", ":f", f"{HERE}:"):
        with pytest.raises(ConfigError, match="cannot be loaded"):
            rewards.get(name)
    with pytest.raises(ConfigError, match="not a function"):
        rewards.get(f"{HERE}:HERE")


def test_a_function_of_the_working_directory_is_found_and_torch_stays_out(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def one(responses):\n    return [1] * len(responses)\n")
    script = (
        "import sys; from offline_rec import rewards; sys.path.remove('')\n"
        "assert rewards.get('mine:one')(['a', 'b']) == [1.0, 1.0]\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": root, "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
