"""Completions that TRL logs (`log_completions`): one Parquet file a logging step, texts or messages.

Columns besides step, prompt and completion: one of floats per reward function, whatever the user logs, and
the advantage. There is no group id: equal prompts are one group.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from data_tools.readers.base import Carries, Log, Refused, Values, first_object, without
from data_tools.readers.reward_columns import ADVANTAGES, RewardColumnsReader

FIELDS = {"step", "prompt", "completion"}


class TrlReader(RewardColumnsReader):
    """One record is one response."""

    name = "trl"
    title = "TRL completions, text or conversational (Parquet)"
    carries = Carries(
        prompt="text or messages",
        group="equal prompts",
        reward="if there is one reward function",
        version="step",
    )
    names: ClassVar[Mapping[str, str]] = {"response": "completion", "policy_version": "step"}

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first row has a step, a prompt, a completion and its advantage."""
        first = first_object(samples)
        told = first.keys() >= FIELDS and any(name in first for name in ADVANTAGES)
        return told and not isinstance(first["step"], list)

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the response of a record."""
        yield {
            "prompt": record.get("prompt"),
            "response": record.get("completion"),
            "policy_version": record.get("step"),
            "extra": without(record, *FIELDS),
        }
