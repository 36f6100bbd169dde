"""What a policy would earn, from responses that another one sampled: estimates that are functions of means.

A response has the weight w = pi(y|x) / mu(y|x) = e^l, where l sums the log-ratios of its tokens, and a reward
r. Prompts count equally, and so do the responses to one prompt. Every estimate is a function of means over
prompts of a few numbers for each prompt (`COLUMNS`), so drawing prompts again costs one matrix product.

Sources: self-normalised and doubly robust estimators as in zr-obp (st-tech/zr-obp) and arXiv 1103.4601; the
leave-one-out mean of a prompt's rewards stands for a reward model: it does not depend on the response, so
that its expectation under any policy is itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TRUNCATION = 1.0
"""Largest ratio of a token in the truncated weight: no token may raise it."""

TEMPERED_SHARE = 0.25
"""Effective share of the responses that the power of the tempered weight leaves."""

LARGEST_EXPONENT = 700.0
"""Weights beyond e^700 are not numbers of 64 bits; what is computed of them is as large as can be told."""

COLUMNS = (
    *("reward", "baseline", "linear", "per_prompt"),
    *("w", "w_reward", "w_residual", "tempered", "tempered_reward", "truncated", "truncated_reward"),
)


@dataclass(frozen=True)
class Episodes:
    """Responses, or whole trajectories, with what two policies think of them; entry i belongs to episode i.

    `log_ratio`: l, summed over the tokens that the policy produced. `truncated`: the same sum where the
    ratio of a token is at most `TRUNCATION`. `prompt`: number of its prompt, 0 to prompts - 1, none unused.
    """

    log_ratio: Floats
    truncated: Floats
    reward: Floats
    prompt: Ints

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def counts(self) -> Ints:
        """Episodes of each prompt."""
        return np.bincount(self.prompt)

    @property
    def log_weight(self) -> Floats:
        """l minus the log of the number of episodes of the prompt: prompts count equally."""
        weight: Floats = self.log_ratio - np.log(self.counts)[self.prompt]
        return weight

    def mean_of_prompts(self, values: Floats) -> Floats:
        """Mean over each prompt's episodes, [prompts]."""
        means: Floats = np.bincount(self.prompt, values) / self.counts
        return means


@dataclass(frozen=True)
class Table:
    """`COLUMNS` of every prompt, [prompts, columns]; `scale` undoes the shift of the plain weights.

    `alpha` is the power of the tempered weight.
    """

    values: Floats
    scale: float
    alpha: float

    @classmethod
    def of(cls, episodes: Episodes) -> "Table":
        """The numbers that all estimates need."""
        reward, residual = episodes.reward, episodes.reward - loo_baseline(episodes)
        shift, weight = _exponentials(episodes.log_ratio)
        alpha = power_for(episodes.log_weight, TEMPERED_SHARE * len(episodes))
        tempered = _exponentials(alpha * episodes.log_ratio)[1]
        truncated = _exponentials(episodes.truncated)[1]
        columns = {
            "reward": reward,
            "baseline": reward - residual,
            "linear": residual * episodes.log_ratio,
            "w": weight,
            "w_reward": weight * reward,
            "w_residual": weight * residual,
            "tempered": tempered,
            "tempered_reward": tempered * reward,
            "truncated": truncated,
            "truncated_reward": truncated * reward,
        }
        means = {name: episodes.mean_of_prompts(values) for name, values in columns.items()}
        means["per_prompt"] = _snis_of_prompts(episodes)
        scale = float(np.exp(min(shift, LARGEST_EXPONENT)))
        return cls(np.stack([means[name] for name in COLUMNS], axis=1), scale, alpha)

    def estimates(self, means: Floats) -> dict[str, Floats]:
        """Every estimate from means of the columns, [..., columns] -> [...]."""
        named = dict(zip(COLUMNS, np.moveaxis(means, -1, 0), strict=True))
        named["scale"] = np.float64(self.scale)
        return {estimator.name: estimator.value(named) for estimator in ESTIMATORS}


@dataclass(frozen=True)
class Estimator:
    """One way to estimate; `bias` says what it is biased by, None where it is not."""

    name: str
    meaning: str
    bias: str | None
    value: Callable[[Mapping[str, Floats]], Floats]


ESTIMATORS = (
    Estimator(
        "logged", "the mean reward of the log", "it is that of the other policy", lambda m: m["reward"]
    ),
    Estimator(
        "dr_sn",
        "doubly robust: the leave-one-out mean of the prompt's rewards, corrected by the weighted, "
        "self-normalised rest",
        "1/n, as weights are normalised by their own mean",
        lambda m: m["baseline"] + _ratio(m["w_residual"], m["w"]),
    ),
    Estimator(
        "dr",
        "the same with weights as they are",
        None,
        lambda m: m["baseline"] + m["scale"] * m["w_residual"],
    ),
    Estimator("is", "mean of w r", None, lambda m: m["scale"] * m["w_reward"]),
    Estimator(
        "snis",
        "sum of w r over the sum of w",
        "1/n, as weights are normalised by their own mean",
        lambda m: _ratio(m["w_reward"], m["w"]),
    ),
    Estimator(
        "snis_prompt",
        "the same within each prompt, then the mean over prompts",
        "1/k for k responses a prompt, towards the log; a single response says nothing",
        lambda m: m["per_prompt"],
    ),
    Estimator(
        "tempered",
        "snis with weights to a power that leaves enough of them effective",
        "towards the log, the more the smaller the power",
        lambda m: _ratio(m["tempered_reward"], m["tempered"]),
    ),
    Estimator(
        "truncated",
        f"snis with the ratio of each token at most {TRUNCATION:g}",
        "what became likelier counts no more than it did",
        lambda m: _ratio(m["truncated_reward"], m["truncated"]),
    ),
    Estimator(
        "linear",
        "mean reward of the log plus the mean of advantage times log-ratio",
        "first order: right for a small drift only",
        lambda m: m["reward"] + m["linear"],
    ),
)

PRIMARY = "dr_sn"
"""The estimate that verdicts and comparisons rest on."""


def loo_baseline(episodes: Episodes) -> Floats:
    """Mean reward of the other episodes of the prompt, [episodes]; of the other prompts where there is none.

    Independent of the episode's own reward and weight, which keeps a corrected estimate unbiased.
    """
    counts, total = episodes.counts, np.bincount(episodes.prompt, episodes.reward)
    means = total / counts
    others = counts[episodes.prompt] - 1
    elsewhere = (means.sum() - means) / max(len(means) - 1, 1)
    baseline: Floats = np.where(
        others > 0,
        (total[episodes.prompt] - episodes.reward) / np.maximum(others, 1),
        elsewhere[episodes.prompt],
    )
    return baseline


def effective_size(log_weight: Floats) -> float:
    """(sum w)^2 / sum w^2 from log-weights, without leaving the log domain."""
    return float(np.exp(2 * log_sum(log_weight) - log_sum(2 * log_weight)))


def power_for(log_weight: Floats, size: float) -> float:
    """The largest power in [0, 1] of the weights that leaves an effective size of `size`, by bisection."""
    if effective_size(log_weight) >= size:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if effective_size(middle * log_weight) >= size else (low, middle)
    return low


def log_sum(values: Floats) -> float:
    """log of the sum of e^values."""
    largest = values.max()
    return float(largest + np.log(np.exp(values - largest).sum()))


def _exponentials(exponents: Floats) -> tuple[float, Floats]:
    """A shift, and e^(exponents - shift), which is at most 1."""
    shift = float(exponents.max())
    return shift, np.exp(exponents - shift)


def _snis_of_prompts(episodes: Episodes) -> Floats:
    """Self-normalised within each prompt, shifted by the prompt's own largest, [prompts]."""
    largest = np.full(len(episodes.counts), -np.inf)
    np.maximum.at(largest, episodes.prompt, episodes.log_ratio)
    weight = np.exp(episodes.log_ratio - largest[episodes.prompt])
    value: Floats = np.bincount(episodes.prompt, weight * episodes.reward) / np.bincount(
        episodes.prompt, weight
    )
    return value


def _ratio(above: Floats, below: Floats) -> Floats:
    """Quotient; not a number where a resample has none of the few prompts whose weights are not 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient: Floats = above / below
    return quotient
