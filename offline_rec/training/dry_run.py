"""`rec fit --dry-run`: what a fit would do, how much memory it takes and how much is free. Trains nothing.

No weight is read and no log-prob computed. Token ids that the dataset lacks are made, and kept, as by a fit.
"""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from data_tools.errors import RecError
from offline_rec.config import FitConfig
from offline_rec.data.admission import LEFT_OUT
from offline_rec.models.footprint import context_of
from offline_rec.models.loading import choose_device, load_tokenizer
from offline_rec.training.budget import settled
from offline_rec.training.memory import (
    Estimate,
    check_memory,
    estimate,
    free_bytes,
    micro_batch_tokens,
    readable,
)
from offline_rec.training.plan import Plan, dataset_of, remarks
from offline_rec.training.prepare import check_data, length
from offline_rec.training.run_data import RunData, index_rows, make_tokens, steady_connection
from offline_rec.training.run_folder import check_folder


@dataclass(frozen=True)
class DryRun:
    """What a fit would train on, for how long, and with what memory.

    `tokens` are those of prompts and responses of one pass over the groups, `longest` those of the longest
    row. `memory` is None where the model's configuration does not tell, `free` where the device does not.
    `scores`: the policies whose log-probs would be computed first. `problem` is the error with which the fit
    would stop for want of memory.
    """

    rows: int
    groups: int
    tokens: int
    longest: int
    left_out: dict[str, int]
    heldout_groups: int
    steps: int
    groups_per_step: int
    epochs: float
    tokens_per_micro_batch: int
    scores: list[str]
    device: str
    memory: Estimate | None
    free: int | None
    notes: list[str]
    problem: str | None

    def text(self) -> str:
        """The facts, then the table of memory."""
        lines = [
            f"train on: {self.rows} responses in {self.groups} groups, {self.tokens} tokens a pass, "
            f"longest row {self.longest}",
            *(f"left out: {count} rows, {LEFT_OUT[reason]}" for reason, count in self.left_out.items()),
            f"measure on: {self.heldout_groups} held-out groups",
            f"updates: {self.steps} of {self.groups_per_step} groups, {self.epochs:.3g} passes, about "
            f"{round(self.tokens * self.epochs)} tokens",
            f"micro-batches: up to {self.tokens_per_micro_batch} tokens",
            *(f"first: log-probs of all rows under {model}" for model in self.scores),
            *(f"note: {text}" for text in self.notes),
            "",
            *self._memory_lines(),
            *([f"problem: {self.problem}"] if self.problem else []),
        ]
        return "\n".join(lines)

    def _memory_lines(self) -> list[str]:
        free = "not told" if self.free is None else readable(self.free)
        if self.memory is None:
            return [f"memory: the model's configuration does not tell; free on {self.device}: {free}"]
        unknown = [] if self.memory.activations_known else ["the activations of this model are not known"]
        counts = f"{self.memory.trained} of {self.memory.parameters} parameters are trained"
        table = [f"  {name:<32}{readable(size):>12}" for name, size in self.memory.rows()]
        return [f"memory on {self.device}: {counts}", *table, f"  {'free':<32}{free:>12}", *unknown]

    def facts(self) -> dict[str, Any]:
        """The same as JSON-able values, sizes in bytes."""
        peak = {} if self.memory is None else {"peak": self.memory.peak}
        memory = None if self.memory is None else asdict(self.memory) | peak
        return asdict(self) | {"memory": memory}


def dry_run(config: FitConfig, *, progress: Callable[[dict[str, Any]], None] | None = None) -> DryRun:
    """Prepare a run in a temporary folder; `ConfigError` and `DataError` as a fit would raise them."""
    plan, ds, device = Plan.of(config), dataset_of(config), choose_device(config.device)
    check_folder(config, resume=False)
    check_data(ds, plan, config)
    tokenizer = load_tokenizer(config.model)
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = config.model_copy(update={"out": folder})
        tell = progress or (lambda event: None)
        run = RunData(elsewhere, plan, ds, tokenizer, context_of(config.model), tell)
        with steady_connection(ds, datetime.now(UTC)) as (con, files):
            tokens = make_tokens(run, con)
            notes = [*tokens.notes, *remarks(con, plan, config)]
            train, heldout = index_rows(run, con, files, tokens)
    config = settled(config, device, train)
    size = {"groups": train.groups, "longest": train.longest, "largest_group": train.largest_group}
    batch = micro_batch_tokens(config, **size)
    needs = estimate(config, device, tokens=batch, longest=train.longest)
    groups_per_step, steps, visits = length(config, train.groups)
    return DryRun(
        rows=train.rows,
        groups=train.groups,
        tokens=train.tokens,
        longest=train.longest,
        left_out={reason: count for reason, count in train.left_out.items() if count},
        heldout_groups=min(heldout.groups, config.eval_groups),
        steps=steps,
        groups_per_step=groups_per_step,
        epochs=visits / train.groups,
        tokens_per_micro_batch=config.token_budget,
        scores=_scores(config, plan),
        device=str(device),
        memory=needs,
        free=free_bytes(device),
        notes=notes,
        problem=None if needs is None else _problem(needs, config),
    )


def _scores(config: FitConfig, plan: Plan) -> list[str]:
    """The policies whose log-probs a fit would compute, as far as the dataset has them not."""
    anchors = [] if config.anchor in ("behavior", "none") else [config.anchor]
    references = [config.reference or "start"] if plan.needs_reference else []
    named = [config.model if name == "start" else name for name in (*anchors, *references)]
    return list(dict.fromkeys(named))


def _problem(needs: Estimate, config: FitConfig) -> str | None:
    try:
        check_memory(needs, config, choose_device(config.device), ranks=1)
    except RecError as error:
        return str(error)
    return None
