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

from offline_rec.models.chunks import Chunk, FusedChunk

CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 27}
"""Logits of a chunk: 128 MiB on a CPU, 512 MiB on a GPU, where only large chunks are bound by arithmetic."""

SLICE_ROWS = 1 << 14
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
    fused: bool = False,
) -> Tensor:
    """Log-prob of each target under softmax(logits / temperature), differentiable in hidden states and head.

    hidden: [tokens, hidden]; targets: [tokens]; temperature: [tokens], None is 1 everywhere; chunk: tokens
    whose logits exist at once; fused: by the kernels of `fused.py`, on a GPU. Returns [tokens] in float32
    (float64 for float64 input), the precision of all sums too.
    """
    task = _Task.of(hidden, targets, head, temperature, chunk, fused=fused)
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
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """The log-probs of `token_logprobs`, without gradient, and the scalar sum(c * log-probs).

    c = weigh(numbers, log-probs), asked for a chunk at a time and held fixed: the gradient of the sum is that
    of its log-probs. It is computed in this forward pass, and may be asked for once. Without gradient, as
    under `torch.no_grad()`, only values are computed.
    """
    task = _Task.of(hidden, targets, head, temperature, chunk, fused=fused)
    if not torch.is_grad_enabled() or hidden.dtype == torch.float16:
        # The small numbers of float16 need a loss scale, which comes with the backward pass only.
        logprobs = token_logprobs(hidden, targets, head, temperature=temperature, chunk=chunk, fused=fused)
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
    fused: bool

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        targets: Tensor,
        head: Head,
        temperature: Tensor | None,
        chunk: int | None,
        *,
        fused: bool,
    ) -> "_Task":
        if chunk is None:
            budget = CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cuda"])
            chunk = max(budget // head.weight.shape[0], 16)
        if temperature is not None:
            temperature = temperature.to(_precise(hidden.dtype))
        return cls(targets, temperature, head.scale, head.softcap, chunk, fused)


class _Pass:
    """One run over tokens in chunks, with the sums of gradients that it gathers."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> None:
        self.inputs = hidden, weight, bias
        self.task = task
        self.operand = _operand(weight, hidden)
        self.precise = _precise(hidden.dtype)
        self.dtypes = [None if tensor is None else tensor.dtype for tensor in self.inputs]
        self.gradients: list[Tensor | None] = [None, None, None]

    def chunks(self, tokens: Tensor) -> Iterator[Chunk]:
        """The logits of those tokens; each chunk lies in the memory of the one before it.

        Filling memory that a process has just been given costs a CPU as much as half the product; the
        allocator of a GPU hands out again what was freed.
        """
        hidden, weight, bias = self.inputs
        head = Head(weight, bias, self.task.scale, self.task.softcap)
        sloped = any(tensor is not None for tensor in self.gradients)
        kind = FusedChunk if self.task.fused else Chunk
        memory = None
        if not hidden.is_cuda:
            shape = min(self.task.chunk, len(tokens)), len(weight)
            memory = torch.empty(shape, dtype=self.precise, device=hidden.device)
        for part in torch.split(tokens, self.task.chunk) if len(tokens) else ():
            out = None if memory is None else memory[: len(part)]
            product = _matmul(hidden[part].to(self.operand.dtype), self.operand.t(), out=out)
            heat = None if self.task.temperature is None else self.task.temperature[part]
            yield kind(part, product, self.task.targets[part], heat, head, sloped=sloped)

    def want(self, wanted: Sequence[bool]) -> None:
        """Start sums for those of hidden states, weight and bias that need a gradient."""
        self.gradients = [
            torch.zeros_like(tensor, dtype=self.precise) if tensor is not None and want else None
            for tensor, want in zip(self.inputs, wanted, strict=True)
        ]

    def descend(self, chunk: Chunk, coefficient: Tensor) -> None:
        """The gradient of a chunk, as precise as what is made of it."""
        exact = self.gradients[2] is not None
        chunk.descend(coefficient, self.precise if exact else self.operand.dtype)

    def add(self, chunk: Chunk) -> None:
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
                logprobs[chunk.part], log_total[chunk.part] = chunk.normalise()
        ctx.save_for_backward(hidden, weight, bias, task.targets, task.temperature, log_total)
        ctx.options = task.scale, task.softcap, task.chunk, task.fused
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
                chunk.resume(log_total[chunk.part])
                work.descend(chunk, grad[chunk.part])
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
                logprobs[chunk.part], _ = chunk.normalise()
                given = logprobs[chunk.part]
                coefficient = weigh(chunk.part, given).to(work.precise)
                total += _dot(coefficient.double(), given)
                work.descend(chunk, coefficient)
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
