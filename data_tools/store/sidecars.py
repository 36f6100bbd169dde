"""Files beside the rollouts that hold something about every row: token ids made from text, log-probs of any
policy.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from data_tools.errors import DataError
from data_tools.schema import LOGPROBS, TOKENS
from data_tools.store.batches import check_name
from data_tools.store.parquet_writer import ParquetFileWriter
from data_tools.store.storage import Storage
from data_tools.store.swaps import live_batches

if TYPE_CHECKING:
    import pyarrow.parquet as pq

SidecarKind = Literal["tokens", "logprobs"]

_SCHEMAS = {"tokens": TOKENS, "logprobs": LOGPROBS}


class Sidecar:
    """One folder of files aligned with the rollouts: row i of a file belongs to row i of the batch of that
    name.
    """

    def __init__(self, storage: Storage, kind: SidecarKind, key: str) -> None:
        self._storage = storage
        self.kind, self.key = kind, check_name(key)

    def path(self, batch: str) -> str:
        """Return the path or URL of the file of a batch, whether it exists or not."""
        return self._storage.url(self._name(batch))

    def exists(self, batch: str) -> bool:
        """Return whether the batch has its file."""
        return self._storage.exists(self._name(batch))

    def missing(self) -> list[str]:
        """Return the batches that have no file yet, in the order of their commits."""
        present = set(self._storage.stems(f"{self.kind}/{self.key}", ".parquet"))
        return [batch for batch in live_batches(self._storage) if batch not in present]

    def parquet(self, batch: str) -> "pq.ParquetFile":
        """Open the file of a batch."""
        return self._storage.parquet(self._name(batch))

    def writer(self, batch: str) -> "SidecarWriter":
        """Return a writer of the file of a batch."""
        self._storage.sweep(f"{self.kind}/{self.key}")
        return SidecarWriter(self._storage, batch, self._name(batch), _SCHEMAS[self.kind])

    def _name(self, batch: str) -> str:
        return f"{self.kind}/{self.key}/{batch}.parquet"


class SidecarWriter:
    """Writes the file of one batch in row order; a context manager that forgets it unless `commit` was
    called.
    """

    def __init__(self, storage: Storage, batch: str, name: str, schema: pa.Schema) -> None:
        self.batch = batch
        self._storage = storage
        self._ids = _response_ids(storage.parquet(f"rollouts/{batch}.parquet"))
        self._ahead = pa.array([], pa.string())
        self._file = ParquetFileWriter(storage, name, schema)

    def __enter__(self) -> "SidecarWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.discard()

    def write(self, table: "pa.Table | pa.RecordBatch") -> None:
        """Append rows, which must carry the response_id of the next rows of the batch."""
        start = self._file.rows
        self._file.write(table)
        expected = self._next(table.num_rows)
        given = table.column("response_id")
        if expected != (given.combine_chunks() if isinstance(given, pa.ChunkedArray) else given):
            raise DataError(
                f"{self._file.name}: rows {start} to {self._file.rows - 1} are not those of {self.batch}",
                "write one row for each row of the batch, in its order",
            )

    def commit(self) -> None:
        """Make the file visible; DataError unless every row of the batch was written."""
        if len(self._next(1)):
            raise DataError(
                f"{self._file.name}: only {self._file.rows} rows were written, batch {self.batch} has more",
                "write one row for each row of the batch, in its order",
            )
        self._file.finish()
        if not self._storage.exists(f"rollouts/{self.batch}.parquet"):
            raise DataError(
                f"batch {self.batch} was replaced while {self._file.name} was written",
                "run the command again: it goes on with what is missing",
            )
        self._file.publish()

    def _next(self, rows: int) -> pa.Array:
        """Take the next response ids of the batch, fewer at its end."""
        while len(self._ahead) < rows and (more := next(self._ids, None)) is not None:
            self._ahead = pa.concat_arrays([self._ahead, more])
        taken = self._ahead.slice(0, rows)
        self._ahead = self._ahead.slice(rows)
        return taken


def _response_ids(file: "pq.ParquetFile") -> Iterator[pa.Array]:
    with file:
        for batch in file.iter_batches(columns=["response_id"]):
            yield batch.column(0)
