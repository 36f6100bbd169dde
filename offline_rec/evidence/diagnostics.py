"""How far a policy is from the one that sampled, and whether its weights can carry an estimate."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from offline_rec.evidence.estimators import LARGEST_EXPONENT, Episodes, Floats, effective_size, log_sum

LEAST_TAIL = 5
"""Weights that a tail needs to be fitted."""


@dataclass(frozen=True)
class Drift:
    """Sums over all tokens: their number, log-ratios log(pi/mu), and k3 = ratio - 1 - log-ratio."""

    tokens: int
    log_ratio: float
    k3: float


@dataclass(frozen=True)
class Diagnostics:
    """Facts about the weights of a policy on the episodes of a log.

    `ess`: effective number of episodes, (sum w)^2 / sum w^2; `ess_share`: over their number. `max_weight`:
    share of the largest weight in all. `mean_weight`: 1 in expectation, with its standard error over prompts.
    `chi2`: mean w^2 - 1. `kl`, `kl_k3`: KL(mu || pi) in nats per token, as mean -log ratio and by k3;
    `kl_sequence` per episode. `pareto_k`: tail index of the weights (PSIS), null where they have no tail.
    `reward_std`: of all rewards.
    """

    episodes: int
    prompts: int
    tokens: int
    ess: float
    ess_share: float
    max_weight: float
    mean_weight: float
    mean_weight_se: float
    chi2: float
    kl: float
    kl_k3: float
    kl_sequence: float
    pareto_k: float | None
    reward_std: float

    @classmethod
    def of(cls, episodes: Episodes, drift: Drift) -> "Diagnostics":
        """Measured on all episodes, prompts counting equally."""
        log_weight = episodes.log_weight
        prompts, total = len(episodes.counts), log_sum(log_weight)
        size = effective_size(log_weight)
        mean, error = _mean_weight(episodes)
        return cls(
            episodes=len(episodes),
            prompts=prompts,
            tokens=drift.tokens,
            ess=size,
            ess_share=size / len(episodes),
            max_weight=float(np.exp(log_weight.max() - total)),
            mean_weight=mean,
            mean_weight_se=error,
            chi2=_exp(log_sum(episodes.log_weight + episodes.log_ratio) - math.log(prompts)) - 1,
            kl=-drift.log_ratio / max(drift.tokens, 1),
            kl_k3=drift.k3 / max(drift.tokens, 1),
            kl_sequence=-float(episodes.mean_of_prompts(episodes.log_ratio).mean()),
            pareto_k=pareto_k(log_weight),
            reward_std=float(episodes.reward.std()),
        )

    def facts(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def pareto_k(log_weight: Floats) -> float | None:
    """Tail index of the weights: a generalised Pareto distribution fitted to the largest of them.

    The tail is the largest min(n/5, 3 sqrt(n)) weights (Vehtari et al., arXiv 1507.02646). Above 0.7 means
    of the weights are not to be trusted. None where the tail is flat; infinite where it is too short.
    """
    count = math.ceil(min(0.2 * len(log_weight), 3 * math.sqrt(len(log_weight))))
    if count < LEAST_TAIL or count >= len(log_weight):
        return math.inf
    largest = np.sort(np.partition(log_weight, -count - 1)[-count - 1 :])
    weights = np.exp(largest - largest[-1])
    excess = weights[1:] - weights[0]
    excess = excess[excess > 0]
    if not len(excess):
        return None
    return math.inf if len(excess) < LEAST_TAIL else _generalised_pareto_shape(excess)


def _generalised_pareto_shape(excess: Floats) -> float:
    """Shape by the empirical Bayes fit of Zhang and Stephens (Technometrics 51, 2009), with PSIS's prior.

    `excess` is positive and ascending.
    """
    n = len(excess)
    grid = 30 + int(math.sqrt(n))
    quartile = excess[int(n / 4 + 0.5) - 1]
    theta = (1 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))) / (3 * quartile) + 1 / excess[-1]
    shape = np.log1p(-theta[:, None] * excess).mean(1)
    likelihood = n * (np.log(-theta / shape) - shape - 1)
    posterior = np.exp(likelihood - likelihood.max())
    best = (theta * posterior).sum() / posterior.sum()
    fitted = np.log1p(-best * excess).mean()
    return float((n * fitted + 5) / (n + 10))  # ten pseudo-observations of 0.5


def _mean_weight(episodes: Episodes) -> tuple[float, float]:
    """Mean of the weights, and its standard error over prompts."""
    shift = float(episodes.log_ratio.max())
    means = episodes.mean_of_prompts(np.exp(episodes.log_ratio - shift))
    scale = _exp(shift)
    error = means.std(ddof=1) / math.sqrt(len(means)) if len(means) > 1 else math.inf
    return scale * float(means.mean()), scale * float(error)


def _exp(exponent: float) -> float:
    return math.exp(min(exponent, LARGEST_EXPONENT))
