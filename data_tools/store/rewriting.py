"""What deleting and compacting share: one at a time, recovery after a killed one, and copying files row by
row.
"""

import contextlib
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from data_tools.errors import DataError
from data_tools.schema import ERASED, LOGPROBS, REJECTS, REWARDS, ROLLOUTS, ROW_GROUP_ROWS, TOKENS
from data_tools.store.connection import open_duckdb
from data_tools.store.erased import HASH_SQL, erased_files
from data_tools.store.parquet_writer import ParquetFileWriter
from data_tools.store.storage import Storage
from data_tools.store.swaps import clear, recover
from data_tools.store.views import scan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SCHEMAS = {
    "rollouts": ROLLOUTS,
    "rejects": REJECTS,
    "tokens": TOKENS,
    "logprobs": LOGPROBS,
    "rewards": REWARDS,
}
_REVISION = re.compile("-r[0-9a-f]{8}$")


def schema_of(folder: str) -> pa.Schema:
    """Return the schema of a file or folder such as `rollouts` or `tokens/3f2a/<batch>.parquet`."""
    return _SCHEMAS[folder.split("/", 1)[0]]


@contextlib.contextmanager
def rewriting(storage: Storage) -> Iterator[None]:
    """Hold the dataset's lock, finish what a killed process began, and clear up after the body's own swap."""
    with storage.locked():
        finish(storage)
        yield
        finish(storage)


def finish(storage: Storage) -> None:
    """Complete every committed swap and undo the others; nothing happens where all is tidy."""
    for folder in ("rollouts", "rejects", "rewards", "erased"):
        storage.sweep(folder)
    storage.sweep("swaps", older_than=0)  # only the holder of the lock writes there
    if any(swap.erases for swap in recover(storage)):
        _purge_rewards(storage)
    clear(storage)


def successor(batch: str) -> str:
    """Return the name of the rewritten form of a batch, which sorts where the batch did."""
    return f"{_REVISION.sub('', batch)}-r{uuid.uuid4().hex[:8]}"


def copy_rows(
    storage: Storage, sources: Sequence[str], target: str, *, keep: "NDArray[np.bool_] | None" = None
) -> None:
    """Write the file `target` with the rows of `sources`; with `keep`, only those where it is true.

    Raises DataError if `keep` is not as long as the sources.
    """
    with contextlib.ExitStack() as stack:
        writer = ParquetFileWriter(storage, target, schema_of(target))
        stack.callback(writer.discard)
        files = [stack.enter_context(storage.parquet(source)) for source in sources]
        rows = sum(file.metadata.num_rows for file in files)
        if keep is not None and rows != len(keep):
            raise DataError(
                f"{storage.url(sources[0])} has {rows} rows, its batch has {len(keep)}",
                "the file is not aligned with its batch: remove it, it can be made again",
            )
        start = 0
        for batch in (batch for file in files for batch in file.iter_batches(ROW_GROUP_ROWS)):
            stop = start + batch.num_rows
            writer.write(batch if keep is None else batch.filter(pa.array(keep[start:stop])))
            start = stop
        writer.finish()
        writer.publish()


def _purge_rewards(storage: Storage) -> None:
    """Remove the later rewards of deleted rows, each file by one atomic replacement."""
    import numpy as np

    erased = scan(erased_files(storage), ERASED)
    for name in (f"rewards/{stem}.parquet" for stem in storage.stems("rewards", ".parquet")):
        query = f"""SELECT {HASH_SQL} NOT IN (SELECT id_hash FROM {erased}) AS keep
            FROM {scan([storage.url(name)], REWARDS)} ORDER BY file_row_number"""
        with open_duckdb(storage) as con:
            keep = np.concatenate([np.zeros(0, bool), con.sql(query).fetchnumpy()["keep"]]).astype(bool)
        if not keep.all():
            copy_rows(storage, [name], name, keep=keep)
