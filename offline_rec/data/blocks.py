"""Row groups of aligned Parquet files, decoded to numpy, the last few kept."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data_tools.errors import DataError
from data_tools.store.storage import open_storage
from offline_rec.data.ragged import IntArray, Ragged, concatenate, gather, offsets_of

OPEN_FILES = 64


@dataclass(frozen=True)
class ListColumn:
    """Rows of a list column, and which of them are not null."""

    rows: Ragged
    valid: NDArray[np.bool_]

    def take(self, index: IntArray) -> "ListColumn":
        """The rows named by `index`."""
        return ListColumn(self.rows.take(index), self.valid[index])

    def spread(self, where: NDArray[np.bool_]) -> "ListColumn":
        """One row for each entry of `where`: the next of these rows where it is true, else null."""
        lengths, valid = np.zeros(len(where), np.int64), np.zeros(len(where), np.bool_)
        lengths[where], valid[where] = self.rows.lengths, self.valid
        return ListColumn(Ragged(self.rows.values, offsets_of(lengths)), valid)

    def replaced(self, other: "ListColumn", where: NDArray[np.bool_]) -> "ListColumn":
        """These rows, but those of `other` where `where` is true."""
        if not where.any():
            return self
        if where.all():
            return other
        index = np.arange(len(where)) + len(where) * where
        return ListColumn(
            concatenate([self.rows, other.rows]).take(index), np.where(where, other.valid, self.valid)
        )

    @classmethod
    def nulls(cls, count: int, dtype: Any) -> "ListColumn":
        """`count` null rows."""
        return cls(Ragged(np.empty(0, dtype), np.zeros(count + 1, np.int64)), np.zeros(count, np.bool_))

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.rows.values.nbytes + self.rows.offsets.nbytes + self.valid.nbytes


Column: TypeAlias = Any
"""A `ListColumn` where the column holds lists, else an array of Python values, None where null."""

VALUE_BYTES = 80
"""What a Python value takes, about."""


def open_parquet(path: str) -> pq.ParquetFile:
    """Open a Parquet file by local path or fsspec URL."""
    folder, _, name = path.rpartition("/")
    return open_storage(folder or ".").parquet(name)


class Blocks:
    """Random access to the rows of many Parquet files of one schema, by (file, row).

    Reads whole row groups, only those asked for, and keeps the most recently used ones: within `cache_bytes`,
    and `most` of them, which grows where one is asked for again soon after it was dropped.
    """

    def __init__(
        self,
        open_file: Callable[[str], pq.ParquetFile],
        columns: Sequence[str],
        cache_bytes: int,
        most: int | None = None,
    ) -> None:
        self._open = open_file
        self._columns = list(columns)
        self._cache_bytes = cache_bytes
        self._most = most
        self._files: OrderedDict[str, tuple[pq.ParquetFile, IntArray]] = OrderedDict()
        self._blocks: OrderedDict[tuple[str, int], dict[str, Column]] = OrderedDict()
        self._dropped: deque[tuple[str, int]] = deque(maxlen=most)
        self._held = 0

    def rows_in(self, name: str) -> int:
        """Rows of one file."""
        return int(self._file(name)[1][-1])

    def gather(self, names: Sequence[str], codes: IntArray, rows: IntArray) -> dict[str, Column]:
        """The rows `rows[i]` of the files `names[codes[i]]`, column by column, in the order asked."""
        groups = np.empty(len(rows), np.int64)
        local = np.empty(len(rows), np.int64)
        for code in sorted(set(codes.tolist())):
            here = codes == code
            wanted, starts = rows[here], self._file(names[code])[1]
            if wanted.max() >= starts[-1]:
                raise DataError(
                    f"{names[code]} has {starts[-1]} rows, but row {wanted.max()} is asked for",
                    "the index belongs to another snapshot of the dataset",
                )
            groups[here] = group = np.searchsorted(starts, wanted, side="right") - 1
            local[here] = wanted - starts[group]
        number = (codes << 32) + groups
        order = np.argsort(number, kind="stable")
        cuts = np.flatnonzero(np.diff(number[order])) + 1
        pieces = [piece for piece in np.split(order, cuts) if len(piece)]
        # What is there first: reading the others may drop it.
        pieces.sort(key=lambda piece: (names[codes[piece[0]]], int(groups[piece[0]])) not in self._blocks)
        order = np.concatenate([order[:0], *pieces])
        keys = [(names[codes[piece[0]]], int(groups[piece[0]])) for piece in pieces]
        # Where none is read, none is dropped: rows are copied once, straight from the blocks.
        there = len(keys) == 1 or all(key in self._blocks for key in keys)
        parts = [
            self._part(key, local[piece], copied=not there) for key, piece in zip(keys, pieces, strict=True)
        ]
        if not there:
            # What was decoded from leaves holes in the heap, of more than a row group in all.
            pa.default_memory_pool().release_unused()
        back = None if np.all(order[:-1] < order[1:]) else np.argsort(order)
        return {
            column: _gathered([(block[column], at) for block, at in parts], back) for column in self._columns
        }

    def close(self) -> None:
        """Hold neither files nor row groups; what is asked for later is opened and read anew."""
        while self._files:
            self._files.popitem()[1][0].close()
        self._blocks.clear()
        self._held = 0
        pa.default_memory_pool().release_unused()

    def _part(
        self, key: tuple[str, int], index: IntArray, *, copied: bool
    ) -> tuple[dict[str, Column], IntArray]:
        """A block and rows of it; `copied`: of these rows alone, as it may be dropped before their use."""
        block = self._block(*key)
        if not copied:
            return block, index
        own = {column: _own(_gathered([(held, index)], None), held) for column, held in block.items()}
        return own, np.arange(len(index))

    def _block(self, name: str, group: int) -> dict[str, Column]:
        if (name, group) in self._blocks:
            self._blocks.move_to_end((name, group))
            return self._blocks[name, group]
        if self._most is not None and len(self._blocks) >= self._most:
            if (name, group) in self._dropped:
                self._most += 1
            else:
                self._drop_oldest()
        # One thread: more of them cost a fifth more in all, and a reader has a thread of its own.
        table = self._file(name)[0].read_row_group(group, columns=self._columns, use_threads=False)
        block = {column: _decode(_whole(table.column(column))) for column in self._columns}
        self._blocks[name, group] = block
        self._held += _nbytes(block)
        while self._held > self._cache_bytes and len(self._blocks) > 1:
            self._drop_oldest()
        return block

    def _drop_oldest(self) -> None:
        key, block = self._blocks.popitem(last=False)
        self._dropped.append(key)
        self._held -= _nbytes(block)

    def _file(self, name: str) -> tuple[pq.ParquetFile, IntArray]:
        if name in self._files:
            self._files.move_to_end(name)
            return self._files[name]
        file = self._open(name)
        meta = file.metadata
        sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        self._files[name] = file, np.cumsum([0, *sizes])
        if len(self._files) > OPEN_FILES:
            self._files.popitem(last=False)[1][0].close()
        return self._files[name]


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """One array of all chunks; `combine_chunks` would copy a single one, too."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _decode(column: pa.Array) -> Column:
    if not pa.types.is_list(column.type):
        # Arrow would copy a few rows of a few columns one by one: that took a fifth of the time of a step.
        if pa.types.is_string(column.type):
            return column.to_numpy(zero_copy_only=False)
        return np.array(column.to_pylist(), object)  # `to_numpy` would make floats of integers with nulls
    return ListColumn(Ragged.from_arrow(column), column.is_valid().to_numpy(zero_copy_only=False))


def _own(taken: Column, held: Column) -> Column:
    """Rows taken of a column, in memory of their own."""
    if not isinstance(taken, ListColumn) or not np.may_share_memory(taken.rows.values, held.rows.values):
        return taken
    return ListColumn(Ragged(taken.rows.values.copy(), taken.rows.offsets), taken.valid)


def _gathered(parts: list[tuple[Column, IntArray]], back: IntArray | None) -> Column:
    """Rows of parts, one part after another, then in the order `back`."""
    if isinstance(parts[0][0], ListColumn):
        valid = np.concatenate([held.valid[index] for held, index in parts])
        rows = gather([(held.rows, index) for held, index in parts], back)
        return ListColumn(rows, valid if back is None else valid[back])
    values = np.concatenate([held[index] for held, index in parts])
    return values if back is None else values[back]


def _nbytes(block: dict[str, Column]) -> int:
    return sum(
        column.nbytes if isinstance(column, ListColumn) else len(column) * VALUE_BYTES
        for column in block.values()
    )
