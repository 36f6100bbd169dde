"""The ids of deleted rows, kept as hashes only, so that collecting the same log again does not bring the rows
back.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from data_tools.schema import ERASED
from data_tools.store.connection import open_duckdb
from data_tools.store.storage import Storage
from data_tools.store.views import scan

if TYPE_CHECKING:
    import pyarrow as pa

HASH_SQL = "md5(response_id)"
"""How an id is hashed."""


def erased_files(storage: Storage) -> list[str]:
    """Return the paths or URLs of the files that hold the hashes."""
    return [storage.url(f"erased/{name}.parquet") for name in storage.stems("erased", ".parquet")]


class ErasedIds:
    """The set of response ids that were deleted from a dataset; asks about many ids at a time."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._files = erased_files(storage)

    def __bool__(self) -> bool:
        return bool(self._files)

    def __contains__(self, response_id: str) -> bool:
        return bool(self.among([response_id])[0].as_py())

    def among(self, response_ids: "Sequence[str] | pa.Array | pa.ChunkedArray") -> "pa.ChunkedArray":
        """Return a boolean array as long as `response_ids`: true where the id was deleted."""
        import pyarrow as pa

        ids = pa.chunked_array([response_ids]) if isinstance(response_ids, pa.Array) else response_ids
        if not isinstance(ids, pa.ChunkedArray):
            ids = pa.chunked_array([pa.array(ids, pa.string())])
        if not self._files:
            return pa.chunked_array([pa.repeat(False, len(ids))])
        asked = pa.table({"place": pa.array(range(len(ids)), pa.int64()), "response_id": ids})
        with open_duckdb(self._storage) as con:
            con.register("asked", asked)
            query = f"""SELECT {HASH_SQL} IN (SELECT id_hash FROM {scan(self._files, ERASED)}) AS erased
                FROM asked ORDER BY place"""
            return con.sql(query).to_arrow_table().column("erased")
