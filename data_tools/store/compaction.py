"""Rewrites a dataset as fewer, larger files in which the rows of a group stand side by side."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from data_tools.errors import DataError
from data_tools.schema import ROW_GROUP_ROWS
from data_tools.store.batches import fresh_name
from data_tools.store.connection import open_duckdb
from data_tools.store.parquet_writer import ParquetFileWriter
from data_tools.store.rewriting import copy_rows, rewriting, schema_of
from data_tools.store.sql_errors import sql_errors
from data_tools.store.storage import Storage
from data_tools.store.swaps import Swap, live_batches, sidecar_folders, swapping
from data_tools.store.views import identifier, scan

if TYPE_CHECKING:
    import duckdb

    from data_tools.store.dataset import StoredDataset

TARGET_BYTES = 1 << 30
"""Size that a compacted rollouts file aims at."""


@dataclass(frozen=True, slots=True)
class CompactReport:
    """Files of rollouts before and after, and the rows of those that were rewritten."""

    files_before: int
    files_after: int
    rows_rewritten: int


def compact(dataset: "StoredDataset", *, target_bytes: int = TARGET_BYTES) -> CompactReport:
    """Rewrite the batches as files of about `target_bytes`, with groups side by side; no row changes.

    Batches are merged with those that have the same sidecars, so that no sidecar is lost.
    """
    storage = dataset.storage
    with rewriting(storage):
        before = live_batches(storage)
        rows = sum(_merge(storage, batches, target_bytes) for batches in _mergeable(storage, before))
        after = live_batches(storage)
    return CompactReport(files_before=len(before), files_after=len(after), rows_rewritten=rows)


def _mergeable(storage: Storage, batches: list[str]) -> list[list[str]]:
    """Return the batches in lots that have the same sidecars."""
    folders = {folder: set(storage.stems(folder, ".parquet")) for folder in sidecar_folders(storage)}
    lots: dict[frozenset[str], list[str]] = defaultdict(list)
    for batch in batches:
        lots[frozenset(folder for folder, present in folders.items() if batch in present)].append(batch)
    return list(lots.values())


def _merge(storage: Storage, batches: list[str], target_bytes: int) -> int:
    """Rewrite one lot, unless it is compact already; return the rows written."""
    size = sum(storage.size(f"rollouts/{batch}.parquet") for batch in batches)
    with open_duckdb(storage) as con:
        with sql_errors(storage.root):
            parts = _order(con, storage, batches, max(1, -(-size // target_bytes)))
        if len(batches) <= len(parts) and _in_place(con):
            return 0
        base = fresh_name(batches)
        names = {part: f"{base}-{place:04d}" for place, part in enumerate(parts)}
        folders = [
            name for name in sidecar_folders(storage) if storage.exists(f"{name}/{batches[0]}.parquet")
        ]
        with swapping(storage, Swap(adds=list(names.values()), removes=batches)):
            _merge_rejects(storage, batches, names[min(names)])
            for folder in (*folders, "rollouts"):
                source = _moved(con, storage, folder, batches)
                _write_parts(storage, folder, source, {names[part]: rows for part, rows in parts.items()})
    return sum(parts.values())


def _order(
    con: "duckdb.DuckDBPyConnection", storage: Storage, batches: list[str], files: int
) -> dict[int, int]:
    """Fill the table _order with the new place of every row; return the number of rows of each part.

    Groups come in the order of their first row, and a part ends only where a group does.
    """
    con.execute(
        "CREATE OR REPLACE TABLE _batches AS SELECT unnest($names) AS batch, unnest(range($n)) AS number",
        {"names": batches, "n": len(batches)},
    )
    source = _source(storage, "rollouts", batches)
    con.execute(f"""CREATE OR REPLACE TABLE _order AS
        WITH listed AS (
            SELECT batch, file_row_number AS row, group_id, (number << 40) + row AS old_place
            FROM {source} JOIN _batches ON parse_filename(filename, true) = batch),
        grouped AS (SELECT *, min(old_place) OVER (PARTITION BY group_id) AS group_place FROM listed),
        placed AS (SELECT *, row_number() OVER (ORDER BY group_place, old_place) - 1 AS place FROM grouped)
        SELECT batch, row, place, old_place,
            (min(place) OVER (PARTITION BY group_place)) * {files} // (SELECT count(*) FROM listed) AS part
        FROM placed""")
    return dict(con.sql("SELECT part, count(*) FROM _order GROUP BY part ORDER BY part").fetchall()) or {0: 0}


def _in_place(con: "duckdb.DuckDBPyConnection") -> bool:
    """Return whether every row stands where it belongs already."""
    query = """SELECT count(*) FROM (
            SELECT old_place, lag(old_place) OVER (ORDER BY place) AS before FROM _order)
        WHERE before > old_place"""
    [(moved,)] = con.sql(query).fetchall()
    return bool(moved == 0)


def _source(storage: Storage, folder: str, batches: list[str]) -> str:
    files = [storage.url(f"{folder}/{batch}.parquet") for batch in batches]
    return scan(files, schema_of(folder), of_any_age=True)


def _moved(
    con: "duckdb.DuckDBPyConnection", storage: Storage, folder: str, batches: list[str]
) -> Iterator["pa.Table"]:
    """Yield the rows of a folder in their new order, with their part; DuckDB sorts on disk what memory cannot
    hold.
    """
    columns = ", ".join("s." + identifier(name) for name in schema_of(folder).names)
    query = f"""SELECT {columns}, o.part FROM {_source(storage, folder, batches)} s
        JOIN _order o ON o.batch = parse_filename(s.filename, true) AND o.row = s.file_row_number
        ORDER BY o.place"""
    with sql_errors(storage.root):
        for batch in con.sql(query).to_arrow_reader(ROW_GROUP_ROWS):
            yield pa.Table.from_batches([batch])


def _write_parts(
    storage: Storage, folder: str, source: Iterator["pa.Table"], expected: dict[str, int]
) -> None:
    """Write one file for each part: `expected` holds names and numbers of rows in the order of the parts."""
    rest = next(source, None)
    for name, rows in expected.items():
        writer = ParquetFileWriter(storage, f"{folder}/{name}.parquet", schema_of(folder))
        try:
            while rest is not None and writer.rows < rows:
                taken = rest.slice(0, rows - writer.rows)
                writer.write(taken.drop_columns(["part"]))
                rest = rest.slice(taken.num_rows) if taken.num_rows < rest.num_rows else next(source, None)
            if writer.rows < rows:
                raise DataError(
                    f"{storage.url(folder)}: {rows - writer.rows} rows of the rollouts are missing in it",
                    "the folder is not aligned with the rollouts: remove it, it can be made again",
                )
            writer.finish()
            writer.publish()
        finally:
            writer.discard()


def _merge_rejects(storage: Storage, batches: list[str], name: str) -> None:
    """Write the rejects of all batches as those of `name`."""
    present = set(storage.stems("rejects", ".parquet"))
    sources = [f"rejects/{batch}.parquet" for batch in batches if batch in present]
    if sources:
        copy_rows(storage, sources, f"rejects/{name}.parquet")
