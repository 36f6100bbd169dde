"""A chunk of logits: from products of hidden states and head to log-probs of targets, and to their gradient.

Two ways to the same numbers: operations of torch, and the kernels of `offline_rec.models.fused`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from offline_rec.models.logprobs import Head

SLICE_ELEMENTS = 1 << 18
"""Logits that pass through a CPU's cache together, from their maximum to their exponentials."""

MOVED_ROWS = 8


class Chunk:
    """The products h W' of the tokens `part`, and in their memory whatever is made of them.

    values: [tokens, vocabulary]; part, targets, temperature (None is 1 everywhere): [tokens]. Without
    `sloped` no gradient will be asked for.
    """

    def __init__(
        self,
        part: Tensor,
        product: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        head: "Head",
        *,
        sloped: bool,
    ) -> None:
        self.part, self.targets = part, targets
        self.temperature, self.head = temperature, head
        self.values = product
        self._begin(sloped)

    def _begin(self, sloped: bool) -> None:
        self.values = self.head.finish(self.values)
        cap = self.head.softcap
        # How logits follow what the softcap was put on.
        self._slope = 1 - (self.values / cap).square_() if sloped and cap else None
        self._total: Tensor | float = 1.0

    def normalise(self) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets, and log of the sum of exponentials; may be asked for once."""
        found = []
        for rows, z in self._slices():
            peak = z.amax(1)
            picked = z.gather(1, self.targets[rows, None])[:, 0] - peak
            total = z.sub_(peak[:, None]).exp_().sum(1)
            log_sum = total.log()
            found.append(torch.stack([(picked - log_sum).clamp_(max=0), peak + log_sum, total]))
        logprobs, log_total, self._total = torch.cat(found, 1)
        return logprobs, log_total

    def resume(self, log_total: Tensor) -> None:
        """What `normalise` leaves behind, from the log of the sum that it gave."""
        for rows, z in self._slices():
            z.sub_(log_total[rows, None]).exp_()

    def descend(self, coefficient: Tensor, dtype: torch.dtype) -> None:
        """The values become the gradient of sum(coefficient * log-probs) with respect to h W' + b.

        That is coefficient * (onehot - probabilities) / temperature * slope * scale, in `dtype` or better.
        """
        if self.temperature is not None:
            coefficient = coefficient / self.temperature
        coefficient = coefficient * self.head.scale
        self.values.mul_((-coefficient / self._total)[:, None])
        self.values.scatter_add_(1, self.targets[:, None], coefficient[:, None])
        if self._slope is not None:
            self.values *= self._slope

    def keep(self, live: Tensor) -> None:
        """Leave out tokens, moving rows into the gaps one by one: a copy would be a second chunk."""
        count = int(live.sum())
        if count == len(live):
            return
        gaps, movers = (~live[:count]).nonzero()[:, 0], count + live[count:].nonzero()[:, 0]
        for gap, mover in zip(torch.split(gaps, MOVED_ROWS), torch.split(movers, MOVED_ROWS), strict=True):
            self.values[gap] = self.values[mover]
        order = torch.arange(count, device=live.device)
        order[gaps] = movers
        self.part, self.values = self.part[order], self.values[:count]

    def _slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Logits over temperature, as many rows at a time as a CPU's cache holds."""
        tokens, vocabulary = self.values.shape
        step = tokens if self.values.is_cuda else max(SLICE_ELEMENTS // vocabulary, 1)
        for start in range(0, tokens, step):
            rows = slice(start, start + step)
            z = self.values[rows]
            yield rows, z if self.temperature is None else z.div_(self.temperature[rows, None])


class FusedChunk(Chunk):
    """The same by two kernels, each of which goes through the chunk once."""

    _sums: tuple[Tensor, Tensor]

    def _begin(self, sloped: bool) -> None:
        """Products stay what they are: the kernels finish them as they read."""

    def normalise(self) -> tuple[Tensor, Tensor]:
        """See `Chunk.normalise`."""
        from offline_rec.models import fused

        peak, total, picked = fused.reduce(self.values, self.targets, self.temperature, self.head)
        log_sum = total.log()
        self._sums = peak, total
        return (picked - peak - log_sum).clamp_(max=0), peak + log_sum

    def resume(self, log_total: Tensor) -> None:
        """See `Chunk.resume`."""
        self._sums = log_total, torch.ones_like(log_total)

    def descend(self, coefficient: Tensor, dtype: torch.dtype) -> None:
        """See `Chunk.descend`."""
        from offline_rec.models import fused

        given = self.values, self.targets, self.temperature, self.head
        self.values = fused.descend(*given, coefficient=coefficient, sums=self._sums, dtype=dtype)
