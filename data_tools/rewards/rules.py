"""What a reward is, in one text: a reward by name, a field, an SQL expression over the row, or a function.

A rule judges rows of the schema ROLLOUTS: a number or null for each. What fails is null, never 0, and counted
with the first error in words.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson
import pyarrow as pa

from data_tools.collecting.reasons import Notes
from data_tools.errors import ConfigError
from data_tools.rewards.functions import function_reward
from data_tools.rewards.named import REWARDS, spelt, sql_or_unknown
from data_tools.rewards.reward import NOT_JUDGED, Reward
from data_tools.rewards.sql import SqlRule
from data_tools.rewards.verdicts import ABSENT, FAILED, RewardRule, Verdicts, as_logged
from data_tools.schema import ROLLOUTS

_FIELD = re.compile(r"[A-Za-z_]\w*")
_REMEMBERED = 1000
_SHOWN = 20
"""Fields that an error lists at most."""


def reward_rule(definition: str | Callable[..., Any]) -> RewardRule:
    """The rule that a text or a function stands for; raises ConfigError where it stands for none.

    A text is a reward by name (named.py), else a field, else SQL. A function is called as
    `(responses: list[str], **columns: list)` with a batch of rows; columns are those of the dataset and the
    fields of `extra`.
    """
    if isinstance(definition, Reward):
        return _FunctionRule(definition)
    if not isinstance(definition, str):
        return _FunctionRule(function_reward(definition))
    text = definition.strip()
    if _FIELD.fullmatch(text) and text not in REWARDS:
        return _FieldRule(text)
    reward = spelt(text)
    return sql_or_unknown(text, SqlRule) if reward is None else _FunctionRule(reward)


def _extras(table: pa.Table) -> list[dict[str, Any]]:
    return [{} if text is None else orjson.loads(text) for text in table.column("extra").to_pylist()]


def _scores(extra: dict[str, Any]) -> dict[str, Any]:
    """Scores by name, where a log has them under a field of their own."""
    scores = extra.get("scores")
    return scores if isinstance(scores, dict) else {}


class _FieldRule(RewardRule):
    """A column of the dataset, else a field of `extra`, else one of its scores; counts rows without it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reads_reward = name == "reward"
        self._missing = 0
        self._found = False
        self._seen: dict[str, None] = {}

    def __call__(self, table: pa.Table) -> Verdicts:
        if self.name in ROLLOUTS.names:
            return as_logged(table.column(self.name).to_pylist())
        extras = _extras(table)
        fields = [{**_scores(extra), **extra} for extra in extras]
        made = as_logged([known.get(self.name) for known in fields])
        absent = [row for row, known in enumerate(fields) if self.name not in known]
        self._missing += len(absent)
        self._found |= len(absent) < len(fields)
        for known in fields if len(self._seen) < _REMEMBERED else ():
            self._seen |= dict.fromkeys(known)
        if absent:
            made.notes.add(ABSENT, absent, detail=f"no field {self.name!r}")
        return made

    def finish(self) -> None:
        """Refuse a name that stood for nothing: most likely it is misspelt."""
        if not self._missing or self._found:
            return
        known = [*REWARDS, *self._seen, *ROLLOUTS.names]
        near = difflib.get_close_matches(self.name, known, n=1)
        fields = ", ".join(sorted(self._seen)[:_SHOWN]) or "none"
        hint = f"rewards: {', '.join(REWARDS)}; fields of the records: {fields}"
        raise ConfigError(
            f"--reward {self.name!r} is no reward, and no record has a field of that name",
            f"did you mean {near[0]!r}?" if near else hint,
        )


class _FunctionRule(RewardRule):
    """A function of responses and columns; rows without a text cannot be judged by one."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._fields: set[str] = set()

    def __call__(self, table: pa.Table) -> Verdicts:
        texts = table.column("response").to_pylist()
        rows = [row for row, text in enumerate(texts) if text is not None]
        judgeable = table if len(rows) == len(texts) else table.take(pa.array(rows, pa.int64()))
        columns = _Columns(judgeable, self._fields)
        judged = self.reward.judge_rows([texts[row] for row in rows], columns)
        rewards: list[float | None] = [None] * len(texts)
        notes = Notes()
        for row, reward, reason in zip(rows, judged.rewards, judged.reasons, strict=True):
            rewards[row] = reward
            if reason not in (None, NOT_JUDGED):
                notes.add(FAILED, [row], detail=f"{self.reward.name}: {reason}")
        silent = [row for row, text in enumerate(texts) if text is None]
        if silent:
            notes.add(FAILED, silent, detail="no response text")
        return Verdicts(pa.array(rewards, pa.float64()), notes)


class _Columns(Mapping[str, list[Any]]):
    """Columns and fields of `extra` by name, made when asked for: most functions name one or two.

    `fields` remembers the fields of earlier batches, so that one which this batch lacks is null, not unknown.
    """

    def __init__(self, table: pa.Table, fields: set[str]) -> None:
        self._table = table
        self._extras = _extras(table)
        fields.update(name for extra in self._extras for name in extra)
        self._names = [name for name in table.column_names if name != "response"]
        self._names += sorted(fields.difference(table.column_names))

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._names:
            raise KeyError(name)
        if name in self._table.column_names:
            values: list[Any] = self._table.column(name).to_pylist()
            return values
        return [extra.get(name) for extra in self._extras]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
