"""The scalar an objective maximises, where there is one: gain and penalty per token, [B, S].

What belongs to a whole response is spread evenly over its tokens, so that any reduction sums it rightly. A
pair of keep-mask and importance that is not listed in `GAIN` has a gradient, but no scalar worth a name.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from offline_rec.objectives import ratios, regularisers
from offline_rec.objectives.adaptive import second_moment_bounds
from offline_rec.objectives.importance import clipped_sequence_ratio, sequence_ratio, sharpness
from offline_rec.objectives.signals import Signals


def likelihood(signals: Signals) -> Tensor:
    """A log pi: REINFORCE, weighted imitation."""
    return signals.advantages * signals.logprobs


def capped_likelihood(signals: Signals, *, epsilon_low: float, epsilon_high: float) -> Tensor:
    """A log(pi / mu), constant once the ratio has left the band on the side of the update."""
    high = torch.log(signals.ratio.clamp(max=1 + epsilon_high))
    low = torch.log(signals.ratio.clamp(min=1 - epsilon_low))
    return signals.advantages * torch.where(signals.advantages >= 0, high, low)


def expectation(signals: Signals) -> Tensor:
    """A pi / mu: the unbiased surrogate."""
    return signals.advantages * signals.ratio


def ppo_clip(signals: Signals, *, epsilon_low: float, epsilon_high: float) -> Tensor:
    """min(ratio A, clip(ratio) A)."""
    return _pessimistic(signals, signals.ratio, signals.ratio.clamp(1 - epsilon_low, 1 + epsilon_high))


def sequence_clip(signals: Signals, *, epsilon_low: float, epsilon_high: float) -> Tensor:
    """min(s A, clip(s) A), s the geometric mean of the response's ratios."""
    ratio = sequence_ratio(signals, signals.mask)
    return _pessimistic(signals, ratio, ratio.clamp(1 - epsilon_low, 1 + epsilon_high))


def clipped_geometric(signals: Signals, *, log_clip_low: float, log_clip_high: float) -> Tensor:
    """A times the geometric mean of the clipped ratios."""
    ratio = clipped_sequence_ratio(
        signals, signals.mask, log_clip_low=log_clip_low, log_clip_high=log_clip_high
    )
    return signals.advantages * ratio


def gate(signals: Signals, *, tau_positive: float, tau_negative: float) -> Tensor:
    """A 4/tau sigmoid(tau (ratio - 1))."""
    tau = sharpness(signals, tau_positive, tau_negative)
    return signals.advantages * 4 / tau * torch.sigmoid(tau * (signals.ratio - 1))


def expected_probability(signals: Signals) -> Tensor:
    """A pi."""
    return signals.advantages * signals.logprobs.exp()


def mixture(signals: Signals, *, gamma: float) -> Tensor:
    """A p / (p + gamma) on expert rows, A ratio elsewhere."""
    p = signals.logprobs.exp()
    sampled = ratios.exponential(signals.sampled_log_ratio)
    return signals.advantages * torch.where(signals.expert_rows[:, None], p / (p + gamma), sampled)


def second_moment_clip(signals: Signals, *, budget: float, floor_low: float, floor_high: float) -> Tensor:
    """`ppo_clip` with the bounds of the step."""
    low, high = second_moment_bounds(signals, budget=budget, floor_low=floor_low, floor_high=floor_high)
    return _pessimistic(signals, signals.ratio, signals.ratio.clamp(low.exp(), high.exp()))


def _pessimistic(signals: Signals, ratio: Tensor, clipped: Tensor) -> Tensor:
    """The lesser of two gains."""
    return torch.minimum(ratio * signals.advantages, clipped * signals.advantages)


GAIN: Mapping[tuple[str, str], Callable[..., Tensor]] = {
    ("all", "one"): likelihood,
    ("all", "ratio"): expectation,
    ("all", "probability"): expected_probability,
    ("all", "soft-gate"): gate,
    ("all", "expert-mixture"): mixture,
    ("one-side", "one"): capped_likelihood,
    ("one-side", "ratio"): ppo_clip,
    ("sequence-one-side", "sequence-ratio"): sequence_clip,
    ("log-one-side", "clipped-sequence-ratio"): clipped_geometric,
    ("second-moment", "ratio"): second_moment_clip,
}
"""By keep-mask and importance; each takes the parameters of both."""


def _half_product(derivative: Tensor, drift: Tensor) -> Tensor:
    """tau/2 d^2 from tau d and d."""
    return derivative * drift / 2


def no_penalty(signals: Signals) -> Tensor:
    """Nothing."""
    return torch.zeros_like(signals.logprobs)


def token_squared(signals: Signals, *, penalty: float) -> Tensor:
    """penalty (log ratio)^2."""
    return penalty * signals.log_ratio.square()


def response_squared(signals: Signals, *, tau: float) -> Tensor:
    """tau/2 d^2, spread over the response."""
    drift = signals.row_mean(signals.log_ratio)[:, None]
    return _half_product(regularisers.response_squared(signals, tau=tau), drift)


def pairwise_squared(signals: Signals, *, tau: float) -> Tensor:
    """tau/2 (d - mean of d in the group)^2, spread over the response."""
    centred = regularisers.pairwise_squared(signals, tau=tau)
    return centred.square() / (2 * max(tau, 1e-30)) / signals.lengths.clamp(min=1)[:, None]


def reference_squared(signals: Signals, *, tau: float) -> Tensor:
    """tau/2 d^2 to the reference, spread over the response."""
    drift = signals.row_mean(signals.reference_log_ratio)[:, None]
    return _half_product(regularisers.reference_squared(signals, tau=tau), drift)


def k2(signals: Signals, *, kl_coef: float) -> Tensor:
    """kl_coef/2 (log pi/ref)^2."""
    return kl_coef / 2 * signals.reference_log_ratio.square()


def k3(signals: Signals, *, kl_coef: float) -> Tensor:
    """kl_coef (ref/pi - 1 - log ref/pi), never negative."""
    drift = signals.reference_log_ratio
    return kl_coef * (ratios.exponential(-drift) - 1 + drift)


PENALTY: Mapping[str, Callable[..., Tensor]] = {
    "none": no_penalty,
    "token-squared": token_squared,
    "response-squared": response_squared,
    "pairwise-squared": pairwise_squared,
    "reference-squared": reference_squared,
    "k2": k2,
    "k3": k3,
}
