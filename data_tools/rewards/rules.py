"""What a reward is, in one text: a field, an SQL expression over the row, or a function `module:function`.

A rule judges rows of the schema ROLLOUTS: a number or null for each. What fails is null, never 0, and counted
with the first error in words. Rewards by name are functions; whoever knows the name passes the function in.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb
import orjson
import pyarrow as pa

from data_tools.collecting.coerce import coerce
from data_tools.collecting.reasons import Notes
from data_tools.errors import ConfigError
from data_tools.rewards.functions import function_reward
from data_tools.rewards.reward import NOT_JUDGED, Reward
from data_tools.schema import ROLLOUTS
from data_tools.shaping.syntax import nodes, parse_select
from data_tools.store.connection import lock, open_duckdb
from data_tools.store.guard import check_expression

WHAT = "--reward"
FAILED, UNREADABLE, ABSENT = "reward_failed", "reward_unreadable", "reward_absent"

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_FIELD = re.compile(r"[A-Za-z_]\w*")


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


def reward_rule(definition: str | Callable[..., Any]) -> RewardRule:
    """The rule that a text or a function stands for; raises ConfigError where it stands for none.

    A function is called as `(responses: list[str], **columns: list)` with a batch of rows; columns are those
    of the dataset and the fields of `extra`.
    """
    if isinstance(definition, Reward):
        return _FunctionRule(definition)
    if not isinstance(definition, str) or _FUNCTION.fullmatch(definition.strip()):
        return _FunctionRule(function_reward(definition))
    text = definition.strip()
    return _FieldRule(text) if _FIELD.fullmatch(text) else _SqlRule(text)


def _as_logged(values: Sequence[Any], *, textual: bool = False) -> Verdicts:
    """Rewards from values as a log writes them, read as those of a log are; `textual`: text is no oddity."""
    read = coerce("reward", values, textual=textual)
    for row in sorted(read.refused):
        read.notes.add(UNREADABLE, [row])
    return Verdicts(pa.array(read.values, pa.float64()), read.notes)


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

    def __call__(self, table: pa.Table) -> Verdicts:
        if self.name in ROLLOUTS.names:
            return _as_logged(table.column(self.name).to_pylist())
        extras = _extras(table)
        fields = [{**_scores(extra), **extra} for extra in extras]
        made = _as_logged([known.get(self.name) for known in fields])
        absent = [row for row, known in enumerate(fields) if self.name not in known]
        if absent:
            made.notes.add(ABSENT, absent, detail=f"no field {self.name!r}")
        return made


class _SqlRule(RewardRule):
    """An expression, run over the columns of a batch at once; a row for which it fails has no reward."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._con = open_duckdb()
        lock(self._con, [])
        check_expression(text, WHAT, self._con.cursor())
        tree = parse_select(self._con.cursor(), f"SELECT ({text}\n)")
        names = {str((part.get("column_names") or [""])[-1]).lower() for part in nodes(tree)}
        self.reads_reward = "reward" in names
        windows = any(part.get("class") == "WINDOW" for part in nodes(tree))
        # Over no rows an aggregate gives one row; unnest gives many over one.
        if windows or self._rows(ROLLOUTS.empty_table(), text) or "unnest" in _functions(tree):
            raise ConfigError(f"{WHAT}: {text!r} looks beyond its row", "a reward is judged row by row")

    def __call__(self, table: pa.Table) -> Verdicts:
        try:
            return _as_logged(self._rows(table, self.text), textual=True)
        except duckdb.Error as error:
            return self._salvaged(table, str(error).splitlines()[0])

    def _salvaged(self, table: pa.Table, error: str) -> Verdicts:
        """Judge again with failing rows as null; TRY gives no struct exactly where the expression fails."""
        try:
            tried = self._rows(table, f"TRY({{'value': ({self.text}\n)}})")
        except ConfigError:  # TRY takes no random numbers
            raise ConfigError(
                f"{WHAT}: {error}", "let it give null there, for example with try_cast"
            ) from None
        made = _as_logged([None if one is None else one["value"] for one in tried], textual=True)
        made.notes.add(FAILED, [row for row, one in enumerate(tried) if one is None], detail=error)
        return made

    def _rows(self, table: pa.Table, expression: str) -> list[Any]:
        """The value of an expression for each row; a ConfigError where it does not fit the columns."""
        self._con.register("rollouts", table)
        try:
            found = self._con.sql(f"SELECT ({expression}\n) AS value FROM rollouts").to_arrow_table()
        except (duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException) as error:
            columns = f"columns: {', '.join(ROLLOUTS.names)}; other fields as extra->>'name'"
            raise ConfigError(f"{WHAT}: {str(error).splitlines()[0]}", columns) from error
        finally:
            self._con.unregister("rollouts")
        values: list[Any] = found.column("value").to_pylist()
        return values


def _functions(tree: Any) -> set[str]:
    return {str(part.get("function_name", "")).lower() for part in nodes(tree)}


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
