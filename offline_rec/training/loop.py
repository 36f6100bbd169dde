"""The loop: read, update, measure, guard, save; for any algorithm and any number of processes."""

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from data_tools.errors import Interrupted
from offline_rec.config import FitConfig, to_yaml
from offline_rec.data.snapshot import Snapshot
from offline_rec.models.policy import Policy
from offline_rec.objectives.objective import Objective
from offline_rec.training import checkpoint, lineage
from offline_rec.training.engine import Engine
from offline_rec.training.guards import DriftGuard, NonFiniteGuard
from offline_rec.training.heldout import HeldOut
from offline_rec.training.interrupts import Interrupts
from offline_rec.training.lineage import LineageWriter
from offline_rec.training.metrics import MetricsLog, Record
from offline_rec.training.reader import Prefetcher, StepSource
from offline_rec.training.schedule import learning_rate
from offline_rec.training.step import StepResult, StepRows, update

CHECKPOINTS = "checkpoints"
SCORE = "reward_weighted_logprob"
"""The held-out measurement by which checkpoints are compared: the higher the better."""

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Run:
    """Everything a loop needs, ready: the same on every rank but for the engine."""

    config: FitConfig
    folder: Path
    snapshot: Snapshot
    policy: Policy
    objective: Objective
    engine: Engine
    source: StepSource
    heldout: HeldOut | None
    total_steps: int
    continued: Path | None = None
    """Checkpoint of another run that this one begins with, `first_step` updates after the start."""
    first_step: int = 0

    @property
    def leads(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.engine.rank == 0


class Loop:
    """The state of a run between two steps, all of which a checkpoint holds."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.run = run
        self.progress = progress
        self.step = run.first_step
        self.stopped: str | None = None
        self.best: dict[str, float] | None = None
        self.non_finite = NonFiniteGuard(run.config.max_skipped)
        self.drift = DriftGuard(run.config.max_kl, run.config.min_ess)
        self.last: Record = {}
        self._metrics = MetricsLog(run.folder)
        self._lineage = LineageWriter(run.folder / "lineage", run.engine.rank)

    def restore(self, folder: Path) -> None:
        """Take up the state of a checkpoint; the policy already has its weights."""
        state = checkpoint.read_state(folder)
        self.step = state["step"]
        self.best = state["best"]
        self.non_finite.in_row, self.non_finite.total = state["skipped_in_row"], state["skipped"]
        self.run.engine.load(folder)

    def begin(self) -> None:
        """Take up the optimizer of the run that this one continues, if any; the policy has its weights."""
        if self.run.continued is not None:
            self.run.engine.load(self.run.continued)

    def drop_later_records(self) -> None:
        """Forget the records of steps that the checkpoint does not know: they are made again."""
        if self.run.leads:
            self._metrics.drop_after(self.step if self.step > self.run.first_step else -1)
            lineage.drop_after(self.run.folder / "lineage", self.step)
        self.run.engine.barrier()

    def go(self) -> None:
        """Run to the last step, or until a guard stops."""
        with (
            Prefetcher(self.run.source.read, self.step + 1, self.run.total_steps) as reader,
            Interrupts(self._leaving) as interrupts,
        ):
            if self.step == self.run.first_step and self.run.heldout is not None:
                self._note({"step": self.step, "heldout": self._measure(self.run.heldout)})
            while self.step < self.run.total_steps and self.stopped is None:
                if self._any_asked(interrupts):
                    self._leave()
                began = time.perf_counter()
                rows = reader.get(self.step + 1)
                self._advance(rows, began, waited=time.perf_counter() - began)
        self.non_finite.check_all(self.step)

    def _any_asked(self, interrupts: Interrupts) -> bool:
        """Whether a rank was asked to stop: all of them must, after the same step."""
        asked = torch.tensor(float(interrupts.asked))
        return float(self.run.engine.all_reduce_sum(asked)) > 0

    def _leaving(self) -> None:
        self.progress({"event": "note", "text": "stopping after this step; interrupt again to stop at once"})

    def _leave(self) -> NoReturn:
        """Save what an interrupt would lose. Without a score: a resume chooses the same best checkpoint."""
        if self.step % self.run.config.save_every:
            self._save({})
        raise Interrupted(
            f"interrupted after step {self.step} of {self.run.total_steps}",
            f"go on with: rec fit --out {shlex.quote(str(self.run.folder))} --resume",
        )

    def _advance(self, rows: StepRows, began: float, *, waited: float) -> None:
        run, config = self.run, self.run.config
        step = rows.step
        lr = learning_rate(
            step,
            peak=config.lr,
            total=config.schedule_steps or run.total_steps,
            warmup=config.warmup_steps,
            shape=config.schedule,
        )
        result = update(run.engine, run.policy, run.objective, rows, lr=lr)
        seconds = time.perf_counter() - began
        record = self._record(rows, result, lr)
        saves = step % config.save_every == 0 or step == run.total_steps
        if run.heldout is not None and (saves or step % (config.eval_every or 1) == 0):
            record["heldout"] = self._measure(run.heldout)
        self.stopped = self._drifted(record)
        record |= {"stopped": self.stopped} if self.stopped else {}
        record["timing"] = {
            "seconds": seconds,
            "seconds_waited": waited,
            "tokens_per_second": rows.tokens / seconds,
            **rows.packing,
        }
        self.step = step
        self._note(record)
        if not self.non_finite.check(step, result.loss, result.grad_norm, result.bad_rows):
            self._trace(rows, result)
        if saves and self.stopped is None:
            self._save(record)

    def _record(self, rows: StepRows, result: StepResult, lr: float) -> Record:
        done = self.run.source.position(rows.step - 1, rows.groups)
        epoch = done.epoch + done.ordinal / self.run.source.order.n_groups
        finite = np.isfinite(result.loss) and np.isfinite(result.grad_norm)
        return {
            "step": rows.step,
            "epoch": epoch,
            "groups": rows.groups,
            "lr": lr,
            "grad_norm": result.grad_norm,
            **result.metrics,
            **({} if finite else {"skipped": True, "bad_rows": result.bad_rows}),
        }

    def _measure(self, heldout: HeldOut) -> dict[str, float]:
        budget = self.run.config.token_budget
        return heldout.measure(self.run.engine, self.run.policy, token_budget=budget)

    def _drifted(self, record: Record) -> str | None:
        """The reason to stop, on the rows of the step or on held-out ones, where these were measured."""
        step = {"kl": record.get("kl_k3"), "ess": record.get("ess_response")}
        return self.drift.reason(step, f"the rows of step {record['step']}") or self.drift.reason(
            record.get("heldout", {}), f"held-out rows after step {record['step']}"
        )

    def _note(self, record: Record) -> None:
        self.last = record
        if self.run.leads:
            self._metrics.append(record)
            self.progress({"event": "step", "total": self.run.total_steps, **record})

    def _trace(self, rows: StepRows, result: StepResult) -> None:
        self._lineage.add(
            rows.step,
            [rows.rows.response_id[i] for i in result.order],
            weight=rows.indexed.weight[result.order],
            mean_ratio=result.mean_ratio,
            kept_share=result.kept_share,
        )

    def _save(self, record: Record) -> None:
        """Write a checkpoint, once the records of its steps are on disk."""
        run, root = self.run, self.run.folder / CHECKPOINTS
        self._lineage.flush()
        score = record.get("heldout", {}).get(SCORE)
        if score is not None and (self.best is None or score > self.best["score"]):
            self.best = {"step": self.step, "score": score}
        staged = root / f".step-{self.step}.tmp"
        if run.leads:
            self._metrics.sync()
            staged = checkpoint.staging_folder(root, self.step)
        run.engine.barrier()
        run.engine.save(staged)
        weights = run.engine.weights()
        if run.leads:
            self._write_weights(staged, weights)
        run.engine.barrier()
        if run.leads:
            (staged / "config.yaml").write_text(to_yaml(run.config), encoding="utf-8")
            checkpoint.commit(staged, self.step, self._state(), run.policy.shapes)
            kept = {int(self.best["step"])} if self.best else set()
            checkpoint.prune(root, kept, run.config.keep_checkpoints)
        run.engine.barrier()

    def _write_weights(self, staged: Path, weights: dict[str, Tensor] | None) -> None:
        """What was fitted: the model, or the adapter alone."""
        policy, facts = self.run.policy, facts_of(self.run.config, self.step)
        if policy.adapter is None:
            policy.save(staged / checkpoint.MODEL_FOLDER, facts=facts, state=weights)
        else:
            folder = staged / checkpoint.ADAPTER_FOLDER
            state = None if weights is None else policy.without_wrapper(weights)
            policy.adapter.save(folder, base=self.run.config.model, facts=facts, state=state)

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "snapshot": self.run.snapshot.hash,
            "position": asdict(self.run.source.position(self.step)),
            "best": self.best,
            "skipped": self.non_finite.total,
            "skipped_in_row": self.non_finite.in_row,
        }


def facts_of(config: FitConfig, step: int) -> dict[str, Any]:
    """What the card of the weights after a step tells."""
    adapted = {"adapter": f"rank {config.lora_rank}, alpha {config.lora_alpha:g}"} if config.lora_rank else {}
    return {
        "algorithm": config.algorithm,
        "started from": config.model,
        "data": config.dataset,
        "updates": step,
        "seed": config.seed,
        **adapted,
    }
