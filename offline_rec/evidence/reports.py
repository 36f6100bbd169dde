"""What an off-policy evaluation found: plain values, and the lines that a reader gets."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from offline_rec.evidence.diagnostics import Diagnostics
from offline_rec.evidence.logged import LEFT_OUT
from offline_rec.evidence.verdict import Verdict
from offline_rec.sampling.evaluate import Interval

NOTHING = "-"
"""Shown for the numbers of a policy of which nothing can be said; `facts` holds them."""


@dataclass(frozen=True)
class Estimate:
    """One estimator's value, and its gain over the mean reward of the log; `bias` is null without one."""

    name: str
    value: Interval
    gain: Interval
    bias: str | None


@dataclass(frozen=True)
class Judged:
    """A policy: `value`, `gain` over the log, and the verdict that these and the diagnostics give.

    `weights` names its scores in the dataset. `trained_rows`: rows with prompts that it was trained on.
    """

    policy: str
    model: str
    weights: str
    trained_rows: int
    value: Interval
    gain: Interval
    verdict: Verdict
    estimates: list[Estimate]
    tempered_power: float
    diagnostics: Diagnostics


@dataclass(frozen=True)
class Comparison:
    """The second policy against the first, on the same rows."""

    first: str
    second: str
    difference: Interval
    verdict: Verdict


@dataclass(frozen=True)
class OpeReport:
    """The report: of `rows` asked for, those that are not `left_out` are `episodes` of so many `prompts`.

    `logged` is the mean reward of the log over these; intervals are 95 % by drawing prompts again.
    """

    dataset: str
    split: str
    where: str | None
    seed: int
    rows: int
    left_out: dict[str, int]
    episodes: int
    prompts: int
    logged: Interval
    policies: list[Judged]
    comparisons: list[Comparison]
    notes: list[str]

    def of(self, policy: str) -> "OpeReport":
        """The same about one policy alone, with the comparisons that it is part of."""
        return replace(
            self,
            policies=[judged for judged in self.policies if judged.policy == policy],
            comparisons=[c for c in self.comparisons if policy in (c.first, c.second)],
        )

    def facts(self) -> dict[str, Any]:
        """Plain values, as JSON knows them: what is not finite is null."""
        facts: dict[str, Any] = _finite(asdict(self))
        return facts

    def table(self) -> list[dict[str, str]]:
        """A record for each policy, as it is shown."""
        return [self._shown(judged) for judged in self.policies]

    def _shown(self, judged: Judged) -> dict[str, str]:
        told = judged.verdict.word != "not identifiable"
        size = judged.diagnostics
        return {
            "policy": judged.policy,
            "estimate": f"{judged.value.value:.3f}" if told else NOTHING,
            "95 % interval": _interval(judged.value) if told else NOTHING,
            "gain": _signed(judged.gain) if told else NOTHING,
            "ESS": f"{size.ess:,.0f} ({size.ess_share:.0%})",
            "verdict": judged.verdict.word,
        }

    def compared(self) -> list[dict[str, str]]:
        """A record for each pair of policies, as it is shown."""
        return [
            {
                "policy": pair.second,
                "against": pair.first,
                "difference": _signed(pair.difference)
                if pair.verdict.word != "not identifiable"
                else NOTHING,
                "verdict": pair.verdict.word,
            }
            for pair in self.comparisons
        ]

    def lines(self) -> Iterator[str]:
        """What stands above and below the tables: the log, reasons, rows left out, notes."""
        yield (
            f"{self.episodes:,} responses to {self.prompts:,} prompts of {self._where()}; mean reward logged "
            f"{self.logged.value:.3f} ({_interval(self.logged)})"
        )
        for judged in self.policies:
            yield f"{judged.policy}: {judged.verdict.word}, {judged.verdict.reason}"
        for judged in self.policies:
            if judged.trained_rows:
                yield (
                    f"warning: {judged.policy} was trained on the prompts of {judged.trained_rows:,} of "
                    "these rows: this is how well it knows them, not what it would earn on others"
                )
        for reason, count in self.left_out.items():
            yield f"left out: {count:,} rows, because {LEFT_OUT[reason]}"
        for note in self.notes:
            yield f"note: {note}"

    def _where(self) -> str:
        return "the dataset" if self.split == "all" else f"split {self.split}"


def _interval(interval: Interval) -> str:
    return f"{interval.low:.3f} to {interval.high:.3f}"


def _signed(interval: Interval) -> str:
    return f"{interval.value:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
