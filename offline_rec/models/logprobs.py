"""Log-probs of given tokens straight from hidden states and the output head, in chunks of tokens.

log softmax(z)[y] with z = cap * tanh(scale * (h W' + b) / cap) / temperature. Logits exist for one chunk at
a time, forward and backward, so the memory beyond hidden states and head gradient is chunk x vocabulary,
however many tokens there are. The backward pass computes each chunk's logits again: 8/6 of the operations
of keeping them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 27}
"""Logits of a chunk: 128 MiB on a CPU, 512 MiB on a GPU, where only large chunks are bound by arithmetic."""

SLICE_ROWS = 1 << 14
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Head:
    """The map from a hidden state to logits: `softcap * tanh(scale * (h @ weight.T + bias) / softcap)`.

    weight: [vocabulary, hidden]; bias: [vocabulary] or None; without a softcap the logits are linear.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, vocabulary] in at least float32; all at once, so for few tokens."""
        return _logits(hidden, _operand(self.weight, hidden), self)


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
    if chunk is None:
        budget = CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cuda"])
        chunk = max(budget // head.weight.shape[0], 16)
    if temperature is not None:
        temperature = temperature.to(_precise(hidden.dtype))
    options = (targets, temperature, head.scale, head.softcap, chunk)
    result: Tensor = _TokenLogprobs.apply(hidden, head.weight, head.bias, *options)  # type: ignore[no-untyped-call]
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        targets, temperature, scale, softcap, chunk = options
        head = Head(weight, bias, scale, softcap)
        operand = _operand(weight, hidden)
        logprobs = torch.empty(len(hidden), dtype=_precise(hidden.dtype), device=hidden.device)
        log_total = torch.empty_like(logprobs)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in torch.split(torch.arange(len(hidden), device=hidden.device), chunk):
                z = _logits(hidden[part], operand, head)
                if temperature is not None:
                    z /= temperature[part, None]
                peak = z.amax(1)
                picked = z.gather(1, targets[part, None])[:, 0] - peak
                log_sum = z.sub_(peak[:, None]).exp_().sum(1).log_()
                logprobs[part] = (picked - log_sum).clamp_(max=0)
                log_total[part] = peak + log_sum
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, log_total)
        ctx.options = scale, softcap, chunk
        return logprobs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, bias, *_ = ctx.saved_tensors
        scale, softcap, chunk = ctx.options
        head = Head(weight, bias, scale, softcap)
        operand = _operand(weight, hidden)
        d_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=grad.dtype) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=grad.dtype) if ctx.needs_input_grad[2] else None
        # A token of coefficient 0 (no advantage, or clipped) moves nothing: no need of its logits again.
        live = grad.nonzero()[:, 0]
        with torch.autocast(hidden.device.type, enabled=False):
            for part in torch.split(live, chunk):
                d_logits = _d_logits(ctx.saved_tensors, part, grad[part], operand, head)
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
                d_logits = d_logits.to(operand.dtype)
                if d_hidden is not None:
                    d_hidden[part] = _matmul(d_logits, operand).to(hidden.dtype)
                if d_weight is not None:
                    _add_outer(d_weight, d_logits, hidden[part].to(operand.dtype))
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, *[None] * 5


def _d_logits(saved: Any, part: Tensor, grad: Tensor, operand: Tensor, head: Head) -> Tensor:
    """Gradient with respect to h W' + b of one chunk: grad * (onehot - softmax) / temperature * slope."""
    hidden, _, _, targets, temperature, log_total = saved
    z = _logits(hidden[part], operand, head)
    slope = None if head.softcap is None else 1 - (z / head.softcap).square_()
    if temperature is not None:
        z /= temperature[part, None]
        grad = grad / temperature[part]
    grad = grad * head.scale
    d_logits = z.sub_(log_total[part, None]).exp_().mul_(-grad[:, None])
    d_logits.scatter_add_(1, targets[part, None], grad[:, None])
    return d_logits if slope is None else d_logits.mul_(slope)


def _logits(hidden: Tensor, operand: Tensor, head: Head) -> Tensor:
    z = _matmul(hidden.to(operand.dtype), operand.t())
    if head.bias is not None:
        z += head.bias
    if head.scale != 1:
        z *= head.scale
    return z if head.softcap is None else z.div_(head.softcap).tanh_().mul_(head.softcap)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _operand(weight: Tensor, hidden: Tensor) -> Tensor:
    """The head as a factor of products with hidden states: their values, and room for results in float32."""
    rounded = weight.to(hidden.dtype)
    sums_halves = hidden.is_cuda and torch.version.hip is None
    return rounded if sums_halves else rounded.to(_precise(hidden.dtype))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in HALF:
        # Rounding logits to half precision costs up to 0.06 nat; the hardware sums in float32 anyway.
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def _add_outer(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """total += d_logits.T @ hidden, in slices of the vocabulary so that no second head gradient is held."""
    if d_logits.dtype not in HALF:
        total.addmm_(d_logits.t(), hidden)
        return
    for rows, columns in zip(
        torch.split(total, SLICE_ROWS), torch.split(d_logits, SLICE_ROWS, 1), strict=True
    ):
        rows += _matmul(columns.t(), hidden)
