"""`fit`: from a configuration to an improved policy in a run directory."""

import shlex
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from offline_rec.cards.write import write_run_cards
from offline_rec.config import FitConfig
from offline_rec.data.admission import LEFT_OUT
from offline_rec.models.policy import Policy
from offline_rec.training import checkpoint, trackers
from offline_rec.training.engine import Engine
from offline_rec.training.engines.choose import choose_engine
from offline_rec.training.engines.ranks import together
from offline_rec.training.loop import CHECKPOINTS, Loop, Run, facts_of
from offline_rec.training.memory import memory_named
from offline_rec.training.metrics import Record
from offline_rec.training.prepare import lead, note, prepare
from offline_rec.training.run_folder import held, writing
from offline_rec.training.trackers import tracking

MODEL = "model"

HELDOUT = {
    "reward logged": "value_logged",
    "reward estimated now": "value",
    "kl": "kl",
    "ess": "ess",
}
"""Held-out measurements that a result tells."""


@dataclass(frozen=True)
class FitResult:
    """What a fit came to.

    `model` is a plain Hugging Face directory with the weights after `model_step`: the last step or, where
    `stopped` says why a guard ended the run, the best checkpoint. `skipped` of the `steps` were not finite.
    `last` is the last record of metrics.jsonl.
    """

    out: Path
    model: Path
    steps: int
    model_step: int
    stopped: str | None
    best_step: int | None
    skipped: int
    rows: int
    groups: int
    left_out: dict[str, int]
    notes: list[str]
    last: Record

    def lines(self) -> list[str]:
        """The result as text, without what the notes said already."""
        where = f"{self.model_step} of {self.steps}" if self.model_step != self.steps else f"{self.steps}"
        shown = [f"{self.model}: after step {where}, on {self.rows} responses in {self.groups} groups"]
        if self.stopped:
            shown.append(f"stopped early: {self.stopped}")
        if self.skipped:
            shown.append(f"skipped: {self.skipped} steps whose loss or gradient was not finite")
        measured = self.last.get("heldout", {})
        found = [
            f"{name} {measured[key]:.4g}" for name, key in HELDOUT.items() if measured.get(key) is not None
        ]
        if found:
            shown.append(f"held-out responses, at step {self.last['step']}: {', '.join(found)}")
        return [*shown, f'how it went: rec sql {shlex.quote(str(self.out))} "SELECT * FROM metrics"']


def fit(
    config: FitConfig,
    *,
    resume: bool = False,
    progress: Callable[[dict[str, Any]], None] | None = None,
    engine: Engine | None = None,
) -> FitResult:
    """Fit a policy to a dataset; `resume` goes on from the last whole checkpoint, to the same weights.

    `progress` is called on rank 0 with a dict an event: {"event": "note", "text"}, {"event": "stage",
    "stage", "done", "total"} or {"event": "step", "total", ...} with a record of metrics.jsonl. `ConfigError`
    and `DataError` say what is wrong with configuration or data, before anything is written where they can.
    Under a launcher of processes every rank calls this; `LostRank` says that another one has gone.
    """
    trackers.chosen(config)
    # Arrow's own allocator keeps what is freed: row groups come and go, and memory grew with their number.
    pa.set_memory_pool(pa.system_memory_pool())
    if engine is not None:
        return _fit(config, engine, resume=resume, progress=progress)
    engine = choose_engine(config)
    result = _fit(config, engine, resume=resume, progress=progress)
    engine.close()
    return result


def _fit(
    config: FitConfig, engine: Engine, *, resume: bool, progress: Callable[[dict[str, Any]], None] | None
) -> FitResult:
    tell = progress if progress is not None and engine.rank == 0 else _silent
    with writing(Path(config.out)), memory_named(config), together(engine.rank):
        run, found = prepare(config, engine, resume=resume, progress=tell)
        for text in (*run.snapshot.notes, *_counted(run.snapshot.left_out)):
            tell(note(text))
        loop = Loop(run, tell)
        leads = engine.rank == 0
        with held(run.folder) if leads else nullcontext():
            if found is not None:
                loop.restore(found)
            else:
                loop.begin()
            loop.drop_later_records()
            follows = tracking(config, run.folder, loop.step, tell) if leads else nullcontext(tell)
            with follows as loop.progress:
                loop.go()
            model_step = _publish(run, loop)
    return FitResult(
        out=run.folder,
        model=run.folder / MODEL,
        steps=loop.step,
        model_step=model_step,
        stopped=loop.stopped,
        best_step=int(loop.best["step"]) if loop.best else None,
        skipped=loop.non_finite.total,
        rows=run.snapshot.rows,
        groups=run.snapshot.groups,
        left_out=run.snapshot.left_out,
        notes=run.snapshot.notes,
        last=loop.last,
    )


def _publish(run: Run, loop: Loop) -> int:
    """Put the weights that the run ends with into `model/`; returns their step.

    After a drift these are those of the best checkpoint by held-out measurement, else of the last one before
    the drift, else of the start.
    """
    root = run.folder / CHECKPOINTS
    step = loop.step
    if loop.stopped is not None:
        best = [int(loop.best["step"])] if loop.best else []
        first = run.first_step
        latest = [*best, *reversed(checkpoint.steps(root)), first]
        step = next(s for s in latest if s == first or checkpoint.verify(root / f"step-{s}") is None)
    source = root / f"step-{step}" if step > run.first_step else run.continued
    lead(run.engine, partial(_copy, run, source, step))
    lead(run.engine, partial(write_run_cards, run.folder, step))
    return step


def _copy(run: Run, source: Path | None, step: int) -> None:
    """Make `model/`, and `adapter/` of a fit of adapters, from a checkpoint or from the start."""
    config, target = run.config, run.folder / MODEL
    if source is not None and run.policy.adapter is None:
        _copy_folder(source / checkpoint.MODEL_FOLDER, target)
        return
    adapter = None if source is None else source / checkpoint.ADAPTER_FOLDER
    if adapter is not None:
        _copy_folder(adapter, run.folder / checkpoint.ADAPTER_FOLDER)
    # Merged into the weights that it was fitted on: rounded ones, if they were.
    quantise = config.quantise if adapter else None
    dtype = str(run.policy.model.dtype).removeprefix("torch.")
    whole = Policy.load(adapter or config.model, device="cpu", dtype=dtype, quantise=quantise)
    whole.save(target, facts=facts_of(config, step))


def _copy_folder(source: Path, target: Path) -> None:
    staged = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(source, staged)
    checkpoint.publish_folder(staged, target)


def _counted(left_out: dict[str, int]) -> list[str]:
    return [f"{count} rows are left out: {LEFT_OUT[reason]}" for reason, count in left_out.items()]


def _silent(event: dict[str, Any]) -> None:
    """Tell nobody."""
