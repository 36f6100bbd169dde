"""What the log foretells of each policy, and what sampling on the same held-out prompts then shows."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_rec.demo.contest import Exam
from offline_rec.evidence.reports import Judged
from offline_rec.sampling.evaluate import Interval, summarise

if TYPE_CHECKING:
    from data_tools.dataset import Dataset


@dataclass(frozen=True)
class Forecast:
    """The judgement on a policy from logged responses, and its accuracy as sampled on their prompts."""

    judged: Judged
    sampled: Interval

    @property
    def agrees(self) -> bool | None:
        """Whether the two intervals overlap; None where the estimate is said to tell nothing."""
        if self.judged.verdict.word == "not identifiable":
            return None
        return self.judged.value.low <= self.sampled.high and self.sampled.low <= self.judged.value.high

    def facts(self) -> dict[str, Any]:
        """Plain values for results.json."""
        judged = self.judged
        return {
            **asdict(judged.value),
            "gain": asdict(judged.gain),
            "ess": judged.diagnostics.ess,
            "verdict": judged.verdict.word,
            "reason": judged.verdict.reason,
            "sampled": asdict(self.sampled),
            "agrees": self.agrees,
        }


def held_out(ds: "Dataset") -> list[str]:
    """The prompts of the log that no policy was fitted to, in a fixed order."""
    query = "SELECT DISTINCT prompt FROM rollouts WHERE split = 'holdout' ORDER BY prompt"
    prompts: list[str] = ds.sql(query)["prompt"].to_pylist()
    return prompts


def forecasts(
    ds: "Dataset", runs: Mapping[str, Path], exam: Exam, *, seed: int, tick: Callable[[int, int], None]
) -> dict[str, Forecast]:
    """Judge the policies of all runs from the log, then let each take the exam on the held-out prompts."""
    from offline_rec.evidence.ope import ope

    report = ope(ds, list(runs.values()), seed=seed)
    found = {}
    for number, (judged, (name, run)) in enumerate(zip(report.policies, runs.items(), strict=True)):
        tick(number, len(runs))
        found[name] = Forecast(judged, summarise(exam.take(run / "model", name)).accuracy)
    return found
