"""Rows of different lengths as one flat array and its offsets: no Python object a token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

LONG = 96
"""Values of a row from which on it is faster copied as a whole than value by value."""


@dataclass(frozen=True)
class Ragged:
    """Row i is `values[offsets[i]:offsets[i + 1]]`; `offsets` has one entry more than rows."""

    values: NDArray[Any]
    offsets: IntArray

    @classmethod
    def from_lists(cls, rows: Iterable[Sequence[Any]], dtype: Any) -> "Ragged":
        """Rows given one by one."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return cls(values, offsets_of([len(row) for row in arrays]))

    @classmethod
    def full(cls, lengths: IntArray, value: float, dtype: Any) -> "Ragged":
        """Rows of the given lengths that hold one value everywhere."""
        offsets = offsets_of(lengths)
        return cls(np.full(offsets[-1], value, dtype), offsets)

    @classmethod
    def from_arrow(cls, column: pa.ListArray) -> "Ragged":
        """The rows of an Arrow list array; a null row is empty, a null float is NaN."""
        if not column.null_count:
            offsets = column.offsets.to_numpy().astype(np.int64)
            values = column.values.slice(offsets[0], offsets[-1] - offsets[0])
            return cls(values.to_numpy(zero_copy_only=False), offsets - offsets[0])
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        # A null row may hide values, which flatten() leaves out: the offsets are made anew.
        return cls(column.flatten().to_numpy(zero_copy_only=False), offsets_of(lengths))

    def to_arrow(self, valid: NDArray[np.bool_] | None = None) -> pa.ListArray:
        """An Arrow list array over the same memory; rows that are not `valid` are null."""
        offsets = self.offsets.astype(np.int32)
        mask = None if valid is None else pa.array(~valid)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(self.values), mask=mask)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> IntArray:
        """Values of each row."""
        return np.diff(self.offsets)

    def take(self, index: NDArray[np.integer[Any]]) -> "Ragged":
        """The rows named by `index`, in that order; a run of neighbours is a view, not a copy."""
        if _is_run(index):
            first, last = self.offsets[index[0]], self.offsets[index[-1] + 1]
            return Ragged(self.values[first:last], self.offsets[index[0] : index[-1] + 2] - first)
        starts, ends = self.offsets[index], self.offsets[index + 1]
        lengths = ends - starts
        offsets = offsets_of(lengths)
        if _are_long(offsets, LONG):
            held, size = self._bytes(), self.values.itemsize
            bounds = zip((starts * size).tolist(), (ends * size).tolist(), strict=True)
            return Ragged(_joined([held[start:end] for start, end in bounds], self.values.dtype), offsets)
        source = np.repeat(starts - offsets[:-1], lengths)
        source += np.arange(offsets[-1])
        return Ragged(self.values[source], offsets)

    def pad(self, width: int, fill: float = 0) -> NDArray[Any]:
        """A [rows, width] array, filled on the right; `width` is at least the longest row."""
        padded = np.full((len(self), width), fill, self.values.dtype)
        if _are_long(self.offsets, 2 * LONG):  # a row set in place costs more than one cut out
            starts, ends = self.offsets[:-1].tolist(), self.offsets[1:].tolist()
            for row, start, end in zip(padded, starts, ends, strict=True):
                row[: end - start] = self.values[start:end]
            return padded
        padded[np.arange(width) < self.lengths[:, None]] = self.values
        return padded

    def _bytes(self) -> memoryview:
        """The values as bytes: a piece of them costs half of what a view of an array does."""
        return self.values.data.cast("B") if self.values.size else memoryview(b"")


def _joined(rows: list[memoryview], dtype: Any) -> NDArray[Any]:
    return np.frombuffer(bytearray().join(rows), dtype)


def _is_run(index: NDArray[np.integer[Any]]) -> bool:
    """Whether the index names neighbours, in order."""
    if not len(index) or index[-1] - index[0] != len(index) - 1:
        return False
    return bool((index[1:] - index[:-1] == 1).all())


def _are_long(offsets: IntArray, least: int) -> bool:
    return len(offsets) > 1 and bool(offsets[-1] >= least * (len(offsets) - 1))


def offsets_of(lengths: Any) -> IntArray:
    """The offsets of rows that have these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def concatenate(parts: Sequence[Ragged]) -> Ragged:
    """All rows of the parts, one after another; at least one part."""
    if len(parts) == 1:
        return parts[0]
    values = np.concatenate([part.values for part in parts])
    return Ragged(values, offsets_of(np.concatenate([part.lengths for part in parts])))


def gather(parts: Sequence[tuple[Ragged, IntArray]], order: IntArray | None) -> Ragged:
    """Rows of several arrays, `(array, its rows)` one after another, then those that `order` names of these.

    Copies each row once.
    """
    if len(parts) == 1:
        array, index = parts[0]
        return array.take(index if order is None else index[order])
    dtype = parts[0][0].values.dtype
    if not any(array.values.size for array, _ in parts):
        count = sum(len(index) for _, index in parts)
        return Ragged(np.empty(0, dtype), np.zeros(count + 1, np.int64))
    which = np.repeat(np.arange(len(parts)), [len(index) for _, index in parts])
    starts = np.concatenate([array.offsets[index] for array, index in parts])
    ends = np.concatenate([array.offsets[index + 1] for array, index in parts])
    if order is not None:
        which, starts, ends = which[order], starts[order], ends[order]
    held = [array._bytes() for array, _ in parts]
    bounds = ((starts * dtype.itemsize).tolist(), (ends * dtype.itemsize).tolist())
    rows = [held[part][start:end] for part, start, end in zip(which.tolist(), *bounds, strict=True)]
    return Ragged(_joined(rows, dtype), offsets_of(ends - starts))
