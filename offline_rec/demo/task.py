"""Three-digit addition as text, every number with its least significant digit first: `321+654=` is `975`.

So the digits that an answer needs, and the carry, stand at fixed distances from it, which a transformer of a
hundred thousand parameters learns in seconds.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

LOW, HIGH = 100, 1000
NUMBERS = HIGH - LOW
PROMPT_TOKENS = 9
"""A token to begin with, and eight characters."""

ANSWER_TOKENS = 5
"""Four digits at most, and the end."""

ALPHABET = "0123456789+="


@dataclass(frozen=True)
class Problems:
    """Pairs of numbers to add, [problems] each."""

    first: Ints
    second: Ints

    def __len__(self) -> int:
        return len(self.first)

    def prompts(self) -> list[str]:
        """What the policy is asked."""
        return [
            f"{a[::-1]}+{b[::-1]}=" for a, b in zip(map(str, self.first), map(str, self.second), strict=True)
        ]

    def answers(self) -> list[str]:
        """What it should say."""
        return [str(total)[::-1] for total in self.first + self.second]

    def tiers(self) -> list[str]:
        """How hard each is: `gold` with two carries or more, `silver` with one, `bronze` with none."""
        carry = carries = np.zeros(len(self), np.int64)
        for power in (1, 10, 100):
            carry = (self.first // power % 10 + self.second // power % 10 + carry) // 10
            carries = carries + carry
        return [("bronze", "silver", "gold", "gold")[c] for c in carries]


@dataclass(frozen=True)
class Split:
    """All problems, cut into parts without a problem in common.

    `evaluation`: what policies are judged on, never logged. `log`: what the base policy answers.
    `development`: tells when pre-training has come far enough. `pool`: pre-training draws from it.
    """

    evaluation: Problems
    log: Problems
    development: Problems
    pool: Problems


def split(seed: int, *, evaluation: int, log: int, development: int) -> Split:
    """Shuffle all problems and cut off the three parts; the rest is the pool."""
    order = np.random.default_rng(seed).permutation(NUMBERS * NUMBERS)
    ends = np.cumsum([evaluation, log, development])
    parts = [Problems(LOW + part // NUMBERS, LOW + part % NUMBERS) for part in np.split(order, ends)]
    return Split(*parts)
