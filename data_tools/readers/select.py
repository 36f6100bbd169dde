"""Any log through one SELECT: `source` is the log as a table, the columns of the result are the dataset's.

`source_row` is the line or row of the log, from 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import duckdb

from data_tools.collecting.columns import LOOSE, MAPPED
from data_tools.collecting.selectable import CONTENT, Selectable, selectable
from data_tools.errors import ConfigError, DataError
from data_tools.logs.log import Log
from data_tools.readers.base import Carries, Chunk, Reader
from data_tools.readers.rows import Layout, table_chunks
from data_tools.store.connection import lock, open_duckdb
from data_tools.store.guard import check_expression, check_select
from data_tools.store.views import identifier

ROW = "source_row"

_BATCH = 2048


class SelectReader(Reader):
    """Reads a log by the user's SELECT, or by expressions for single columns."""

    title = "any log through a SELECT over `source` (--select, --map)"
    carries = Carries(*["as selected"] * 7)

    def __init__(self, query: str, *, mapped: bool = False) -> None:
        """`mapped` says that the query keeps every field, so that its rows are the log's own rows."""
        self.query, self.mapped = query, mapped
        self.name = "rows" if mapped else "select"

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take whatever is a table."""
        return log.kind in ("jsonl", "json", "csv", "parquet")

    def chunks(self, log: Log) -> Iterator[Chunk]:
        """Run the query over the log and stream its result."""
        if not self.detect(log, ()):
            hint = "give JSON, CSV or Parquet"
            raise DataError(f"{log.name}: nothing can be selected from {log.kind} content", hint)
        with selectable(log) as table:
            yield Chunk(rejects=table.rejects, input_rows=table.input_rows)
            if table.scan:
                yield from self._rows(log, table)

    def _rows(self, log: Log, table: Selectable) -> Iterator[Chunk]:
        with open_duckdb() as con:
            fields = _create_source(con, log, table, shown=CONTENT if self.mapped else "")
            with _query_errors(log, fields):
                result = con.sql(check_select(self.query, con))
                kinds = zip(result.columns, result.types, strict=True)
                json_columns = {name for name, kind in kinds if str(kind) == "JSON"}
                # A mapped row keeps the hash, and so the id, that it has without --map.
                layout = Layout(ROW, json_columns, CONTENT if self.mapped else None)
                yield from table_chunks(result.to_arrow_reader(_BATCH), layout)


def map_query(expressions: Mapping[str, str]) -> str:
    """The SELECT that keeps every field and gives columns by expressions over the source row."""
    for column, text in expressions.items():
        if column not in LOOSE:
            raise ConfigError(f"--map: there is no column {column!r}", f"columns: {', '.join(LOOSE)}")
        check_expression(text, f"--map {column}", subqueries=True)
    mapped = [f"({text}\n) AS {identifier(MAPPED + column)}" for column, text in expressions.items()]
    return f"SELECT *, {', '.join(mapped)} FROM source"


def _create_source(con: duckdb.DuckDBPyConnection, log: Log, table: Selectable, *, shown: str) -> list[str]:
    """Create the view `source`, leave the connection nothing else to read, and return the fields.

    `shown` is a hidden field that stays visible.
    """
    try:
        names = con.sql(f"SELECT * FROM {table.scan} LIMIT 0").columns
        hidden = [name for name in names if name in (*table.hidden, ROW) and name != shown]
        without = ", ".join(map(identifier, hidden))
        row = f"CAST({table.row_sql} AS BIGINT) AS {ROW}"
        con.execute(f"CREATE VIEW source AS SELECT * EXCLUDE ({without}), {row} FROM {table.scan}")
    except duckdb.Error as error:
        hint = "check the file, or collect without --select and --map"
        raise DataError(f"{log.name}: {str(error).splitlines()[0]}", hint) from error
    lock(con, [table.path])
    return [name for name in names if name not in (*table.hidden, ROW)] + [ROW]


@contextmanager
def _query_errors(log: Log, fields: Sequence[str]) -> Iterator[None]:
    """Say of a failed query which fields there are; an error in the middle of a stream is an OSError."""
    try:
        yield
    except (duckdb.Error, OSError) as error:
        message = " ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())
        hint = f"source has the fields: {', '.join(fields)}"
        raise ConfigError(f"SQL over {log.name}: {message}", hint) from error
