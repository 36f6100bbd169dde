"""Rewards that compare the text of a response with an answer or a pattern: 1 or 0."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from data_tools.errors import ConfigError
from data_tools.rewards.reward import Columns, Rule


def exact(column: str = "answers", ignore_case: bool = False) -> Rule:
    """1 if the response is the answer, white space at the ends aside.

    `column` holds the answer of each response: a value, or a list of values that are all right. A response
    without an answer is not judged.
    """
    tidy = _tidy(ignore_case)
    return _against(column, lambda response, answers: tidy(response) in {tidy(a) for a in answers})


def contains(column: str = "answers", ignore_case: bool = False) -> Rule:
    """1 if the answer, or one of several, stands somewhere in the response."""
    tidy = _tidy(ignore_case)
    return _against(column, lambda response, answers: any(tidy(a) in tidy(response) for a in answers))


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

    return _against(column, last_is)


def _tidy(ignore_case: bool) -> Callable[[Any], str]:
    return (lambda text: str(text).strip().casefold()) if ignore_case else (lambda text: str(text).strip())


def _against(column: str, right: Callable[[str, list[Any]], bool]) -> Rule:
    """The rule that asks `right` about each response and its answers."""

    def judge(responses: list[str], columns: Columns) -> Sequence[float | None]:
        if column not in columns:
            given = ", ".join(columns) or "none"
            raise ConfigError(
                f"the reward needs a column {column!r}; given: {given}", "name it with `column`"
            )
        rewards: list[float | None] = []
        for response, answer in zip(responses, columns[column], strict=True):
            answers = [a for a in (answer if isinstance(answer, list | tuple) else [answer]) if a is not None]
            rewards.append(float(right(response, answers)) if answers else None)
        return rewards

    return judge
