"""What a coefficient may depend on: detached, checked, and zero wherever the mask is 0.

Axes: B rows (responses), S tokens. A row of weight 0 is masked out here, so that no part ever sees it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from data_tools.errors import DataError
from offline_rec.objectives import ratios

MANY = 8
"""Row positions that an error message lists."""


@dataclass(frozen=True)
class Signals:
    """The inputs of an objective, as `signals` makes them.

    `behavior` and `reference` are NaN where a log-prob is missing; reading `log_ratio` or
    `reference_log_ratio` refuses that, so no part can take a missing value for a ratio of 1.
    """

    logprobs: Tensor  # [B, S]
    behavior: Tensor | None  # [B, S]
    reference: Tensor | None  # [B, S]
    advantages: Tensor  # [B, S]
    mask: Tensor  # [B, S] bool
    weights: Tensor  # [B]
    groups: Tensor | None  # [B] integers
    expert: Tensor | None  # [B] bool

    @cached_property
    def lengths(self) -> Tensor:
        """Unmasked tokens of each row, [B], in the type of the log-probs."""
        return self.mask.sum(1).to(self.logprobs.dtype)

    @cached_property
    def log_ratio(self) -> Tensor:
        """log(pi / mu) per token; `DataError` names rows where mu is missing."""
        return self._log_ratio(self.behavior, self.mask, "behaviour log-probs")

    @cached_property
    def ratio(self) -> Tensor:
        """pi / mu per token."""
        return ratios.exponential(self.log_ratio)

    @cached_property
    def sampled_log_ratio(self) -> Tensor:
        """log(pi / mu) on the rows that are not an expert's, 0 on the others, which need no mu."""
        return self._log_ratio(self.behavior, self.mask & ~self.expert_rows[:, None], "behaviour log-probs")

    @cached_property
    def reference_log_ratio(self) -> Tensor:
        """log(pi / ref) per token; `DataError` names rows where ref is missing."""
        return self._log_ratio(self.reference, self.mask, "reference log-probs")

    @property
    def expert_rows(self) -> Tensor:
        """[B] bool; `DataError` if nobody said which rows an expert wrote."""
        if self.expert is None:
            raise DataError("the objective needs to know expert rows", "pass expert, a bool per row")
        return self.expert

    @property
    def group_ids(self) -> Tensor:
        """[B] integers; `DataError` if nobody said which rows belong together."""
        if self.groups is None:
            raise DataError("the objective compares the rows of a group", "pass groups, an integer per row")
        return self.groups

    def of_tokens(self, positions: Tensor, logprobs: Tensor) -> "Signals":
        """Tokens as responses of their own, with these log-probs: all that a part of scope `token` looks at.

        `positions`: [n], in the flattened [B, S]; `logprobs`: [n].
        """
        row = positions // self.mask.shape[1]

        def tokens(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.flatten()[positions][:, None]

        def rows(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[row]

        mask = self.mask.flatten()[positions][:, None]
        return Signals(
            logprobs=torch.where(mask, ratios.precise(logprobs.detach())[:, None], 0.0),
            behavior=tokens(self.behavior),
            reference=tokens(self.reference),
            advantages=self.advantages.flatten()[positions][:, None],
            mask=mask,
            weights=self.weights[row],
            groups=rows(self.groups),
            expert=rows(self.expert),
        )

    def row_sum(self, values: Tensor) -> Tensor:
        """Sum over the unmasked tokens of each row, [B]."""
        return torch.where(self.mask, values, 0.0).sum(1)

    def row_mean(self, values: Tensor) -> Tensor:
        """Mean over the unmasked tokens of each row, [B]; 0 for a row without tokens."""
        return self.row_sum(values) / self.lengths.clamp(min=1)

    def _log_ratio(self, old: Tensor | None, where: Tensor, what: str) -> Tensor:
        if old is None:
            if bool(where.any()):
                raise DataError(f"the objective needs {what}, and there are none", _WAYS_OUT)
            return torch.zeros_like(self.logprobs)
        missing = (where & ~torch.isfinite(old)).any(1)
        _refuse(missing, f"{what} are missing or not finite on unmasked tokens", _WAYS_OUT)
        return torch.where(where, ratios.log_ratio(self.logprobs, torch.where(where, old, 0.0)), 0.0)


_WAYS_OUT = (
    "score the rows (rec score), take ratios against the start (--anchor start), or filter the rows out"
)


def signals(
    logprobs: Tensor,
    behavior_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    *,
    reference_logprobs: Tensor | None = None,
    groups: Tensor | None = None,
    expert: Tensor | None = None,
) -> Signals:
    """Detach, widen to at least fp32, blank what is masked, and refuse shapes or numbers that make no sense.

    `logprobs`, `behavior_logprobs`, `reference_logprobs`, `mask`: [B, S]; `advantages`: [B] or [B, S];
    `weights`, `groups`, `expert`: [B]. `DataError` names the positions of rows whose advantage or weight is
    not finite.
    """
    current = ratios.precise(logprobs.detach())
    tokens = (behavior_logprobs, reference_logprobs, mask)
    rows, _ = _check_shapes(logprobs, tokens, (weights, groups, expert))
    given = current.new_ones(rows) if weights is None else weights.detach().to(current.dtype)
    if advantages.shape not in ((rows,), current.shape):
        raise DataError(f"advantages are {list(advantages.shape)}, log-probs {list(current.shape)}", _SHAPES)
    per_token = advantages.detach().to(current.dtype)
    per_token = (per_token[:, None] if per_token.dim() == 1 else per_token).expand_as(current)
    exists = (mask != 0) & (given != 0)[:, None]
    _refuse(~torch.isfinite(given) | (given < 0), "weights are negative or not finite")
    _refuse((exists & ~torch.isfinite(per_token)).any(1), "advantages are not finite")
    return Signals(
        logprobs=torch.where(exists, current, 0.0),
        behavior=_old(behavior_logprobs, current),
        reference=_old(reference_logprobs, current),
        advantages=torch.where(exists, per_token, 0.0),
        mask=exists,
        weights=given,
        groups=groups,
        expert=None if expert is None else expert != 0,
    )


def concatenate(parts: Sequence[Signals]) -> Signals:
    """The signals of a whole step from those of its micro-batches, padded to the longest row.

    `DataError` if an optional input is there for some of them only.
    """
    longest = max(part.mask.shape[1] for part in parts)

    def joined(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        if all(tensor is None for tensor in tensors):
            return None
        if any(tensor is None for tensor in tensors):
            raise DataError(f"{name} is given for some micro-batches of a step only")
        return torch.cat([_padded(tensor, longest) if tensor.dim() == 2 else tensor for tensor in tensors])

    fields = {name: joined(name) for name in Signals.__dataclass_fields__}
    return Signals(**fields)  # type: ignore[arg-type]  # only the optional fields can be None


def _padded(tensor: Tensor, longest: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, longest - tensor.shape[1]))


def _old(logprobs: Tensor | None, like: Tensor) -> Tensor | None:
    return None if logprobs is None else logprobs.detach().to(like.dtype)


_SHAPES = "log-probs and mask are [batch, seq], advantages [batch] or [batch, seq], the rest [batch]"


def _check_shapes(
    logprobs: Tensor, tokens: Sequence[Tensor | None], rows: Sequence[Tensor | None]
) -> tuple[int, int]:
    shape = tuple(logprobs.shape)
    if len(shape) != 2:
        raise DataError(f"log-probs have {len(shape)} axes, not 2", _SHAPES)
    for tensor in tokens:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise DataError(f"log-probs are {list(shape)}, another input {list(tensor.shape)}", _SHAPES)
    for tensor in rows:
        if tensor is not None and tuple(tensor.shape) != shape[:1]:
            raise DataError(f"there are {shape[0]} rows, another input has {list(tensor.shape)}", _SHAPES)
    return shape


def _refuse(bad: Tensor, what: str, hint: str = "") -> None:
    """Raise for rows marked in `bad`, [B], naming the positions of the first few."""
    if not bool(bad.any()):
        return
    positions = bad.nonzero().flatten().tolist()
    listed = ", ".join(map(str, positions[:MANY])) + (", ..." if len(positions) > MANY else "")
    raise DataError(f"{what} in {len(positions)} of {len(bad)} rows: positions {listed}", hint)
