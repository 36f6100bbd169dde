"""What a reward is: rules judge responses, and what a rule cannot judge becomes null with a reason."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_tools.errors import DataError

NOT_JUDGED = "not judged"
"""The reason for a null that a rule gives by itself."""

Columns = Mapping[str, Sequence[Any]]

Rule = Callable[[list[str], Columns], Sequence[Any]]
"""Judges all responses at once: a number, None or an exception for each."""


class NotJudged(Exception):
    """Why a response has no reward, in words that need no name of an error before them."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Rewards, and beside each one that is null the reason; the reason of the others is None."""

    rewards: list[float | None]
    reasons: list[str | None]


class Reward:
    """A rule with its name; called, it gives rewards, `judge` also says why some are null.

    `definition` is the name, with the options that it does not spell.
    """

    def __init__(self, name: str, rule: Rule, definition: str | None = None) -> None:
        self.name = name
        self.rule = rule
        self.definition = name if definition is None else definition

    def __call__(self, responses: list[str], **columns: Sequence[Any]) -> list[float | None]:
        """Rewards of `responses`; every column is as long as they are."""
        return self.judge(responses, **columns).rewards

    def judge(self, responses: list[str], **columns: Sequence[Any]) -> Judgement:
        """Rewards with reasons; a failing rule never gives 0, which would read as a judged failure.

        Raises DataError if a column, or what the rule returns, is not as long as `responses`.
        """
        for name, values in columns.items():
            self._check(f"column {name}", values, len(responses))
        return self.judge_rows(responses, columns)

    def judge_rows(self, responses: list[str], columns: Columns) -> Judgement:
        """The same with the columns as a mapping, which may make each column when a rule asks for it."""
        if not responses:
            return Judgement([], [])
        verdicts = self.rule(responses, columns)
        self._check("the result", verdicts, len(responses))
        rewards, reasons = zip(*map(_verdict, verdicts), strict=True)
        return Judgement(list(rewards), list(reasons))

    def _check(self, what: str, values: Any, length: int) -> None:
        if not hasattr(values, "__len__") or isinstance(values, str):
            raise DataError(f"reward {self.name}: {what} is a {type(values).__name__}, not a list")
        if len(values) != length:
            raise DataError(f"reward {self.name}: {what} has {len(values)} values for {length} responses")


def _verdict(value: Any) -> tuple[float | None, str | None]:
    if isinstance(value, NotJudged):
        return None, str(value)
    if isinstance(value, Exception):
        return None, f"{type(value).__name__}: {value}"
    if value is None:
        return None, NOT_JUDGED
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None, f"not a number: {str(value)[:80]!r}"
    return (number, None) if math.isfinite(number) else (None, f"not a finite number: {number}")
