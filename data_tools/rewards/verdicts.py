"""What a rule for rows gives: a reward or null for each row of a table, and notes on what went wrong."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from data_tools.collecting.coerce import coerce
from data_tools.collecting.reasons import Notes

FAILED, UNREADABLE, ABSENT = "reward_failed", "reward_unreadable", "reward_absent"


@dataclass(slots=True)
class Verdicts:
    """A reward for each row (float64, null where there is none), and notes that count rows of the table."""

    rewards: pa.Array
    notes: Notes = field(default_factory=Notes)


class RewardRule(ABC):
    """Judges rows, a batch at a time."""

    reads_reward = False
    """Whether the reward that the log holds is part of the rule, rather than replaced by it."""

    @abstractmethod
    def __call__(self, table: pa.Table) -> Verdicts:
        """Judge the rows of a table with columns of the schema ROLLOUTS."""

    def finish(self) -> None:  # noqa: B027  # most have nothing to say
        """Called behind the last row, before anything is kept: ConfigError if the rule cannot be meant."""


def as_logged(values: Sequence[Any], *, textual: bool = False) -> Verdicts:
    """Rewards from values as a log writes them, read as those of a log are; `textual`: text is no oddity."""
    read = coerce("reward", values, textual=textual)
    for row in sorted(read.refused):
        read.notes.add(UNREADABLE, [row])
    return Verdicts(pa.array(read.values, pa.float64()), read.notes)
