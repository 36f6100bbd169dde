"""What holds the policy back: derivatives of penalties with respect to a token's log-prob, one function each.

Every function takes the signals and its own parameters, and returns [B, S] or what broadcasts to it.
d is the log-ratio of a whole response: the sum over its tokens.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from offline_rec.objectives import ratios
from offline_rec.objectives.signals import Signals


def none(signals: Signals) -> Tensor:
    """Nothing."""
    return torch.zeros_like(signals.logprobs)


def token_squared(signals: Signals, *, penalty: float) -> Tensor:
    """Of penalty * (log ratio)^2 per token: no factor 1/2, so penalty = tau / 2."""
    return 2 * penalty * signals.log_ratio


def response_squared(signals: Signals, *, tau: float) -> Tensor:
    """Of tau/2 * d^2 per response: tau * d on each of its tokens (arXiv 2501.12599)."""
    return tau * signals.row_sum(signals.log_ratio)[:, None]


def pairwise_squared(signals: Signals, *, tau: float) -> Tensor:
    """Of tau/2 * (d - mean of d in the group)^2 per response, which no partition function can shift.

    The mean is weighted as the rows are: so the whole is the gradient of one loss, and a row of weight 0 has
    no part in it. Rows without a token stay out too.
    """
    drift = signals.row_sum(signals.log_ratio)
    weight = signals.weights * (signals.lengths > 0)
    _, group = torch.unique(signals.group_ids, return_inverse=True)
    total = torch.zeros_like(drift).index_add_(0, group, weight)
    weighted = torch.zeros_like(drift).index_add_(0, group, weight * drift)
    mean = weighted / torch.where(total > 0, total, 1.0)
    return tau * (drift - mean[group])[:, None]


def reference_squared(signals: Signals, *, tau: float) -> Tensor:
    """As `response_squared`, with the log-ratio to the reference policy (arXiv 2405.19107)."""
    return tau * signals.row_sum(signals.reference_log_ratio)[:, None]


def k2(signals: Signals, *, kl_coef: float) -> Tensor:
    """Of kl_coef/2 * (log pi/ref)^2 per token."""
    return kl_coef * signals.reference_log_ratio


def k3(signals: Signals, *, kl_coef: float) -> Tensor:
    """Of kl_coef * (ref/pi - 1 - log ref/pi) per token."""
    return kl_coef * (1 - ratios.exponential(-signals.reference_log_ratio))


REGULARISER: Mapping[str, Callable[..., Tensor]] = {
    "none": none,
    "token-squared": token_squared,
    "response-squared": response_squared,
    "pairwise-squared": pairwise_squared,
    "reference-squared": reference_squared,
}
KL: Mapping[str, Callable[..., Tensor]] = {"k2": k2, "k3": k3}
