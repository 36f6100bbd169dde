"""Triton kernels for a chunk of logits: sums of its softmax in one read, its gradient in one read and write.

Both take the bare product h W' and do what the head does after it as they read: bias, scale, softcap,
temperature. `offline_rec.models.logprobs` does the same by operations of torch, six of them and more. Numbers
are float32 whatever comes in; those of a row are summed by one program, block after block of the vocabulary.
With `TRITON_INTERPRET=1` Triton runs them without a GPU.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from offline_rec.models.logprobs import Head

REDUCED, DESCENDED = 4096, 4096
"""Logits that a program of either kernel has in hand at once."""
WARPS = 8


def reduce(
    product: Tensor, targets: Tensor, temperature: Tensor | None, head: "Head"
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of logits over temperature: maximum, sum of exp(logit - maximum), the logit of the target.

    product: [tokens, vocabulary] h W', rows contiguous; targets, temperature: [tokens]. Returns float32
    [tokens] each; the product is only read.
    """
    tokens, vocabulary = product.shape
    peak, total, picked = (product.new_empty(tokens, dtype=torch.float32) for _ in range(3))
    block = min(REDUCED, triton.next_power_of_2(vocabulary))
    with torch.cuda.device_of(product):  # type: ignore[no-untyped-call]
        _reduce[(tokens,)](
            *(product, *_dense(targets, temperature, head.bias), peak, total, picked),
            *(vocabulary, _stride(product), head.scale, head.softcap or 1.0),
            **_kind(temperature, head, block),
        )
    return peak, total, picked


def descend(
    product: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    head: "Head",
    *,
    coefficient: Tensor,
    sums: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """coefficient * (onehot - softmax) / temperature * slope of the softcap * scale: [tokens, vocabulary].

    sums: two float32 [tokens], s and t of softmax = exp(logit - s) / t. Rows of coefficient 0 are 0. In the
    memory of `product` if that has the dtype.
    """
    tokens, vocabulary = product.shape
    result = product if product.dtype == dtype else torch.empty_like(product, dtype=dtype)
    block = min(DESCENDED, triton.next_power_of_2(vocabulary))
    with torch.cuda.device_of(product):  # type: ignore[no-untyped-call]
        _descend[(tokens, triton.cdiv(vocabulary, block))](
            *(product, result, *_dense(targets, temperature, head.bias, coefficient, *sums)),
            *(vocabulary, _stride(product), _stride(result), head.scale, head.softcap or 1.0),
            **_kind(temperature, head, block),
        )
    return result


def _kind(temperature: Tensor | None, head: "Head", block: int) -> dict[str, int]:
    """What kernels are compiled for."""
    return {
        "TEMPERED": temperature is not None,
        "BIASED": head.bias is not None,
        "CAPPED": bool(head.softcap),
        "BLOCK": block,
        "num_warps": WARPS,
    }


def _dense(*vectors: Tensor | None) -> list[Tensor | None]:
    """Kernels count on numbers side by side; what was expanded from one number is not."""
    return [None if vector is None else vector.contiguous() for vector in vectors]


def _stride(matrix: Tensor) -> int:
    if matrix.stride(1) != 1:
        raise ValueError("the rows of a chunk of logits are contiguous")
    return matrix.stride(0)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """Tanh to a few units in the last place: a series near 0, where the quotient loses what it subtracts."""
    y = x * x
    series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 - y * (1382 / 155925))))))
    shrunk = tl.exp(-2 * tl.abs(x))
    quotient = (1 - shrunk) / (1 + shrunk)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -quotient, quotient))


@triton.jit  # type: ignore[untyped-decorator]
def _capped(  # type: ignore[no-untyped-def]
    product, column, inside, bias, scale, softcap, BIASED: tl.constexpr, CAPPED: tl.constexpr
):
    """What the head makes of its product, before temperature; and the tanh of its softcap."""
    logit = product.to(tl.float32)
    if BIASED:
        logit += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    logit *= scale
    bent = logit
    if CAPPED:
        bent = _tanh(logit / softcap)
        logit = bent * softcap
    return logit, bent


@triton.jit  # type: ignore[untyped-decorator]
def _reduce(  # type: ignore[no-untyped-def]
    product,
    targets,
    temperature,
    bias,
    peak,
    total,
    picked,
    vocabulary,
    stride,
    scale,
    softcap,
    TEMPERED: tl.constexpr,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64 bits: a chunk may have more than 2**31 logits.
    row = tl.program_id(0).to(tl.int64)
    start = product + row * stride
    heat = 1.0
    if TEMPERED:
        heat = tl.load(temperature + row).to(tl.float32)
    most = tl.full((), float("-inf"), tl.float32)
    summed = tl.full((), 0.0, tl.float32)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < vocabulary
        raw = tl.load(start + column, mask=inside, other=0.0)
        logit, _ = _capped(raw, column, inside, bias, scale, softcap, BIASED, CAPPED)
        logit = tl.where(inside, logit / heat, float("-inf"))
        higher = tl.maximum(most, tl.max(logit, 0))
        # Where all so far are -inf, their exponentials are 0, and not those of -inf - -inf.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        summed = summed * tl.exp(most - base) + tl.sum(tl.exp(logit - base), 0)
        most = higher
    target = tl.load(targets + row)
    raw = tl.load(start + target)
    logit, _ = _capped(raw, target, target < vocabulary, bias, scale, softcap, BIASED, CAPPED)
    tl.store(peak + row, most)
    tl.store(total + row, summed)
    tl.store(picked + row, logit / heat)


@triton.jit  # type: ignore[untyped-decorator]
def _descend(  # type: ignore[no-untyped-def]
    product,
    result,
    targets,
    temperature,
    bias,
    coefficient,
    shift,
    total,
    vocabulary,
    stride,
    result_stride,
    scale,
    softcap,
    TEMPERED: tl.constexpr,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    heat = 1.0
    if TEMPERED:
        heat = tl.load(temperature + row).to(tl.float32)
    weight = tl.where(inside, tl.load(coefficient + row).to(tl.float32), 0.0)
    live = weight != 0.0
    # A row that moves nothing is not even read: its logits may be anything.
    raw = tl.load(product + row * stride + column, mask=live, other=0.0)
    logit, bent = _capped(raw, column, inside, bias, scale, softcap, BIASED, CAPPED)
    chance = tl.exp(logit / heat - tl.load(shift + row)) / tl.load(total + row)
    slope = weight / heat * scale
    if CAPPED:
        slope = slope * (1 - bent * bent)
    gradient = tl.where(column == tl.load(targets + row), 1.0 - chance, -chance) * slope
    gradient = tl.where(live, gradient, 0.0)
    tl.store(result + row * result_stride + column, gradient.to(result.dtype.element_ty), mask=inside)
