"""Rewards that compare the text of a response with an answer or a pattern: 1 or 0."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from data_tools.errors import ConfigError
from data_tools.rewards.reward import Columns, Rule

ANSWERS = ("answers", "answer")
"""Columns that hold the right answer, where none is named."""


def exact(column: str | None = None, ignore_case: bool = False) -> Rule:
    """1 if the response is the answer, white space at the ends aside.

    `column` (`answers`, else `answer`) holds the answer of each response: a value, or a list of values that
    are all right. A response without an answer is not judged.
    """
    tidy = _tidy(ignore_case)
    return against(column, lambda response, answers: tidy(response) in {tidy(a) for a in answers})


def contains(column: str | None = None, ignore_case: bool = False) -> Rule:
    """1 if the answer, or one of several, stands somewhere in the response."""
    tidy = _tidy(ignore_case)
    return against(column, lambda response, answers: any(tidy(a) in tidy(response) for a in answers))


def regex(pattern: str, column: str | None = None, ignore_case: bool = False) -> Rule:
    """1 if `pattern` is found in the response; with `column`, if its last match is also the answer.

    The first group of the pattern, where it has one, is what is compared.
    """
    try:
        compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise ConfigError(f"reward regex: {pattern!r} is not a regular expression: {error}") from error
    if column is None:
        return lambda responses, _: [float(compiled.search(text) is not None) for text in responses]
    tidy = _tidy(ignore_case)

    def last_is(response: str, answers: list[Any]) -> bool:
        found = [match.group(min(1, compiled.groups)) or "" for match in compiled.finditer(response)]
        return bool(found) and tidy(found[-1]) in {tidy(a) for a in answers}

    return against(column, last_is)


def _tidy(ignore_case: bool) -> Callable[[Any], str]:
    return (lambda text: str(text).strip().casefold()) if ignore_case else (lambda text: str(text).strip())


def against(column: str | None, right: Callable[[str, list[Any]], bool]) -> Rule:
    """The rule that asks `right` about each response and its answers; what it raises is why one is null."""

    def judge(responses: list[str], columns: Columns) -> Sequence[Any]:
        verdicts: list[Any] = []
        for response, answer in zip(responses, columns[answer_column(column, columns)], strict=True):
            try:
                answers = answers_of(answer)
                verdicts.append(float(right(response, answers)) if answers else None)
            except Exception as error:
                verdicts.append(error)
        return verdicts

    return judge


def answer_column(column: str | None, columns: Columns) -> str:
    """The column of answers: the one named, else the first of `ANSWERS` there is; ConfigError if none."""
    wanted = ANSWERS if column is None else (column,)
    for name in wanted:
        if name in columns:
            return name
    given = ", ".join(columns) or "none"
    raise ConfigError(f"the reward needs a column {wanted[0]!r}; given: {given}", "name it with `column`")


def answers_of(value: Any) -> list[Any]:
    """The right answers that a column's value stands for: itself, or those of a list; none for null."""
    return [one for one in (value if isinstance(value, list | tuple) else [value]) if one is not None]
