"""What a shaping must fulfil beyond valid SQL: rows are left, and their numbers can be used."""

import math
from typing import TYPE_CHECKING

from data_tools.errors import DataError
from data_tools.shaping.columns import ROW_COLUMNS
from data_tools.shaping.expressions import parse_expression
from data_tools.shaping.fields import Shaping, Split
from data_tools.shaping.statement import UNREWARDED, stages, with_stages

if TYPE_CHECKING:
    import duckdb

NAMED = 5
"""Rows that an error names."""

LARGEST = 3.4e38
"""Training computes in 32 bits, in which a larger number is infinite."""

VALID = {
    "advantage": f"abs(advantage) <= {LARGEST}",
    "weight": f"weight BETWEEN 0 AND {LARGEST}",
    "priority": f"priority BETWEEN 0 AND {LARGEST}",
}


def invalid(column: str) -> str:
    """Return the condition under which a row's number cannot be used; null cannot."""
    return f"NOT coalesce({VALID[column]}, false)"


def invalid_rows(con: "duckdb.DuckDBPyConnection", shaping: Shaping, split: Split) -> DataError:
    """Return the error that names the rows whose advantage, weight or priority cannot be used."""
    for column in VALID:
        select = f"""SELECT response_id, {column}, reward IS NULL, count(*) OVER () FROM final
            WHERE kept AND {invalid(column)} ORDER BY response_id LIMIT {NAMED}"""
        rows = con.execute(with_stages(stages(shaping, split), select)).fetchall()
        if rows:
            return _invalid(con, shaping, column, rows)
    return DataError("shaping: some rows cannot be used", "they changed while they were read: run again")


def _invalid(
    con: "duckdb.DuckDBPyConnection", shaping: Shaping, column: str, rows: list[tuple[object, ...]]
) -> DataError:
    text, count = getattr(shaping, column), rows[0][3]
    named = ", ".join(f"{row[0]} ({'null' if row[1] is None else format(row[1], '.6g')})" for row in rows)
    more = ", ..." if int(str(count)) > len(rows) else ""
    plural = "" if count == 1 else "s"
    wrong = "is not a finite number" + ("" if column == "advantage" else " of at least 0")
    if all(LARGEST < abs(float(str(row[1] or 0))) < math.inf for row in rows):
        wrong = f"is too large to train with (beyond {LARGEST:g})"
    subject = "the advantage" if text == "advantage" == column else f"{column} = {text!r}"
    message = f"{subject} {wrong} in {count:,} row{plural}: {named}{more}"
    if column == "advantage" and rows[0][2]:
        return DataError(message, "without a reward there is no advantage: set one, as in advantage = 1")
    nulls = _null_columns(con, shaping, column, [str(row[0]) for row in rows if row[1] is None])
    if nulls:
        name = nulls[0]
        return DataError(
            message,
            f"{name} is null there: say what stands for it, coalesce({name}, ...), or leave the rows out:"
            f" where {name} is not null",
        )
    if column == "advantage":
        return DataError(message, f"look at baseline = {shaping.baseline!r} and scale = {shaping.scale!r}")
    return DataError(message, f"bound it, as in least({text}, 10), or leave the rows out with keep")


def _null_columns(
    con: "duckdb.DuckDBPyConnection", shaping: Shaping, column: str, ids: list[str]
) -> list[str]:
    """Return the columns that the expressions behind a value use and that are null in a row."""
    fields = ["baseline", "scale", "advantage"] if column == "advantage" else [column]
    used = {name for field in fields for name in parse_expression(field, getattr(shaping, field)).reads}
    names = sorted(used & ROW_COLUMNS)
    if not names or not ids:
        return []
    counted = ", ".join(f"bool_or({name} IS NULL)" for name in names)
    query = f"SELECT {counted} FROM rollouts WHERE response_id IN (FROM unnest(?))"
    found = con.execute(query, [ids]).fetchone()
    return [name for name, null in zip(names, found or (), strict=True) if null]


def any_turns(con: "duckdb.DuckDBPyConnection") -> bool:
    """Return whether some row is a turn of a trajectory; where none is, footers of files tell."""
    query = "SELECT 1 FROM rollouts WHERE trajectory_id IS NOT NULL LIMIT 1"
    return con.execute(query).fetchone() is not None


def check_trajectories(con: "duckdb.DuckDBPyConnection", shaping: Shaping, split: Split) -> None:
    """Raise a DataError if the last rewarded turn of a trajectory is not one row, and it matters which."""
    select = """SELECT trajectory_id, list(response_id ORDER BY response_id)[:2] FROM (
            SELECT *, rank() OVER (
                PARTITION BY group_key, trajectory_id ORDER BY turn DESC NULLS LAST
            ) AS place FROM population WHERE trajectory_id IS NOT NULL AND reward IS NOT NULL
        ) WHERE place = 1 GROUP BY group_key, trajectory_id HAVING min(reward) <> max(reward)
        ORDER BY group_key, trajectory_id LIMIT 1"""
    found = con.execute(with_stages(stages(shaping, split)[:1], select)).fetchone()
    if found:
        raise DataError(
            f"trajectory {found[0]!r} has two rewards at its last turn: responses {' and '.join(found[1])}",
            "number its turns in the column turn, or leave all but one out with where",
        )


def nothing_left(con: "duckdb.DuckDBPyConnection", shaping: Shaping, split: Split) -> DataError:
    """Return the error that says which field left no row, out of how many."""
    by_split = dict(con.execute("SELECT split, count(*) FROM rollouts GROUP BY split").fetchall())
    in_split = sum(by_split.values()) if split == "all" else by_split.get(split, 0)
    if not by_split:
        return DataError("the dataset has no rollouts", "add some with: rec collect LOGS --into DS")
    if not in_split:
        return DataError(f"split {split} has no rows", _by_split(by_split))
    chain = stages(shaping, split)
    counts = f"SELECT (SELECT count(*) FROM population), (SELECT count(*) FROM ({UNREWARDED}))"
    [(population, unrewarded)] = con.execute(with_stages(chain[:2], counts)).fetchall()
    if not population:
        others = {name: _matching(con, shaping, name) for name in by_split}
        return DataError(
            f"where = {shaping.where!r} matches none of the {in_split:,} rows of split {split}",
            f"{_by_split(by_split)}; of them match {_listed(others)}",
        )
    if population == unrewarded and shaping.unrewarded == "drop":
        return DataError(
            f"none of the {population:,} rows has a reward",
            "add rewards with `rec reward`, or choose an algorithm that needs none",
        )
    [(weighted,)] = con.execute(with_stages(chain, "SELECT count(*) FROM final")).fetchall()
    field, rows = ("keep", weighted) if weighted else ("drop", population)
    return DataError(
        f"{field} = {getattr(shaping, field)!r} leaves none of {rows:,} rows",
        "if all rewards of every group are equal, no group has anything to learn from"
        if field == "drop"
        else "`rec fit --explain` shows the rows of every step of the shaping",
    )


def _matching(con: "duckdb.DuckDBPyConnection", shaping: Shaping, split: Split) -> int:
    statement = with_stages(stages(shaping, split)[:1], "SELECT count(*) FROM population")
    return int(str(con.execute(statement).fetchall()[0][0]))


def _by_split(counts: dict[str, int]) -> str:
    return f"rows by split: {_listed(counts)}"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
