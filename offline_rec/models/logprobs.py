"""Log-probs of given tokens straight from hidden states and the output head, in chunks of tokens.

log softmax(z)[y] with z = cap * tanh(scale * (h W' + b) / cap) / temperature. Logits exist for one chunk at
a time, forward and backward, so the memory beyond hidden states and head gradient is chunk x vocabulary,
however many tokens there are.

`token_logprobs` may be differentiated in any way; its backward pass computes each chunk's logits again: 8/6
of the operations of keeping them. `weighted_logprobs` is for a gradient sum_t c_t grad log pi(y_t) whose c_t
depends on token t alone: it is taken while the chunk is there, and no logits are computed twice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 27}
"""Logits of a chunk: 128 MiB on a CPU, 512 MiB on a GPU, where only large chunks are bound by arithmetic."""

SLICE_ELEMENTS = 1 << 18
"""Logits that pass through a CPU's cache together, from their maximum to their exponentials."""

SLICE_ROWS = 1 << 14
MOVED_ROWS = 8
HALF = (torch.bfloat16, torch.float16)

Weigh = Callable[[Tensor, Tensor], Tensor]
"""From the numbers of some tokens and their log-probs, [n] each and detached, to their coefficients, [n]."""


@dataclass(frozen=True)
class Head:
    """The map from a hidden state to logits: `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`.

    weight: [vocabulary, hidden]; bias: [vocabulary] or None; without a softcap the logits are linear.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, vocabulary] in at least float32; all at once, so for few tokens."""
        operand = _operand(self.weight, hidden)
        return self.finish(_matmul(hidden.to(operand.dtype), operand.t()))

    def finish(self, product: Tensor) -> Tensor:
        """Logits from `hidden @ weight.T`, in its memory."""
        if self.bias is not None:
            product += self.bias
        if self.scale != 1:
            product *= self.scale
        if self.softcap is None:
            return product
        return product.div_(self.softcap).tanh_().mul_(self.softcap)


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    temperature: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Log-prob of each target under softmax(logits / temperature), differentiable in hidden states and head.

    hidden: [tokens, hidden]; targets: [tokens]; temperature: [tokens], None is 1 everywhere; chunk: tokens
    whose logits exist at once. Returns [tokens] in float32 (float64 for float64 input), the precision of
    all sums too.
    """
    task = _Task.of(hidden, targets, head, temperature, chunk)
    result: Tensor = _TokenLogprobs.apply(hidden, head.weight, head.bias, task)  # type: ignore[no-untyped-call]
    return result


def weighted_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    weigh: Weigh,
    *,
    temperature: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The log-probs of `token_logprobs`, without gradient, and the scalar sum(c * log-probs).

    c = weigh(numbers, log-probs), asked for a chunk at a time and held fixed: the gradient of the sum is that
    of its log-probs. It is computed in this forward pass, and may be asked for once. Without gradient, as
    under `torch.no_grad()`, only values are computed.
    """
    task = _Task.of(hidden, targets, head, temperature, chunk)
    if not torch.is_grad_enabled() or hidden.dtype == torch.float16:
        # The small numbers of float16 need a loss scale, which comes with the backward pass only.
        logprobs = token_logprobs(hidden, targets, head, temperature=temperature, chunk=chunk)
        return logprobs.detach(), weighted_sum(logprobs, weigh)
    result: tuple[Tensor, Tensor] = _WeightedSum.apply(hidden, head.weight, head.bias, task, weigh)  # type: ignore[no-untyped-call]
    return result


def weighted_sum(logprobs: Tensor, weigh: Weigh) -> Tensor:
    """sum(c * logprobs), a scalar with the gradient of its log-probs; `logprobs`: [tokens]."""
    given = logprobs.detach()
    return _dot(weigh(torch.arange(len(given), device=given.device), given), logprobs)


@dataclass(frozen=True)
class _Task:
    """Everything about a call that has no gradient."""

    targets: Tensor
    temperature: Tensor | None
    scale: float
    softcap: float | None
    chunk: int

    @classmethod
    def of(
        cls, hidden: Tensor, targets: Tensor, head: Head, temperature: Tensor | None, chunk: int | None
    ) -> "_Task":
        if chunk is None:
            budget = CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cuda"])
            chunk = max(budget // head.weight.shape[0], 16)
        if temperature is not None:
            temperature = temperature.to(_precise(hidden.dtype))
        return cls(targets, temperature, head.scale, head.softcap, chunk)


class _Chunk:
    """The logits of some tokens, and in their memory whatever is made of them."""

    def __init__(self, task: _Task, part: Tensor, logits: Tensor, *, sloped: bool) -> None:
        self.part = part
        self.values = logits
        self.targets = task.targets[part]
        self.temperature = None if task.temperature is None else task.temperature[part]
        self._task = task
        # How logits follow what the softcap was put on.
        self._slope = 1 - (logits / task.softcap).square_() if sloped and task.softcap else None

    def normalise(self) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the targets, log of the sum of exponentials, and the sum of what takes their place.

        That is exp(logits - their maximum).
        """
        found = []
        for rows, z in self._slices():
            peak = z.amax(1)
            picked = z.gather(1, self.targets[rows, None])[:, 0] - peak
            total = z.sub_(peak[:, None]).exp_().sum(1)
            log_sum = total.log()
            found.append(torch.stack([(picked - log_sum).clamp_(max=0), peak + log_sum, total]))
        logprobs, log_total, total = torch.cat(found, 1)
        return logprobs, log_total, total

    def exponentiate(self, log_total: Tensor) -> None:
        """Logits to probabilities."""
        for rows, z in self._slices():
            z.sub_(log_total[rows, None]).exp_()

    def descend(self, coefficient: Tensor, total: Tensor | float) -> None:
        """Exponentials of that sum to the gradient of sum(coefficient * log-probs) with respect to h W' + b.

        That is coefficient * (onehot - exponentials / total) / temperature * slope * scale.
        """
        if self.temperature is not None:
            coefficient = coefficient / self.temperature
        coefficient = coefficient * self._task.scale
        self.values.mul_((-coefficient / total)[:, None])
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


class _Pass:
    """One run over tokens in chunks, with the sums of gradients that it gathers."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> None:
        self.inputs = hidden, weight, bias
        self.task = task
        self.operand = _operand(weight, hidden)
        self.precise = _precise(hidden.dtype)
        self.dtypes = [None if tensor is None else tensor.dtype for tensor in self.inputs]
        self.gradients: list[Tensor | None] = [None, None, None]

    def chunks(self, tokens: Tensor) -> Iterator[_Chunk]:
        """The logits of those tokens; each chunk lies in the memory of the one before it.

        Filling memory that a process has just been given costs a CPU as much as half the product; the
        allocator of a GPU hands out again what was freed.
        """
        hidden, weight, bias = self.inputs
        head = Head(weight, bias, self.task.scale, self.task.softcap)
        sloped = any(tensor is not None for tensor in self.gradients)
        memory = None
        if not hidden.is_cuda:
            shape = min(self.task.chunk, len(tokens)), len(weight)
            memory = torch.empty(shape, dtype=self.precise, device=hidden.device)
        for part in torch.split(tokens, self.task.chunk) if len(tokens) else ():
            out = None if memory is None else memory[: len(part)]
            product = _matmul(hidden[part].to(self.operand.dtype), self.operand.t(), out=out)
            yield _Chunk(self.task, part, head.finish(product), sloped=sloped)

    def want(self, wanted: Sequence[bool]) -> None:
        """Start sums for those of hidden states, weight and bias that need a gradient."""
        self.gradients = [
            torch.zeros_like(tensor, dtype=self.precise) if tensor is not None and want else None
            for tensor, want in zip(self.inputs, wanted, strict=True)
        ]

    def add(self, chunk: _Chunk) -> None:
        """Add the gradients of a chunk, whose values are those of h W' + b."""
        d_hidden, d_weight, d_bias = self.gradients
        if d_bias is not None:
            d_bias += chunk.values.sum(0)
        d_logits = chunk.values.to(self.operand.dtype)
        if d_hidden is not None:
            d_hidden[chunk.part] = _matmul(d_logits, self.operand)
        if d_weight is not None:
            _add_outer(d_weight, d_logits, self.inputs[0][chunk.part].to(self.operand.dtype))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> Tensor:
        work = _Pass(hidden, weight, bias, task)
        logprobs = torch.empty(len(hidden), dtype=work.precise, device=hidden.device)
        log_total = torch.empty_like(logprobs)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in work.chunks(torch.arange(len(hidden), device=hidden.device)):
                logprobs[chunk.part], log_total[chunk.part], _ = chunk.normalise()
        ctx.save_for_backward(hidden, weight, bias, task.targets, task.temperature, log_total)
        ctx.options = task.scale, task.softcap, task.chunk
        return logprobs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, bias, targets, temperature, log_total = ctx.saved_tensors
        work = _Pass(hidden, weight, bias, _Task(targets, temperature, *ctx.options))
        work.want(ctx.needs_input_grad[:3])
        # A token of coefficient 0 (no advantage, or clipped) moves nothing: no need of its logits again.
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in work.chunks(grad.nonzero()[:, 0]):
                chunk.exponentiate(log_total[chunk.part])
                chunk.descend(grad[chunk.part], 1.0)
                work.add(chunk)
        return *_cast(work.gradients, work.dtypes), None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
    ) -> tuple[Tensor, Tensor]:
        task, weigh = options
        work = _Pass(hidden, weight, bias, task)
        work.want(ctx.needs_input_grad[:3])
        logprobs = torch.empty(len(hidden), dtype=work.precise, device=hidden.device)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in work.chunks(torch.arange(len(hidden), device=hidden.device)):
                logprobs[chunk.part], _, exponentials = chunk.normalise()
                given = logprobs[chunk.part]
                coefficient = weigh(chunk.part, given).to(work.precise)
                total += _dot(coefficient.double(), given)
                chunk.descend(coefficient, exponentials)
                chunk.keep(coefficient != 0)
                work.add(chunk)
        ctx.save_for_backward(*work.gradients)
        ctx.dtypes = work.dtypes
        ctx.mark_non_differentiable(logprobs)
        return logprobs, total.to(work.precise)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> Any:
        # In place: the gradient of a large head is not held twice. Autograd refuses to come here again.
        scaled = [None if tensor is None else tensor.mul_(grad) for tensor in ctx.saved_tensors]
        return *_cast(scaled, ctx.dtypes), None, None


def _dot(coefficient: Tensor, logprobs: Tensor) -> Tensor:
    """A token of coefficient 0 has no part in it, even where its log-prob is not finite."""
    return torch.where(coefficient != 0, coefficient * logprobs, 0.0).sum()


def _cast(sums: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(dtype) for tensor, dtype in zip(sums, dtypes, strict=True)]


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _operand(weight: Tensor, hidden: Tensor) -> Tensor:
    """The head as a factor of products with hidden states: their values, and room for results in float32."""
    rounded = weight.to(hidden.dtype)
    sums_halves = hidden.is_cuda and torch.version.hip is None
    return rounded if sums_halves else rounded.to(_precise(hidden.dtype))


def _matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    if a.dtype in HALF:
        # Rounding logits to half precision costs up to 0.06 nat; the hardware sums in float32 anyway.
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


def _add_outer(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """total += d_logits.T @ hidden, in slices of the vocabulary so that no second head gradient is held."""
    if d_logits.dtype not in HALF:
        total.addmm_(d_logits.t(), hidden)
        return
    for rows, columns in zip(
        torch.split(total, SLICE_ROWS), torch.split(d_logits, SLICE_ROWS, 1), strict=True
    ):
        rows += _matmul(columns.t(), hidden)
