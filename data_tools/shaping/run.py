"""Runs a shaping on a dataset and hands out its rows, checked."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np

from data_tools.shaping.blame import sql_errors_named
from data_tools.shaping.checks import LARGEST, VALID, check_trajectories, invalid_rows, nothing_left
from data_tools.shaping.fields import Shaping, Split
from data_tools.shaping.macros import prepare
from data_tools.shaping.statement import compile
from data_tools.store.sql_errors import sql_errors

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa


class Connectable(Protocol):
    """What answers SQL: a dataset."""

    def connect(self) -> "duckdb.DuckDBPyConnection":
        """Return a fresh connection with the view `rollouts`."""


@contextmanager
def connected(source: "Connectable | duckdb.DuckDBPyConnection") -> Iterator["duckdb.DuckDBPyConnection"]:
    """Yield a connection that knows the macros: the given one, or a fresh one of a dataset."""
    import duckdb

    opened: AbstractContextManager[duckdb.DuckDBPyConnection] = (
        nullcontext(source) if isinstance(source, duckdb.DuckDBPyConnection) else source.connect()
    )
    with opened as con, sql_errors("shaping"):
        prepare(con)
        yield con


def shape(
    source: "Connectable | duckdb.DuckDBPyConnection",
    shaping: Shaping,
    *,
    split: Split = "train",
    rows_per_batch: int = 65_536,
) -> "pa.RecordBatchReader":
    """Return the shaped rows, a stream with the columns of COLUMNS sorted by group and response id.

    Raises ConfigError for a wrong expression, DataError where no row is left; the stream raises DataError at
    the first batch with an advantage, weight or priority that is no usable number, and names such rows.
    """
    import pyarrow as pa

    with ExitStack() as stack:
        con = stack.enter_context(connected(source))
        stack.enter_context(sql_errors_named(con, shaping, split))
        check_trajectories(con, shaping, split)
        reader = con.sql(compile(shaping, split=split)).to_arrow_reader(rows_per_batch)
        # Closed before any error is looked into: a connection holds one open result at a time.
        stack.callback(reader.close)
        first = next(iter(reader), None)
        if first is None or not first.num_rows:
            reader.close()
            raise nothing_left(con, shaping, split)
        # The connection outlives this call: the stream below closes it.
        held = stack.pop_all()

    def batches() -> Iterator["pa.RecordBatch"]:
        with held:
            for batch in chain([first], reader):
                if not all(_usable(batch, column) for column in VALID):
                    reader.close()
                    raise invalid_rows(con, shaping, split)
                yield batch

    return pa.RecordBatchReader.from_batches(first.schema, batches())


def _usable(batch: "pa.RecordBatch", column: str) -> bool:
    values = batch.column(column).to_numpy(zero_copy_only=False)  # null becomes nan
    return bool((np.abs(values) <= LARGEST).all() and (column == "advantage" or (values >= 0).all()))


def validate(
    source: "Connectable | duckdb.DuckDBPyConnection", shaping: Shaping, *, split: Split = "train"
) -> None:
    """Run the shaping once and raise what `shape` would raise, without taking its rows."""
    for _ in shape(source, shaping, split=split):
        pass
