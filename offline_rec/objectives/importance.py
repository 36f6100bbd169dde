"""How much a kept token counts: importance weights, one function each. They multiply the advantage.

Every function takes the signals, the keep-mask and its own parameters, and returns [B, S] or what broadcasts
to it. A weight that its paper differentiates through is given as the coefficient of the same gradient.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from offline_rec.objectives import ratios
from offline_rec.objectives.adaptive import balancing_temperature
from offline_rec.objectives.signals import Signals


def one(signals: Signals, kept: Tensor) -> Tensor:
    """No importance weight."""
    return torch.ones_like(signals.logprobs)


def ratio(signals: Signals, kept: Tensor) -> Tensor:
    """pi / mu per token."""
    return signals.ratio


def truncated_ratio(signals: Signals, kept: Tensor, *, cap: float) -> Tensor:
    """min(ratio, cap): bounded variance for some bias."""
    return signals.ratio.clamp(max=cap)


def clipped_ratio(signals: Signals, kept: Tensor, *, epsilon_low: float, epsilon_high: float) -> Tensor:
    """The ratio clipped to the band, and a gradient for every token (arXiv 2506.13585)."""
    return signals.ratio.clamp(1 - epsilon_low, 1 + epsilon_high)


def sequence_ratio(signals: Signals, kept: Tensor) -> Tensor:
    """Geometric mean of the ratios of a response (arXiv 2507.18071)."""
    return ratios.exponential(signals.row_mean(signals.log_ratio))[:, None]


def clipped_sequence_ratio(
    signals: Signals, kept: Tensor, *, log_clip_low: float, log_clip_high: float
) -> Tensor:
    """Geometric mean of ratios that are each clipped first, against the sign of A (arXiv 2507.20673)."""
    drift, positive = signals.log_ratio, signals.advantages >= 0
    clipped = torch.where(positive, drift.clamp(max=log_clip_high), drift.clamp(min=-log_clip_low))
    return ratios.exponential(signals.row_mean(clipped))[:, None]


def tapered_response_ratio(
    signals: Signals,
    kept: Tensor,
    *,
    positive_low: float,
    positive_high: float,
    negative_low: float,
    negative_high: float,
) -> Tensor:
    """Product of a response's ratios, clipped to limits that depend on the sign of A (arXiv 2503.14286)."""
    whole = ratios.exponential(signals.row_sum(signals.log_ratio))[:, None]
    return torch.where(
        signals.advantages > 0,
        whole.clamp(positive_low, positive_high),
        whole.clamp(negative_low, negative_high),
    )


def soft_gate(signals: Signals, kept: Tensor, *, tau_positive: float, tau_negative: float) -> Tensor:
    """ratio * 4 s (1 - s), s = sigmoid(tau (ratio - 1)), the gradient of 4/tau * s; 1 at ratio 1.

    arXiv 2511.20347, with the gate differentiated.
    """
    offset = sharpness(signals, tau_positive, tau_negative) * (signals.ratio - 1)
    return signals.ratio * 4 * torch.sigmoid(offset) * torch.sigmoid(-offset)


def sharpness(signals: Signals, tau_positive: float, tau_negative: float) -> Tensor:
    """The tau of `soft_gate` for each token, by the sign of its advantage."""
    negative = torch.full_like(signals.advantages, tau_negative)
    return negative.masked_fill(signals.advantages > 0, tau_positive)


def probability(signals: Signals, kept: Tensor) -> Tensor:
    """pi itself, so that unlikely tokens are not blown up (arXiv 2508.05629)."""
    return signals.logprobs.exp()


def expert_mixture(signals: Signals, kept: Tensor, *, gamma: float) -> Tensor:
    """On expert rows gamma p / (p + gamma)^2, the gradient of p / (p + gamma); elsewhere the ratio.

    arXiv 2504.14945.
    """
    p = signals.logprobs.exp()
    shaped = gamma * p / (p + gamma).square()
    return torch.where(signals.expert_rows[:, None], shaped, ratios.exponential(signals.sampled_log_ratio))


def negative_drift(signals: Signals, kept: Tensor, *, min_temperature: float) -> Tensor:
    """exp(A / T) once the kept advantage of the step is negative on average, else 1 (arXiv 2606.20002).

    T is the temperature at which the advantages of the kept tokens sum to zero, or the lowest allowed.
    """
    mass = signals.weights[:, None] * (kept & signals.mask)
    temperature = balancing_temperature(signals.advantages, mass, min_temperature)
    return ratios.exponential(signals.advantages / temperature)


IMPORTANCE: Mapping[str, Callable[..., Tensor]] = {
    "one": one,
    "ratio": ratio,
    "truncated-ratio": truncated_ratio,
    "clipped-ratio": clipped_ratio,
    "sequence-ratio": sequence_ratio,
    "clipped-sequence-ratio": clipped_sequence_ratio,
    "tapered-response-ratio": tapered_response_ratio,
    "soft-gate": soft_gate,
    "probability": probability,
    "expert-mixture": expert_mixture,
    "negative-drift": negative_drift,
}
