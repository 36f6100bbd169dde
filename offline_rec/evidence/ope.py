"""`ope`: what policies would earn, estimated on logged responses that none of them was trained on.

The order: which rows, whether a policy knows their prompts, log-probs by `score` (kept in the dataset, so a
second call computes none), log-ratios read in parts, estimates and diagnostics, intervals, verdicts.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data_tools.errors import ConfigError, DataError
from offline_rec.evidence import logged, verdict
from offline_rec.evidence.bootstrap import RESAMPLES, interval, resampled_means
from offline_rec.evidence.diagnostics import Diagnostics, Drift
from offline_rec.evidence.estimators import ESTIMATORS, PRIMARY, Episodes, Floats, Table
from offline_rec.evidence.logged import Places, RowRatios, Selection
from offline_rec.evidence.reports import Comparison, Estimate, Judged, OpeReport
from offline_rec.evidence.subjects import Subject, TrainedOn, trained_on
from offline_rec.models.policy import Policy
from offline_rec.models.score import score
from offline_rec.sampling.evaluate import Interval
from offline_rec.training.plan import remarks_on

if TYPE_CHECKING:
    import duckdb

    from data_tools.dataset import Dataset
    from data_tools.shaping import Split

FILE = "ope.json"
"""The file of a run directory that holds the latest report on its policy."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, rows done and rows in all."""


def _silent(phase: str, done: int, total: int) -> None:
    pass


def ope(
    ds: "Dataset",
    policies: Sequence[str | Path],
    *,
    split: "Split" = "holdout",
    where: str | None = None,
    force: bool = False,
    seed: int = 0,
    resamples: int = RESAMPLES,
    progress: Progress = _silent,
) -> OpeReport:
    """Judge policies (run directories of `fit`, or model directories) on the same rows of a dataset.

    `where` narrows the rows of the split. Raises ConfigError if a policy was trained on prompts of these
    rows, unless `force`, and DataError if no row can be judged on. The report on a run is also kept in it.
    """
    subjects = _distinct(policies)
    selection, batches = Selection(split, where), ds.batches()
    with ds.connect() as con:
        selection.write(con)
        rows, left_out = logged.counted(con)
        if not rows:
            raise DataError(f"no row is in the {_called(selection)}", "see: rec stats DATASET, or --split")
        knowledge = [trained_on(subject, ds) for subject in subjects]
        pairs = zip(subjects, knowledge, strict=True)
        trained = [_trained_rows(con, *pair, rows=rows, force=force) for pair in pairs]
        places = Places.of(con, batches)
        notes = _unique(note for known in knowledge for note in known.notes)
        notes += remarks_on(con, f"(FROM rollouts WHERE {selection.condition})")
    if not len(places):
        raise _nothing_left(rows, left_out)
    keys, ratios = _ratios(ds, subjects, selection, (places, batches), progress)
    usable = _usable(places, ratios)
    left_out["not_scored"] = int((~usable).sum())
    if not usable.any():
        raise _nothing_left(rows, left_out)
    measured = [logged.episodes_of(places, each, usable) for each in ratios]
    judging = _Judging.of(measured, seed=seed, resamples=resamples)
    judged = [
        judging.judged(i, subject, key=keys[i], trained=trained[i]) for i, subject in enumerate(subjects)
    ]
    report = OpeReport(
        dataset=ds.path,
        split=split,
        where=where,
        seed=seed,
        rows=rows,
        left_out=dict(+left_out),
        episodes=len(measured[0][0]),
        prompts=len(measured[0][0].counts),
        logged=judging.interval(0, "logged"),
        policies=judged,
        comparisons=judging.comparisons(judged),
        notes=notes,
    )
    _keep(report, subjects)
    return report


def _distinct(policies: Sequence[str | Path]) -> list[Subject]:
    subjects = [Subject.of(path) for path in policies]
    if not subjects:
        raise ConfigError("no policy is named", "give run directories or model directories")
    if len({subject.name for subject in subjects}) < len(subjects):
        raise ConfigError("a policy is named twice", "name each once")
    return subjects


def _trained_rows(
    con: "duckdb.DuckDBPyConnection", subject: Subject, known: TrainedOn, *, rows: int, force: bool
) -> int:
    """How many of the rows have prompts that the policy was trained on; refuse them unless forced."""
    trained = known.count(con, logged.TABLE)
    if trained and not force:
        raise ConfigError(
            f"{subject.name} was trained on the prompts of {trained:,} of these {rows:,} rows: what it would "
            "earn on others cannot be told from them",
            "judge it on the holdout of its dataset (--split holdout), or --force, which labels the report",
        )
    return trained


def _ratios(
    ds: "Dataset",
    subjects: Sequence[Subject],
    selection: Selection,
    where: tuple[Places, list[str]],
    progress: Progress,
) -> tuple[list[str], list[RowRatios]]:
    """The name of each policy's weights, and its log-ratios on every row; one model is loaded at a time."""
    keys, ratios = [], []
    for number, subject in enumerate(subjects, start=1):
        phase = f"scoring {number}/{len(subjects)}"
        report = score(
            ds,
            Policy.load(subject.model),
            where=selection.scored,
            progress=lambda done, total, phase=phase: progress(phase, done, total),  # type: ignore[misc]
        )
        keys.append(report.key)
        ratios.append(RowRatios.of(ds, report.key, *where))
    return keys, ratios


def _usable(places: Places, ratios: Sequence[RowRatios]) -> NDArray[np.bool_]:
    """Rows whose whole episode has log-probs of all policies, so that all are judged on the same."""
    missing = ~np.all([np.isfinite(each.log_ratio) for each in ratios], axis=0)
    return ~np.isin(places.episode, places.episode[missing])


@dataclass(frozen=True)
class _Judging:
    """Tables of all policies on the same prompts, with means over the same draws of these prompts."""

    tables: list[Table]
    diagnostics: list[Diagnostics]
    values: list[dict[str, Floats]]
    resampled: list[dict[str, Floats]]

    @classmethod
    def of(cls, measured: Sequence[tuple[Episodes, Drift]], *, seed: int, resamples: int) -> "_Judging":
        tables = [Table.of(episodes) for episodes, _ in measured]
        together = np.concatenate([table.values for table in tables], axis=1)
        drawn = np.split(resampled_means(together, seed=seed, resamples=resamples), len(tables), axis=1)
        return cls(
            tables=tables,
            diagnostics=[Diagnostics.of(*pair) for pair in measured],
            values=[table.estimates(table.values.mean(0)) for table in tables],
            resampled=[table.estimates(means) for table, means in zip(tables, drawn, strict=True)],
        )

    def interval(self, policy: int, name: str, *, over: tuple[int, str] | None = None) -> Interval:
        """An estimate with its interval, or its difference to another one, `over`, paired."""
        value, drawn = self.values[policy][name], self.resampled[policy][name]
        if over is not None:
            value, drawn = value - self.values[over[0]][over[1]], drawn - self.resampled[over[0]][over[1]]
        return interval(float(value), drawn)

    def judged(self, i: int, subject: Subject, *, key: str, trained: int) -> Judged:
        """Everything about one policy."""
        gain = self.interval(i, PRIMARY, over=(i, "logged"))
        estimates = [
            Estimate(
                estimator.name,
                self.interval(i, estimator.name),
                self.interval(i, estimator.name, over=(i, "logged")),
                estimator.bias,
            )
            for estimator in ESTIMATORS
        ]
        return Judged(
            policy=subject.name,
            model=str(subject.model),
            weights=key,
            trained_rows=trained,
            value=self.interval(i, PRIMARY),
            gain=gain,
            verdict=verdict.judge(self.diagnostics[i], gain),
            estimates=estimates,
            tempered_power=self.tables[i].alpha,
            diagnostics=self.diagnostics[i],
        )

    def comparisons(self, judged: Sequence[Judged]) -> list[Comparison]:
        """Every pair of policies, the second against the first."""
        found = []
        for (i, first), (j, second) in combinations(enumerate(judged), 2):
            difference = self.interval(j, PRIMARY, over=(i, PRIMARY))
            said = verdict.compare(
                (first.verdict, second.verdict),
                difference,
                (first.policy, second.policy),
                reward_std=first.diagnostics.reward_std,
            )
            found.append(Comparison(first.policy, second.policy, difference, said))
        return found


def _keep(report: OpeReport, subjects: Sequence[Subject]) -> None:
    """Write what is said of each run into its directory, whole or not at all."""
    for subject in subjects:
        if subject.run is not None:
            staged = subject.run / f".{FILE}.tmp"
            facts = report.of(subject.name).facts()
            staged.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            os.replace(staged, subject.run / FILE)


def _called(selection: Selection) -> str:
    narrowed = "" if selection.where is None else f" where {selection.where}"
    return ("dataset" if selection.split == "all" else f"{selection.split} split") + narrowed


def _nothing_left(rows: int, left_out: Counter[str]) -> DataError:
    said = "; ".join(f"{count:,} because {logged.LEFT_OUT[why]}" for why, count in (+left_out).items())
    return DataError(
        f"none of the {rows:,} rows can be judged on: {said}",
        "an estimate needs rewards and the log-probs of the policy that sampled: see rec check DATASET",
    )


def _unique(notes: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(notes))
