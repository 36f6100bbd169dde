"""Files of scores: the pieces of a batch while it is being scored, then its row-aligned sidecar.

Pieces lie in a hidden folder of the sidecar. Each is written atomically and holds its rows' numbers, so a
later call goes on from whatever is there, even if it asks for other rows.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_tools.schema import LOGPROBS, ROW_GROUP_ROWS
from data_tools.store.parquet_writer import ParquetFileWriter
from offline_rec.data.blocks import Blocks, ListColumn, open_parquet
from offline_rec.data.ragged import IntArray, Ragged, concatenate

if TYPE_CHECKING:
    import pyarrow.parquet as pq

    from data_tools.dataset import Dataset

SCORES = ("logprobs", "logprob", "temperature")
PIECE = pa.schema([pa.field("row", pa.int64(), nullable=False), *(LOGPROBS.field(name) for name in SCORES)])


@dataclass(frozen=True)
class Piece:
    """Scores of rows of one batch, in ascending order of their numbers.

    `logprob` is the sum over the tokens that the policy produced; `temperature` the one the row was scored
    at.
    """

    row: IntArray
    logprobs: Ragged
    logprob: NDArray[np.float64]
    temperature: NDArray[np.float32]

    def table(self) -> pa.Table:
        """The piece as it is written."""
        columns = [pa.array(self.row), self.logprobs.to_arrow(), pa.array(self.logprob)]
        return pa.Table.from_arrays([*columns, pa.array(self.temperature)], schema=PIECE)

    @classmethod
    def read(cls, table: pa.Table) -> "Piece":
        """The piece that was written as this table."""
        row, logprobs, logprob, temperature = (column.combine_chunks() for column in table.columns)
        return cls(row.to_numpy(), Ragged.from_arrow(logprobs), logprob.to_numpy(), temperature.to_numpy())

    @classmethod
    def joined(cls, pieces: list["Piece"], first: int, last: int) -> "Piece":
        """The rows first..last-1 of all the pieces; a row that two of them hold counts once."""
        rows = np.concatenate([piece.row for piece in pieces])
        unique, index = np.unique(rows, return_index=True)
        index = index[(unique >= first) & (unique < last)]
        return cls(
            rows[index],
            concatenate([piece.logprobs for piece in pieces]).take(index),
            np.concatenate([piece.logprob for piece in pieces])[index],
            np.concatenate([piece.temperature for piece in pieces])[index],
        )


class ScoreFiles:
    """The scores that a dataset holds under one key."""

    def __init__(self, ds: "Dataset", key: str) -> None:
        self._ds = ds
        self._storage = ds.storage
        self._sidecar = ds.sidecar("logprobs", key)
        self._folder = f"logprobs/{key}/_pieces"

    def scored(self, batch: str) -> NDArray[np.bool_]:
        """Which rows of a batch have scores, in its file or in a piece."""
        with open_parquet(self._ds.rollout_path(batch)) as file:
            done = np.zeros(file.metadata.num_rows, np.bool_)
        if self._sidecar.exists(batch):
            with self._sidecar.parquet(batch) as file:
                done |= file.read(["logprob"]).column(0).is_valid().to_numpy()
        for name in self._pieces(batch):
            with self._open(name) as file:
                done[file.read(["row"]).column(0).to_numpy()] = True
        return done

    def write_piece(self, batch: str, piece: Piece) -> None:
        """Keep scores of some rows of a batch."""
        if not len(piece.row):
            return
        name = f"{self._folder}/{batch}.{piece.row[0]:012d}-{piece.row[-1]:012d}.parquet"
        writer = ParquetFileWriter(self._storage, name, PIECE)
        try:
            writer.write(piece.table())
            writer.finish()
            writer.publish()
        finally:
            writer.discard()

    def finish(self, batch: str) -> None:
        """Write the file of a batch from its former file and its pieces, then remove the pieces."""
        names = self._pieces(batch)
        if not names:
            return
        with self._sidecar.writer(batch) as writer:
            for table in self._merged(batch, names):
                writer.write(table)
            writer.commit()
        for name in names:
            self._storage.remove(f"{self._folder}/{name}")

    def sweep(self) -> None:
        """Remove pieces of batches that are no more, and the folder if it is empty."""
        batches = set(self._ds.batches())
        for name in self._storage.entries(self._folder):
            if name.partition(".")[0] not in batches:
                self._storage.remove(f"{self._folder}/{name}")
        if self._storage.is_local:
            with contextlib.suppress(OSError):
                os.rmdir(self._storage.url(self._folder))

    def _pieces(self, batch: str) -> list[str]:
        return [name for name in self._storage.entries(self._folder) if name.startswith(f"{batch}.")]

    def _open(self, name: str) -> "pq.ParquetFile":
        return self._storage.parquet(f"{self._folder}/{name}")

    def _merged(self, batch: str, names: list[str]) -> Iterator[pa.Table]:
        """The rows of the batch in order, a row group at a time: former scores, then those of pieces."""
        with open_parquet(self._ds.rollout_path(batch)) as rollouts:
            ids = rollouts.read(["response_id"]).column(0).combine_chunks()
        former = Blocks(self._sidecar.parquet, SCORES, cache_bytes=0) if self._sidecar.exists(batch) else None
        for first in range(0, len(ids), ROW_GROUP_ROWS):
            rows = np.arange(first, min(first + ROW_GROUP_ROWS, len(ids)))
            old = _nulls(len(rows)) if former is None else _former(former, batch, rows)
            self._put_pieces(old, [name for name in names if _overlaps(name, rows)], rows)
            logprobs = old["logprobs"].rows.to_arrow(old["logprobs"].valid)
            columns = [ids[first : first + len(rows)], logprobs, old["logprob"], old["temperature"]]
            yield pa.Table.from_arrays(columns, schema=LOGPROBS)

    def _put_pieces(self, old: dict[str, Any], names: list[str], rows: IntArray) -> None:
        """Replace values of some rows by those of the pieces that hold them."""
        if not names:
            return
        pieces = []
        for name in names:
            with self._open(name) as file:
                pieces.append(Piece.read(file.read()))
        new = Piece.joined(pieces, rows[0], rows[-1] + 1)
        where = np.isin(rows, new.row)
        lists = ListColumn(new.logprobs, np.ones(len(new.row), np.bool_)).spread(where)
        old["logprobs"] = old["logprobs"].replaced(lists, where)
        for name, values in (("logprob", new.logprob), ("temperature", new.temperature)):
            old[name] = pc.replace_with_mask(old[name], pa.array(where), pa.array(values))


def _former(blocks: Blocks, batch: str, rows: IntArray) -> dict[str, Any]:
    found = blocks.gather([batch], np.zeros_like(rows), rows)
    for name in ("logprob", "temperature"):
        found[name] = pa.array(found[name].tolist(), LOGPROBS.field(name).type)
    return found


def _nulls(count: int) -> dict[str, Any]:
    scalars = {name: pa.nulls(count, LOGPROBS.field(name).type) for name in ("logprob", "temperature")}
    return {"logprobs": ListColumn.nulls(count, np.float32)} | scalars


def _overlaps(name: str, rows: IntArray) -> bool:
    """Whether a piece of this name may hold some of the rows, which follow one another."""
    low, _, high = name.split(".")[1].partition("-")
    return int(low) <= int(rows[-1]) and int(high) >= int(rows[0])
