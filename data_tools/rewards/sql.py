"""An SQL expression as a reward: over the rows of a dataset, or over responses and columns."""

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb
import orjson
import pyarrow as pa

from data_tools.errors import ConfigError, DataError
from data_tools.rewards.reward import Columns, NotJudged, Rule
from data_tools.rewards.verdicts import FAILED, RewardRule, Verdicts, as_logged
from data_tools.schema import ROLLOUTS
from data_tools.shaping.syntax import nodes, parse_select
from data_tools.store.connection import lock, open_duckdb
from data_tools.store.guard import check_expression

WHAT = "--reward"


class SqlRule(RewardRule):
    """An expression, run over the columns of a batch at once; a row for which it fails has no reward."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._con = open_duckdb()
        lock(self._con, [])
        check_expression(text, WHAT, self._con.cursor())
        tree = parse_select(self._con.cursor(), f"SELECT ({text}\n)")
        self.names = {str((part.get("column_names") or [""])[-1]).lower() for part in nodes(tree)}
        self.reads_reward = "reward" in self.names
        windows = any(part.get("class") == "WINDOW" for part in nodes(tree))
        # Over no rows an aggregate gives one row; unnest gives many over one.
        if windows or self._rows(ROLLOUTS.empty_table(), text) or "unnest" in _functions(tree):
            raise ConfigError(f"{WHAT}: {text!r} looks beyond its row", "a reward is judged row by row")

    def __call__(self, table: pa.Table) -> Verdicts:
        """Judge the rows; those that fail are counted with the first error."""
        values = self.values(table)
        failed = {row: str(value) for row, value in enumerate(values) if isinstance(value, NotJudged)}
        made = as_logged([None if row in failed else value for row, value in enumerate(values)], textual=True)
        if failed:
            made.notes.add(FAILED, failed, detail=next(iter(failed.values())))
        return made

    def values(self, table: pa.Table) -> list[Any]:
        """What the expression is for each row; a `NotJudged` where it fails."""
        try:
            return self._rows(table, self.text)
        except duckdb.Error as error:
            return self._salvaged(table, str(error).splitlines()[0])

    def _salvaged(self, table: pa.Table, error: str) -> list[Any]:
        """Judge again with failing rows set apart; TRY gives no struct exactly where the expression fails."""
        try:
            tried = self._rows(table, f"TRY({{'value': ({self.text}\n)}})")
        except ConfigError:  # TRY takes no random numbers
            raise ConfigError(
                f"{WHAT}: {error}", "let it give null there, for example with try_cast"
            ) from None
        return [NotJudged(error) if one is None else one["value"] for one in tried]

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


def sql(expression: str) -> Rule:
    """The value of an SQL expression over the row, as `rec collect --reward` takes it.

    Columns of the dataset have their names; every other column is `extra->>'name'`.
    """
    rule = SqlRule(expression)

    def judge(responses: list[str], columns: Columns) -> Sequence[Any]:
        values = rule.values(_table(responses, columns, rule.names))
        read = as_logged([None if isinstance(v, NotJudged) else v for v in values], textual=True)
        return list(map(_verdict, values, read.rewards.to_pylist()))

    return judge


def _verdict(value: Any, reward: float | None) -> Any:
    if isinstance(value, NotJudged) or value is None or reward is not None:
        return value if isinstance(value, NotJudged) else reward
    return NotJudged(f"not a number: {str(value)[:80]!r}")


def _table(responses: list[str], columns: Columns, names: set[str]) -> pa.Table:
    """Responses and columns as rows of a dataset, as far as `names` asks for them."""
    arrays: dict[str, pa.Array] = {}
    for field in ROLLOUTS:
        values: Sequence[Any] | None = None
        if field.name == "response":
            values = responses
        elif field.name in names and field.name in columns:
            values = columns[field.name]
        elif field.name == "extra" and "extra" in names:
            values = _extra(columns, len(responses))
        try:
            arrays[field.name] = (
                pa.nulls(len(responses), field.type) if values is None else pa.array(values, field.type)
            )
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"{WHAT}: column {field.name} is not {field.type}: {error}") from error
    return pa.table(arrays)


def _extra(columns: Mapping[str, Sequence[Any]], count: int) -> list[str]:
    others = {name: columns[name] for name in columns if name not in ROLLOUTS.names}
    rows = [dict(zip(others, values, strict=True)) for values in zip(*others.values(), strict=True)]
    return [orjson.dumps(row, default=str).decode() for row in rows or [{}] * count]
