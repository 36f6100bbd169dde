"""A directory that answers SQL: a dataset, or the run directory of a fit."""

import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import duckdb
import pyarrow as pa

from data_tools.store.guard import check_select
from data_tools.store.sql_errors import sql_errors
from data_tools.store.storage import Storage

Parameters = Sequence[Any] | dict[str, Any]


class Queryable:
    """Runs one SELECT at a time over the views that `connect` sets up."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @property
    def path(self) -> str:
        """The absolute path or URL."""
        return self.storage.root

    def connect(self, now: datetime | None = None) -> duckdb.DuckDBPyConnection:
        """Return a fresh connection with all views, that can read this directory's data and nothing else."""
        raise NotImplementedError

    def sql(self, query: str, params: Parameters | None = None) -> pa.Table:
        """Run one SELECT and return its result; ConfigError for anything else or an unknown column."""
        with self.connect() as con, sql_errors():
            return con.sql(check_select(query, con), params=params).to_arrow_table()

    def reader(
        self, query: str, rows_per_batch: int = 65_536, *, params: Parameters | None = None
    ) -> pa.RecordBatchReader:
        """Run one SELECT and stream its result: at most `rows_per_batch` rows are in memory at a time."""
        with contextlib.ExitStack() as stack:
            con = stack.enter_context(self.connect())
            with sql_errors():
                result = con.sql(check_select(query, con), params=params).to_arrow_reader(rows_per_batch)
            closing = stack.pop_all()

        def batches() -> Iterator[pa.RecordBatch]:
            with closing, sql_errors():
                yield from result

        return pa.RecordBatchReader.from_batches(result.schema, batches())
