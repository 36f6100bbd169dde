"""Log-ratios of two policies and their exponentials: the one place where they are bounded."""

import torch
from torch import Tensor

LIMIT = 20.0
"""Bound of a log-ratio: e^20 = 5e8 is beyond any sensible weight, and its square still fits into fp32."""


def precise(values: Tensor) -> Tensor:
    """At least fp32; float64 stays float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """log(new / old) from two log-probs, bounded by `LIMIT` in either direction."""
    return bounded(precise(new) - precise(old))


def bounded(exponent: Tensor) -> Tensor:
    """An exponent within +-`LIMIT`."""
    return exponent.clamp(-LIMIT, LIMIT)


def exponential(exponent: Tensor) -> Tensor:
    """e^x of a bounded exponent: what turns a log-ratio, or a sum of them, into a ratio."""
    return bounded(exponent).exp()
