"""How tokens become one number: the factor of each token, and the denominator that micro-batches add up.

`factor` takes the lengths of rows, [B]; rows or tokens are counted for the denominator. A row without a token
is padding of the batch, not a response, and is not counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


def _whole(lengths: Tensor) -> Tensor:
    return torch.ones_like(lengths)


def _mean_of_row(lengths: Tensor) -> Tensor:
    return 1 / lengths.clamp(min=1)


def _tokens(lengths: Tensor, length: float) -> Tensor:
    return lengths.sum()


def _rows(lengths: Tensor, length: float) -> Tensor:
    return (lengths > 0).to(lengths.dtype).sum()


def _constant(lengths: Tensor, length: float) -> Tensor:
    return _rows(lengths, length) * length


@dataclass(frozen=True, slots=True)
class Reduction:
    """`factor(lengths)`: weight of a token of each row; `normalizer(lengths, length)`: the denominator."""

    factor: Callable[[Tensor], Tensor]
    normalizer: Callable[[Tensor, float], Tensor]


REDUCTION: Mapping[str, Reduction] = {
    "token-mean": Reduction(_whole, _tokens),
    "sequence-mean": Reduction(_mean_of_row, _rows),
    "sequence-sum": Reduction(_whole, _rows),
    "constant": Reduction(_whole, _constant),
}
