"""The rows that a check looks at: all of them as scalars, a seeded sample of them token by token."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_tools.store.guard import check_expression
from data_tools.store.sql_errors import sql_errors

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from data_tools.store.dataset import StoredDataset

CHUNK_ROWS = 64
"""Sampled rows whose tokens are in memory at a time."""


@dataclass(frozen=True)
class Sample:
    """Places of sampled rows in the order of the files, `total` the number of rows they were drawn from."""

    dataset: "StoredDataset"
    files: list[str]
    rows: list[int]
    total: int

    def __len__(self) -> int:
        return len(self.rows)

    def chunks(self, columns: Sequence[str], size: int = CHUNK_ROWS) -> Iterator["pa.Table"]:
        """The columns of all sampled rows in order, up to `size` rows at a time; other rows are let go."""
        for first in range(0, len(self), size):
            yield self._read(first, min(first + size, len(self)), columns)

    def _read(self, first: int, last: int, columns: Sequence[str]) -> "pa.Table":
        import pyarrow as pa

        parts: list[pa.Table] = []
        while first < last:
            name = self.files[first]
            end = next((i for i in range(first, last) if self.files[i] != name), last)
            parts += self._of_file(name, self.rows[first:end], columns)
            first = end
        return pa.concat_tables(parts)

    def _of_file(self, name: str, rows: list[int], columns: Sequence[str]) -> Iterator["pa.Table"]:
        with self.dataset.parquet(name) as file:
            start = 0
            for group in range(file.metadata.num_row_groups):
                end = start + file.metadata.row_group(group).num_rows
                inside = [row - start for row in rows if start <= row < end]
                if inside:
                    yield file.read_row_group(group, columns=list(columns)).take(inside)
                start = end


@contextlib.contextmanager
def checked_rows(dataset: "StoredDataset", where: str | None) -> Iterator["duckdb.DuckDBPyConnection"]:
    """A connection whose view `checked` has the rows of `rollouts` where the condition holds.

    ConfigError if it is no condition.
    """
    if where is not None:
        check_expression(where, "--where", subqueries=True)
    with dataset.connect() as con, sql_errors("--where"):
        con.execute(f"CREATE TEMP VIEW checked AS SELECT * FROM rollouts WHERE ({where or 'true'}\n)")
        yield con


def draw(dataset: "StoredDataset", count: int, *, seed: int = 0, where: str | None = None) -> Sample:
    """A sample of up to `count` rows that depends on the rows and the seed, not on how they are stored."""
    with checked_rows(dataset, where) as con:
        [(total,)] = con.sql("SELECT count(*) FROM checked").fetchall()
        places = con.sql(
            f"""SELECT file, file_row FROM (SELECT file, file_row FROM checked
                ORDER BY md5(response_id || '{int(seed)}') LIMIT {int(count)})
            ORDER BY file, file_row"""
        ).fetchall()
    return Sample(dataset, [file for file, _ in places], [row for _, row in places], total)
