"""Policies over so few responses that what they are worth is a sum: three tokens of three, 16 prompts."""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offline_rec.evidence.diagnostics import Drift
from offline_rec.evidence.estimators import Episodes

VOCABULARY, LENGTH, KINDS = 3, 3, 16
RESPONSES = np.array(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))


def policy(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-probs of the tokens of every response to every prompt, [KINDS, responses, LENGTH].

    `logits` [KINDS, LENGTH, VOCABULARY + 1, VOCABULARY]: of a token, by its place and the token before.
    """
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    before = np.concatenate([np.full((len(RESPONSES), 1), VOCABULARY), RESPONSES[:, :-1]], axis=1)
    return np.stack([scores[:, t][:, before[:, t], RESPONSES[:, t]] for t in range(LENGTH)], axis=-1)


@dataclass(frozen=True)
class World:
    """Rewards of all responses [KINDS, responses], the policy that samples, and the one that is judged."""

    reward: NDArray[np.float64]
    mu: NDArray[np.float64]
    pi: NDArray[np.float64]

    @classmethod
    def drifted(cls, drift: float, *, seed: int = 0, towards_reward: float = 0.0) -> "World":
        """Logits moved at random by `drift`, or tilted so that each response gains e^(tilt * reward)."""
        rng = np.random.default_rng(seed)
        logits = rng.normal(0, 1, (KINDS, LENGTH, VOCABULARY + 1, VOCABULARY))
        moved = logits + drift * rng.normal(0, 1, logits.shape)
        reward = rng.random((KINDS, len(RESPONSES)))
        pi = policy(moved)
        if towards_reward:  # the last token carries what the tilt adds to the whole
            pi = policy(logits)
            tilted = pi.sum(-1) + towards_reward * reward
            pi[..., -1] += tilted - np.log(np.exp(tilted).sum(1, keepdims=True)) - pi.sum(-1)
        return cls(reward, policy(logits), pi)

    def value(self, logprobs: NDArray[np.float64]) -> float:
        """What a policy earns, exactly."""
        return float((np.exp(logprobs.sum(-1)) * self.reward).sum(1).mean())

    def log(self, rng: np.random.Generator, *, prompts: int = 100, group: int = 8) -> tuple[Episodes, Drift]:
        """A log that `mu` sampled: prompts drawn evenly, `group` responses each."""
        kind = rng.integers(0, KINDS, prompts)
        prompt = np.repeat(np.arange(prompts), group)
        cumulated = np.cumsum(np.exp(self.mu.sum(-1)), axis=1)[kind[prompt]]
        said = (rng.random((len(prompt), 1)) * cumulated[:, -1:] > cumulated).sum(1)
        ratio = (self.pi - self.mu)[kind[prompt], said]
        k3 = np.expm1(ratio) - ratio
        drift = Drift(ratio.size, float(ratio.sum()), float(k3.sum()))
        reward = self.reward[kind[prompt], said]
        return Episodes(ratio.sum(1), np.minimum(ratio, 0).sum(1), reward, prompt), drift
