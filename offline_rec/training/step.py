"""One update: micro-batches through the policy, their losses under one denominator, one optimizer step.

Axes: B rows of a micro-batch, S tokens of its longest response.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offline_rec.data.index import IndexedRows
from offline_rec.data.order import Ints
from offline_rec.data.rows import Rows
from offline_rec.models.policy import Policy
from offline_rec.objectives import metrics as metric
from offline_rec.objectives.objective import Objective, Terms
from offline_rec.objectives.signals import Signals, concatenate
from offline_rec.training.engine import Engine

NAMED_ROWS = 5
PerRow = TypeVar("PerRow", Signals, Terms)
WIDE_SCOPES = ("group", "step")


@dataclass(frozen=True)
class StepRows:
    """This rank's part of a step: its rows, and the micro-batches that they are cut into.

    `indexed.group` numbers the groups of the whole step, over all ranks. `anchor` names the field of `rows`
    that ratios are taken against, None where no log-probs are used. `groups` and `tokens` (prompts and
    responses) count those of all ranks. A rank without a group has one row and no batch. `packing`: how well
    the rows fill their passes, and how evenly ranks share the work.
    """

    step: int
    rows: Rows
    indexed: IndexedRows
    batches: Sequence[Ints]
    anchor: str | None
    groups: int
    tokens: int
    packing: dict[str, float]


@dataclass(frozen=True)
class StepResult:
    """What an update did; sums and norm are those of all ranks, row facts those of this one.

    `bad_rows` names rows whose numbers were not finite, or those of the step where it cannot be told.
    """

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    order: Ints
    mean_ratio: NDArray[np.float32]
    kept_share: NDArray[np.float32]
    bad_rows: list[str]


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass, and what the objective knows of them, as tensors on the policy's device.

    The model's layers run at least `passes` times for them.
    """

    rows: Rows
    passes: int
    mask: Tensor  # [B, S]
    behavior: Tensor | None  # [B, S]
    reference: Tensor | None  # [B, S]
    advantages: Tensor  # [B]
    weights: Tensor  # [B]
    groups: Tensor  # [B]
    expert: Tensor  # [B]

    def signals(self, objective: Objective, logprobs: Tensor) -> Signals:
        """The inputs of a coefficient, detached."""
        return objective.signals(
            logprobs,
            self.behavior,
            self.advantages,
            self.mask,
            self.weights,
            reference_logprobs=self.reference,
            groups=self.groups,
            expert=self.expert,
        )


def update(engine: Engine, policy: Policy, objective: Objective, step: StepRows, *, lr: float) -> StepResult:
    """Run one step on all ranks; nothing changes if a loss or the gradient is not finite."""
    micros = micro_batches_of(engine, policy, step)
    own = torch.stack([objective.normalizer(micro.mask, micro.weights) for micro in micros]).sum()
    normalizer = engine.all_reduce_sum(own)
    whole = _whole_step(engine, policy, objective, micros) if objective.scope in WIDE_SCOPES else None
    idle = _idle(engine, objective, micros)
    losses: list[Tensor] = []
    facts: list[dict[str, Tensor]] = []
    finite: list[Tensor] = []
    sums: list[metric.Metrics] = []
    for number, micro in enumerate(micros):
        known = None if whole is None else whole.part(number, micro.mask.shape[1])
        with torch.set_grad_enabled(not idle[number]):
            logprobs, descent = _forward(policy, objective, micro, normalizer, known)
        if known is None:
            seen = micro.signals(objective, logprobs)
            terms = objective.terms(seen)
            sums.append(objective.metrics(seen, terms, normalizer))
        else:
            seen, terms = known
        loss = objective.surrogate(terms.coefficients, logprobs, micro.mask, normalizer)
        if not idle[number]:
            engine.backward(loss if descent is None else descent)
        losses.append(loss.detach())
        facts.append(metric.row_facts(seen, terms.kept))
        counted = torch.where(micro.mask != 0, logprobs.detach(), 0.0)
        every = torch.isfinite(counted).all(1)
        finite.append(torch.stack([every, losses[-1].isfinite().expand(len(every))]))
    if whole is not None:
        # Every rank knows the whole step, and only one of them may count it.
        found = objective.metrics(whole.seen, whole.terms, normalizer)
        sums = [{name: value * (engine.rank == 0) for name, value in found.items()}]
    total = metric.add(sums) | {"loss": torch.stack(losses).sum()}
    measured = _finish(engine, total)
    if np.isfinite(measured["loss"]):
        norm = engine.step(lr)
    else:
        engine.zero()
        norm = float("nan")
    return _result(step, measured, norm, facts=facts, finite=finite)


def _idle(engine: Engine, objective: Objective, micros: Sequence[MicroBatch]) -> list[bool]:
    """Which micro-batches are only measured: on no rank does one of their rows move anything.

    Never all of them: an optimizer moves weights on a gradient of zero, but not where there is none.
    """
    own = [bool(objective.at_rest(micro.advantages, micro.weights).all()) for micro in micros]
    idle = [all(flags) for flags in zip(*engine.gather(np.array(own, np.int64)), strict=True)]
    return idle if not all(idle) else [False, *idle[1:]]


def _forward(
    policy: Policy,
    objective: Objective,
    micro: MicroBatch,
    normalizer: Tensor,
    known: tuple[Signals, Terms] | None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs, [B, S], and the loss as something to differentiate, where the log-probs are not.

    That is where a token's coefficient depends on nothing but the token, or is known before: then the
    gradient of the head is taken in its forward pass.
    """
    if known is None and objective.scope != "token":
        return policy.logprobs(micro.rows, passes=micro.passes), None
    if known is None:
        blank = torch.zeros(micro.mask.shape, dtype=policy.model.dtype, device=policy.device)
        gradient = objective.token_gradient(micro.signals(objective, blank), normalizer)
    else:
        gradient = objective.token_gradient(known[0], normalizer, known[1].coefficients)
    return policy.weighted_logprobs(micro.rows, gradient, passes=micro.passes)


def micro_batches_of(engine: Engine, policy: Policy, step: StepRows) -> list[MicroBatch]:
    """The micro-batches of this rank; all ranks get the same number, so that their forward passes meet.

    What is missing is filled with rows of weight 0, which no sum counts; and where ranks meet in every layer,
    a micro-batch runs the layers as often as on the rank that needs it most.
    """
    together = engine.world_size > 1
    own = [policy.passes(step.rows.select(index)) if together else 1 for index in step.batches]
    passes = _most(engine.gather(np.array(own, np.int64)))
    empty = np.zeros(1, np.int64)
    return [
        _micro_batch(policy, step, step.batches[i], passes=most)
        if i < len(step.batches)
        else _micro_batch(policy, step, empty, passes=most, weight=0.0)
        for i, most in enumerate(passes)
    ]


def _most(ranks: Sequence[Ints]) -> list[int]:
    """The largest of the first, second, ... numbers of all ranks."""
    most = np.zeros(max(len(numbers) for numbers in ranks), np.int64)
    for numbers in ranks:
        most[: len(numbers)] = np.maximum(most[: len(numbers)], numbers)
    return most.tolist()


def _micro_batch(
    policy: Policy, step: StepRows, index: Ints, *, passes: int, weight: float = 1.0
) -> MicroBatch:
    rows = step.rows.select(index)
    width = int(rows.response_ids.lengths.max())
    anchor = getattr(rows, step.anchor) if step.anchor else None

    def tensor(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values[index]).to(policy.device)

    return MicroBatch(
        rows=rows,
        passes=passes,
        mask=policy.pad(rows.mask, width),
        behavior=None if anchor is None else policy.pad(anchor, width),
        reference=None if rows.reference is None else policy.pad(rows.reference, width),
        advantages=tensor(step.indexed.advantage.astype(np.float32)),
        weights=tensor(step.indexed.weight.astype(np.float32)) * weight,
        groups=tensor(step.indexed.group),
        expert=tensor(step.indexed.expert),
    )


@dataclass(frozen=True)
class _WholeStep:
    """Coefficients of a wide scope, fixed over all rows of all ranks before the first backward pass."""

    seen: Signals
    terms: Terms
    starts: Ints

    def part(self, number: int, width: int) -> tuple[Signals, Terms]:
        """Those of one micro-batch of this rank."""
        rows = slice(int(self.starts[number]), int(self.starts[number + 1]))
        return _cut(self.seen, rows, width), _cut(self.terms, rows, width)


def _whole_step(
    engine: Engine, policy: Policy, objective: Objective, micros: Sequence[MicroBatch]
) -> _WholeStep:
    with torch.no_grad():
        own = [micro.signals(objective, policy.logprobs(micro.rows, passes=micro.passes)) for micro in micros]
    sizes = np.array([len(seen.weights) for seen in own])
    ranks = _gather_signals(engine, concatenate(own))
    before = sum(len(seen.weights) for seen in ranks[: engine.rank])
    whole = concatenate(ranks)
    return _WholeStep(whole, objective.terms(whole), before + np.cumsum([0, *sizes]))


def _gather_signals(engine: Engine, own: Signals) -> list[Signals]:
    """The signals of every rank, on every rank."""
    if engine.world_size == 1:
        return [own]
    found: list[dict[str, Tensor | None]] = [{} for _ in range(engine.world_size)]
    for field in fields(Signals):
        tensor = getattr(own, field.name)
        arrays = [None] * engine.world_size if tensor is None else engine.gather(tensor.cpu().numpy())
        for rank, array in enumerate(arrays):
            found[rank][field.name] = None if array is None else torch.from_numpy(array).to(engine.device)
    return [Signals(**values) for values in found]  # type: ignore[arg-type]  # None only where it may be


def _cut(whole: PerRow, rows: slice, width: int) -> PerRow:
    """Some rows of every tensor, and as many of their tokens."""
    parts: dict[str, Any] = {}
    for field in fields(whole):
        tensor = getattr(whole, field.name)
        part = None if tensor is None else tensor[rows]
        parts[field.name] = part[:, :width] if part is not None and part.dim() == 2 else part
    return type(whole)(**parts)


def _finish(engine: Engine, sums: metric.Metrics) -> dict[str, float]:
    """The metrics of the step, summed over ranks in one exchange."""
    names = sorted(sums)
    together = engine.all_reduce_sum(torch.stack([sums[name].to(torch.float64) for name in names]))
    return metric.finish(dict(zip(names, together, strict=True)))


def _result(
    step: StepRows,
    measured: dict[str, float],
    norm: float,
    *,
    facts: Sequence[dict[str, Tensor]],
    finite: Sequence[Tensor],
) -> StepResult:
    """`finite`: whether a row's log-probs, and its micro-batch's loss, are finite, [2, B] each."""
    real = len(step.batches)
    order = np.concatenate([*step.batches, np.zeros(0, np.int64)]).astype(np.int64)
    ratio, kept = (_joined([fact[name] for fact in facts[:real]]) for name in ("mean_ratio", "kept_share"))
    bad: list[str] = []
    if not (np.isfinite(norm) and np.isfinite(measured["loss"])):
        suspects = [order[_joined([pair[i] for pair in finite[:real]]) == 0] for i in (0, 1)]
        named = next((rows for rows in suspects if len(rows)), order)
        bad = [step.rows.response_id[i] for i in named[:NAMED_ROWS]]
    return StepResult(measured["loss"], norm, measured, order, ratio, kept, bad)


def _joined(parts: Sequence[Tensor]) -> NDArray[np.float32]:
    if not parts:
        return np.zeros(0, np.float32)
    joined: NDArray[np.float32] = torch.cat(list(parts)).float().cpu().numpy()
    return joined
