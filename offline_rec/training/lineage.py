"""`lineage/`: which response took part in which step, with what weight, and what became of it."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("response_id", pa.string(), nullable=False),
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("mean_ratio", pa.float32()),
        pa.field("kept_share", pa.float32()),
    ]
)
"""`mean_ratio`: mean over the response's tokens of pi / anchor, null without an anchor. `kept_share`: share
of its tokens that the objective's keep-rule let through."""

FLUSH_ROWS = 100_000
"""Rows held before a part is written between checkpoints: about 10 MB."""


class LineageWriter:
    """Collects rows and writes them as `<step>-<rank>.parquet`, named after the last step of the part.

    A part never spans a checkpoint, so that a resume can drop what came after it file by file.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self._tables: list[pa.Table] = []
        self._rows = 0
        self._step = 0

    def add(
        self,
        step: int,
        response_id: list[str],
        *,
        weight: NDArray[np.float64],
        mean_ratio: NDArray[np.float32],
        kept_share: NDArray[np.float32],
    ) -> None:
        """Note the rows of one step; NaN becomes null."""
        columns = [
            pa.array(np.full(len(response_id), step, np.int64)),
            pa.array(response_id, pa.string()),
            pa.array(weight, pa.float64()),
            pa.array(mean_ratio, pa.float32(), from_pandas=True),
            pa.array(kept_share, pa.float32(), from_pandas=True),
        ]
        self._tables.append(pa.Table.from_arrays(columns, schema=SCHEMA))
        self._rows += len(response_id)
        self._step = step
        if self._rows >= FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what was collected, whole or not at all."""
        if not self._rows:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"{self._step}-{self.rank}.parquet"
        staged = self.folder / f".{final.name}.tmp"
        pq.write_table(pa.concat_tables(self._tables), staged, compression="zstd")
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(staged, final)
        self._tables, self._rows = [], 0


def drop_after(folder: Path, step: int) -> None:
    """Remove the parts of later steps, of every rank, and what killed writers left."""
    for path in folder.glob("*.parquet"):
        if int(path.name.split("-")[0]) > step:
            path.unlink()
    for path in folder.glob(".*.tmp"):
        path.unlink()
