"""Erases rows of a dataset for good: out of every file, behind which only hashes of their ids stay."""

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_tools.errors import ConfigError
from data_tools.schema import ERASED, ROW_GROUP_ROWS
from data_tools.store.batches import fresh_name
from data_tools.store.erased import HASH_SQL
from data_tools.store.guard import check_expression
from data_tools.store.parquet_writer import ParquetFileWriter
from data_tools.store.rewriting import copy_rows, rewriting, successor
from data_tools.store.sql_errors import sql_errors
from data_tools.store.storage import Storage
from data_tools.store.swaps import Swap, sidecar_folders, swapping

if TYPE_CHECKING:
    import duckdb

    from data_tools.store.dataset import StoredDataset


@dataclass(frozen=True, slots=True)
class DeleteReport:
    """What a delete did, or would do: rows erased, and the batches that held them."""

    rows: int
    batches: int


def delete(dataset: "StoredDataset", where: str, *, dry_run: bool = False) -> DeleteReport:
    """Erase the rows of `rollouts` where the SQL condition holds, from every file of the dataset.

    Only hashes of their ids stay, so that collecting the log again does not bring them back.
    """
    check_expression(where, "--where", subqueries=True)
    storage = dataset.storage
    with contextlib.nullcontext() if dry_run else rewriting(storage), dataset.connect() as con:
        affected = _mark(con, where)
        if affected and not dry_run:
            _erase(storage, con, sorted(affected))
    return DeleteReport(rows=sum(affected.values()), batches=len(affected))


def _mark(con: "duckdb.DuckDBPyConnection", where: str) -> dict[str, int]:
    """Note the rows to erase in a temporary table; return how many of each batch."""
    with sql_errors("--where"):
        [(_, kind, *_)] = con.sql(f"DESCRIBE SELECT ({where}\n) FROM rollouts").fetchall()
        if kind != "BOOLEAN":  # DuckDB would take any number but 0 for true
            raise ConfigError(f"--where: {where!r} is {kind}, no condition", "compare it, as in reward < 0")
        con.execute(
            f"""CREATE TABLE _marked AS SELECT file, file_row, {HASH_SQL} AS id_hash
                FROM rollouts WHERE ({where}\n)"""
        )
    return dict(con.sql("SELECT file, count(*) FROM _marked GROUP BY file").fetchall())


def _erase(storage: Storage, con: "duckdb.DuckDBPyConnection", batches: list[str]) -> None:
    renamed = {batch: successor(batch) for batch in batches}
    with swapping(storage, Swap(adds=list(renamed.values()), removes=batches, erases=True)):
        for batch, new in renamed.items():
            _without_marked(storage, con, batch, new)
        writer = ParquetFileWriter(
            storage, f"erased/{fresh_name(storage.stems('erased', '.parquet'))}.parquet", ERASED
        )
        try:
            for part in con.sql("SELECT DISTINCT id_hash FROM _marked").to_arrow_reader(ROW_GROUP_ROWS):
                writer.write(part)
            writer.finish()
            writer.publish()
        finally:
            writer.discard()


def _without_marked(storage: Storage, con: "duckdb.DuckDBPyConnection", batch: str, new: str) -> None:
    import numpy as np

    with storage.parquet(f"rollouts/{batch}.parquet") as file:
        keep = np.ones(file.metadata.num_rows, dtype=bool)
    marked = con.sql("SELECT file_row FROM _marked WHERE file = $batch", params={"batch": batch})
    keep[marked.fetchnumpy()["file_row"]] = False
    for folder in (*sidecar_folders(storage), "rollouts"):
        if storage.exists(f"{folder}/{batch}.parquet"):
            copy_rows(storage, [f"{folder}/{batch}.parquet"], f"{folder}/{new}.parquet", keep=keep)
    if storage.exists(f"rejects/{batch}.parquet"):
        copy_rows(storage, [f"rejects/{batch}.parquet"], f"rejects/{new}.parquet")
