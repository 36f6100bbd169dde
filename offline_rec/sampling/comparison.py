"""Several models on the same prompts: sampled, judged, compared, kept."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from data_tools.errors import ConfigError, DataError
from data_tools.run_directory import is_run
from data_tools.store.storage import open_storage
from offline_rec.rewards import Reward
from offline_rec.sampling.choose import SamplerSettings, open_sampler
from offline_rec.sampling.evaluate import Interval, Measure, Summary, compare, evaluate
from offline_rec.sampling.sampled_rows import REASON, Task, try_out
from offline_rec.sampling.sampler import SamplingParams

if TYPE_CHECKING:
    from data_tools.store.dataset import StoredDataset

MEASURES: tuple[Measure, ...] = ("accuracy", "mean_reward")
REASONS = 3
"""Reasons of nulls that a report names."""

Tick = Callable[[str, int, int], None]
"""Told of a policy, the samples that it has given, and how many it is to give."""


@dataclass(frozen=True)
class Candidate:
    """A model under the name it is told by; `run` is the run directory it is from, where it is from one."""

    name: str
    model: Path
    run: Path | None = None


@dataclass(frozen=True)
class Difference:
    """How much better the second policy is than the first, on the prompts of both, with its 95 % interval."""

    first: str
    second: str
    measure: Measure
    interval: Interval


@dataclass(frozen=True)
class Comparison:
    """What was found; `folders` are where it is kept, `collected` the rows that a dataset gained."""

    rows: pa.Table
    asked: dict[str, Any]
    summaries: list[Summary]
    differences: list[Difference]
    reasons: dict[str, int]
    folders: list[str] = field(default_factory=list)
    collected: int | None = None

    def facts(self) -> dict[str, Any]:
        """All but the rows, as plain JSON."""
        return {
            "asked": self.asked,
            "policies": [summary.to_dict() for summary in self.summaries],
            "differences": [
                {"first": d.first, "second": d.second, "measure": d.measure, **asdict(d.interval)}
                for d in self.differences
            ],
            "unjudged": self.reasons,
            "kept": self.folders,
            "collected": self.collected,
        }


def compare_models(
    models: Sequence[str | Path],
    task: Task,
    reward: Reward,
    *,
    n: int = 1,
    params: SamplingParams | None = None,
    pass_at: Sequence[int] = (),
    sampler: SamplerSettings | None = None,
    out: str | Path | None = None,
    log: "StoredDataset | None" = None,
    progress: Tick | None = None,
) -> Comparison:
    """Sample `n` responses of each model to each prompt, judge them, and compare each model with the first.

    Each of `models` is a model directory, or the run directory of a fit. All are sampled with one seed, so
    that they share their noise. What is found is kept in `out`, else in the folder `eval` of every run; with
    `log` the samples are collected into that dataset. Raises ConfigError for what cannot be asked, DataError
    for a model that is not there or whose samples could not be judged at all.
    """
    from offline_rec.sampling.comparison_files import check_free, keep, log_samples

    params, settings = params or SamplingParams(), sampler or SamplerSettings()
    candidates = find_candidates(models)
    check_free(candidates, out, log)
    try_out(reward, task)
    found = []
    for one in candidates:
        tick = _counter(progress, one.name, n * len(task.prompts))
        with open_sampler(one.model, settings) as opened:
            made = evaluate(
                opened, task, reward, n=n, params=params, pass_at=pass_at, policy=one.name, progress=tick
            )
        del opened  # before the next model is loaded
        found.append(made)
    tables = [made.rows for made in found]
    rows = pa.concat_tables(tables)
    report = Comparison(
        rows,
        _asked(candidates, task, reward, n, params) | {"engine": settings.engine},
        [made.summary for made in found],
        _differences(candidates, tables),
        _reasons(rows),
    )
    report = replace(report, folders=keep(report, candidates, out))
    if log is None:
        return report
    return replace(report, collected=log_samples(log, rows, candidates, params))


def find_candidates(models: Sequence[str | Path]) -> list[Candidate]:
    """The models that are named, each under a name of its own: that of its run, else of its directory."""
    if not models:
        raise ConfigError("no model was named", "name a model directory or a run directory")
    found: list[Candidate] = []
    for model in models:
        path = Path(model)
        run = next((p for p in (path, path.absolute().parent) if p.is_dir() and _is_run(p)), None)
        if run == path and not (path / "model").is_dir():
            raise DataError(f"{path} has no model yet", f"finish it: rec fit --out {path} --resume")
        directory = path / "model" if run == path else path
        if not directory.is_dir():
            raise DataError(f"{path} does not exist", "name a model directory or a run directory")
        name = (run if run is not None and directory.name == "model" else path).absolute().name
        taken = {one.name for one in found}
        names = (name, *(f"{name}-{number}" for number in range(2, len(models) + 2)))
        found.append(Candidate(next(n for n in names if n not in taken), directory, run))
    return found


def _is_run(path: Path) -> bool:
    return is_run(open_storage(path))


def _counter(progress: Tick | None, name: str, total: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    done = 0

    def count(finished: int) -> None:
        nonlocal done
        done += finished
        progress(name, done, total)

    progress(name, 0, total)
    return count


def _asked(
    candidates: Sequence[Candidate], task: Task, reward: Reward, n: int, params: SamplingParams
) -> dict[str, Any]:
    return {
        "models": {one.name: str(one.model) for one in candidates},
        "prompts": len(task.prompts),
        "samples": n,
        "reward": reward.name,
        **asdict(params),
    }


def _differences(candidates: Sequence[Candidate], tables: Sequence[pa.Table]) -> list[Difference]:
    """Of each policy to the first."""
    return [
        Difference(candidates[0].name, one.name, measure, compare(tables[0], table, measure=measure))
        for one, table in zip(candidates[1:], tables[1:], strict=True)
        for measure in MEASURES
    ]


def _reasons(rows: pa.Table) -> dict[str, int]:
    """The commonest reasons of rewards that are null."""
    counts = Counter(reason for reason in rows[REASON].to_pylist() if reason is not None)
    return dict(counts.most_common(REASONS))
