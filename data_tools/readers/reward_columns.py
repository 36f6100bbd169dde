"""Logs with one column per reward function, named after the function, and no total.

A single one is the reward. Of several, how they were weighted is in the trainer's configuration, not in the
log: the reward is missing then, and `--reward` names a column or combines them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data_tools.readers.base import Chunk, Log, RecordReader

ADVANTAGES = ("advantage", "advantages")
"""Columns behind the rewards: trainers write what they log besides after them."""

NO_REWARDS = (*ADVANTAGES, "entropy")


class RewardColumnsReader(RecordReader):
    """A format whose `rows` leave the reward columns in `extra`, in the order of the log."""

    def chunks(self, log: Log) -> Iterator[Chunk]:
        """Read record by record; a column that held rewards in one chunk does so in all that follow."""
        known: dict[str, None] = {}
        for chunk in super().chunks(log):
            known |= dict.fromkeys(reward_columns(chunk.columns.get("extra", ())))
            _take_reward(chunk, list(known))
            yield chunk


def reward_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the fields that hold floats, NaN included, wherever they hold anything."""
    floats: dict[str, bool] = {}
    for row in rows:
        for name in _before_advantages(row):
            if row[name] is not None:
                floats[name] = floats.get(name, True) and type(row[name]) is float
    return [name for name, all_floats in floats.items() if all_floats and name not in NO_REWARDS]


def _before_advantages(row: Mapping[str, Any]) -> list[str]:
    names = list(row)
    ends = [at for at, name in enumerate(names) if name in ADVANTAGES]
    return names[: ends[0]] if ends and ends[0] else names


def _take_reward(chunk: Chunk, names: Sequence[str]) -> None:
    """Make a single reward column the reward; NaN says that the function does not apply."""
    extras = chunk.columns.get("extra", ())
    for extra in extras:
        for name in [name for name, value in extra.items() if isinstance(value, float) and math.isnan(value)]:
            del extra[name]
    if len(names) > 1:
        chunk.notes["several_rewards"] += len(extras)
    elif names:
        chunk.columns["reward"] = [extra.pop(names[0], None) for extra in extras]
        chunk.names["reward"] = names[0]
