"""Quantities of a whole step that are found by solving an equation: clip bounds and a temperature."""

import math

import torch
from torch import Tensor

from offline_rec.objectives import ratios
from offline_rec.objectives.signals import Signals

BISECTIONS = 60
"""Halvings of an interval of length about 1: down to the rounding of float64."""


def second_moment_bounds(
    signals: Signals, *, budget: float, floor_low: float, floor_high: float
) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of the log-ratio of harmful tokens, those that move further the way they moved.

    Harmful: A > 0 and ratio > 1, or A < 0 and ratio < 1. The bounds are -+tau, never tighter than the floors,
    with the largest tau for which the mean of min((log ratio)^2, tau^2) over the harmful tokens is within the
    budget.
    """
    drift = signals.log_ratio
    harmful = signals.mask & (signals.advantages * drift > 0)
    tau = water_level(drift[harmful].square(), budget).sqrt()
    low = torch.minimum(-tau, tau.new_tensor(math.log1p(-floor_low) if floor_low < 1 else -math.inf))
    return low, torch.maximum(tau, tau.new_tensor(math.log1p(floor_high)))


def water_level(values: Tensor, budget: float) -> Tensor:
    """The largest t with mean(min(values, t)) <= budget, exactly; infinite if the plain mean is within it.

    `values`: [n], not negative. With k values under the level, of sum P, t = (n budget - P) / (n - k).
    """
    ascending = values.sort().values
    total = len(values) * budget
    below = ascending.cumsum(0) - ascending
    above = torch.arange(len(values), 0, -1, device=values.device, dtype=values.dtype)
    under = int((below + ascending * above <= total).sum())
    if under == len(values):
        return values.new_tensor(math.inf)
    return (total - below[under]) / above[under]


def balancing_temperature(advantages: Tensor, mass: Tensor, min_temperature: float) -> Tensor:
    """The T at which sum(mass A exp(A / T)) = 0, at least `min_temperature`; infinite if sum(mass A) >= 0.

    The sum falls in T, from the side of the largest A towards sum(mass A); so a root exists only if that is
    negative and some A is positive. Without a root above the floor the floor is taken (arXiv 2606.20002).
    `advantages`, `mass`: same shape.
    """

    def balance(inverse: Tensor) -> Tensor:
        return (mass * advantages * ratios.exponential(advantages * inverse)).sum()

    low, high = advantages.new_tensor(0.0), advantages.new_tensor(1 / min_temperature)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        negative = balance(middle) < 0
        low, high = torch.where(negative, middle, low), torch.where(negative, high, middle)
    # Bisection on 1 / T: without a root `low` climbs to the floor's inverse; a sum >= 0 leaves it at 0.
    return 1 / torch.where(balance(high.new_tensor(0.0)) < 0, high, 0.0)
