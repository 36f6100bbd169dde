"""Turns what DuckDB says about a whole statement into an error about the one field that is wrong."""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from data_tools.errors import ConfigError, DataError
from data_tools.shaping.columns import FIELDS, ROW_COLUMNS
from data_tools.shaping.fields import Shaping, Split
from data_tools.shaping.macros import MACROS
from data_tools.shaping.presets import PRESETS
from data_tools.shaping.statement import NULL_KEY, compile
from data_tools.store.sql_errors import COLUMNS

if TYPE_CHECKING:
    import duckdb

_MISSING_COLUMN = re.compile(r'Referenced column "([^"]+)" (?:was )?not found')
_VALUE_ERROR = re.compile(r"(Conversion|Invalid Input|Out of Range|Mismatch Type|Not implemented) Error: ")
_MISSING_FUNCTION = re.compile(r"Function with name (\S+) does not exist")


@contextmanager
def sql_errors_named(con: "duckdb.DuckDBPyConnection", shaping: Shaping, split: Split) -> Iterator[None]:
    """Raise DuckDB's complaints as a ConfigError that names the field, or a DataError that names the row."""
    import duckdb

    try:
        yield
    except (duckdb.ProgrammingError, duckdb.DataError, duckdb.NotSupportedError, OSError) as error:
        # In the middle of a stream DuckDB's errors arrive as Arrow's.
        if isinstance(error, OSError) and not _VALUE_ERROR.match(str(error)):
            raise
        if NULL_KEY in str(error):
            raise _null_key(shaping, str(error)) from error
        blamed = _blame(con, shaping, split, error)
        if blamed is None:
            raise
        raise blamed from error


def _null_key(shaping: Shaping, message: str) -> DataError:
    row = message.split(NULL_KEY, 1)[1].split("\n", 1)[0]
    return DataError(
        f"group_by = {shaping.group_by!r} is null for the response {row}",
        f"give them one, as in coalesce({shaping.group_by}, response_id), or leave them out with where",
    )


def _blame(
    con: "duckdb.DuckDBPyConnection", shaping: Shaping, split: Split, error: Exception
) -> ConfigError | None:
    """Add the fields back one by one, in the order in which they apply: the first that fails is to blame."""
    import duckdb

    run = not isinstance(error, duckdb.BinderException | duckdb.CatalogException | duckdb.ParserException)
    defaults = {name: Shaping.model_fields[name].default for name in FIELDS}
    if _failure(con, compile(shaping.model_copy(update=defaults), split=split), run):
        return None  # the data itself cannot be read
    for name in FIELDS:
        defaults.pop(name)
        message = _failure(con, compile(shaping.model_copy(update=defaults), split=split), run)
        if message:
            value = getattr(shaping, name)
            return ConfigError(f"{name} = {value!r}: {_first_line(message)}", _hint(name, message))
    return ConfigError(f"shaping: {_first_line(str(error))}", "`rec fit --explain` prints the statement")


def _failure(con: "duckdb.DuckDBPyConnection", statement: str, run: bool) -> str:
    import duckdb

    try:
        if not run:
            con.execute(f"EXPLAIN {statement}")
        else:
            for _ in con.sql(statement).to_arrow_reader(65_536):
                pass
    except (duckdb.Error, OSError) as error:
        return str(error)
    return ""


def _hint(name: str, message: str) -> str:
    visible = [*FIELDS[name], *ROW_COLUMNS, *PRESETS.get(name, ())]
    if found := _MISSING_COLUMN.search(message):
        missing = found[1].lower()
        later = [field for field, columns in FIELDS.items() if missing in columns]
        if later:
            return f"{missing} is only known in {', '.join(later)}"
        near = difflib.get_close_matches(missing, sorted(visible), 1)
        return f"did you mean {near[0]}?" if near else COLUMNS
    if found := _MISSING_FUNCTION.search(message):
        near = difflib.get_close_matches(found[1], MACROS, 1)
        if near:
            return f"did you mean {near[0]}({MACROS[near[0]].parameter})?"
    if "GROUP BY clause" in message or "cannot contain aggregates" in message:
        return "an aggregate says over which rows: avg(reward) over (partition by group_key)"
    rest = [line.strip() for line in message.split("\n")[1:] if line.strip()]
    useful = rest and not rest[0].startswith("LINE ")
    return " ".join(rest[:2]) if useful else "write one DuckDB expression over the columns of rollouts"


def _first_line(message: str) -> str:
    return re.sub(r"^[\w ]+ Error: ", "", message.split("\n", 1)[0])
