"""Which tokens may still move: keep-masks, one function each. True where the token keeps its advantage term.

Every function takes the signals and its own parameters, and returns [B, S] bool. Ties are kept, as a clip's
gradient is at its bound (arXiv 2509.24203; 2507.18071 and 2507.20673 for whole responses).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from offline_rec.objectives import ratios
from offline_rec.objectives.adaptive import second_moment_bounds
from offline_rec.objectives.signals import Signals


def everything(signals: Signals) -> Tensor:
    """Every token."""
    return torch.ones_like(signals.mask)


def one_side(signals: Signals, *, epsilon_low: float, epsilon_high: float) -> Tensor:
    """Not yet too likely (A >= 0) or too unlikely (A < 0): where a PPO clip has a gradient."""
    ratio = signals.ratio
    return torch.where(signals.advantages >= 0, ratio <= 1 + epsilon_high, ratio >= 1 - epsilon_low)


def two_side(signals: Signals, *, epsilon_low: float, epsilon_high: float) -> Tensor:
    """Within the band, whatever the sign of the advantage."""
    return (signals.ratio >= 1 - epsilon_low) & (signals.ratio <= 1 + epsilon_high)


def ring(
    signals: Signals, *, epsilon_low: float, epsilon_high: float, outer_low: float, outer_high: float
) -> Tensor:
    """Within the band, or so far out that the update pulls the ratio back towards it."""
    ratio, positive = signals.ratio, signals.advantages >= 0
    comes_back = torch.where(positive, ratio <= 1 - outer_low, ratio >= 1 + outer_high)
    return two_side(signals, epsilon_low=epsilon_low, epsilon_high=epsilon_high) | comes_back


def sequence_one_side(signals: Signals, *, epsilon_low: float, epsilon_high: float) -> Tensor:
    """One-sided on the geometric mean of the ratios of a whole response."""
    ratio = ratios.exponential(signals.row_mean(signals.log_ratio))[:, None]
    return torch.where(signals.advantages >= 0, ratio <= 1 + epsilon_high, ratio >= 1 - epsilon_low)


def log_one_side(signals: Signals, *, log_clip_low: float, log_clip_high: float) -> Tensor:
    """One-sided with the band given for the log-ratio."""
    drift = signals.log_ratio
    return torch.where(signals.advantages >= 0, drift <= log_clip_high, drift >= -log_clip_low)


def second_moment(signals: Signals, *, budget: float, floor_low: float, floor_high: float) -> Tensor:
    """One-sided with the bounds that hold the step's second moment within a budget (arXiv 2510.01161)."""
    low, high = second_moment_bounds(signals, budget=budget, floor_low=floor_low, floor_high=floor_high)
    return torch.where(signals.advantages >= 0, signals.log_ratio <= high, signals.log_ratio >= low)


KEEP: Mapping[str, Callable[..., Tensor]] = {
    "all": everything,
    "one-side": one_side,
    "two-side": two_side,
    "ring": ring,
    "sequence-one-side": sequence_one_side,
    "log-one-side": log_one_side,
    "second-moment": second_moment,
}
