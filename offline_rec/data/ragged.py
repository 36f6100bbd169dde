"""Rows of different lengths as one flat array and its offsets: no Python object a token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

LONG = 192
"""Values of a row from which on it is faster copied as a whole than value by value."""

FEW = 64
"""Rows of an array up to which that is so for shorter ones, too: what a call costs is then most."""


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
        if len(index) and np.all(np.diff(index) == 1):
            first, last = self.offsets[index[0]], self.offsets[index[-1] + 1]
            return Ragged(self.values[first:last], self.offsets[index[0] : index[-1] + 2] - first)
        starts, ends = self.offsets[index], self.offsets[index + 1]
        lengths = ends - starts
        offsets = offsets_of(lengths)
        if _are_long(offsets):
            return Ragged(_joined(self._cut(starts, ends), self.values.dtype), offsets)
        source = np.repeat(starts - offsets[:-1], lengths)
        source += np.arange(offsets[-1])
        return Ragged(self.values[source], offsets)

    def pad(self, width: int, fill: float = 0) -> NDArray[Any]:
        """A [rows, width] array, filled on the right; `width` is at least the longest row."""
        padded = np.full((len(self), width), fill, self.values.dtype)
        if _are_long(self.offsets):
            starts, ends = self.offsets[:-1].tolist(), self.offsets[1:].tolist()
            for row, start, end in zip(padded, starts, ends, strict=True):
                row[: end - start] = self.values[start:end]
            return padded
        padded[np.arange(width) < self.lengths[:, None]] = self.values
        return padded

    def _cut(self, starts: IntArray, ends: IntArray) -> list[memoryview | bytes]:
        """The values from each start to its end, as bytes: half the cost of as many views of an array."""
        if not self.values.size:
            return [b""] * len(starts)
        held, size = self.values.data.cast("B"), self.values.itemsize
        bounds = zip((starts * size).tolist(), (ends * size).tolist(), strict=True)
        return [held[start:end] for start, end in bounds]


def _joined(rows: list[memoryview | bytes], dtype: Any) -> NDArray[Any]:
    return np.frombuffer(bytearray().join(rows), dtype)


def _are_long(offsets: IntArray) -> bool:
    return len(offsets) > 1 and bool(offsets[-1] >= LONG * (len(offsets) - 1))


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

    Copies each row once where there are many arrays or rows are long.
    """
    if len(parts) == 1:
        array, index = parts[0]
        return array.take(index if order is None else index[order])
    bounds = [(array.offsets[index], array.offsets[index + 1]) for array, index in parts]
    lengths = np.concatenate([ends - starts for starts, ends in bounds])
    if not lengths.any():
        return Ragged(parts[0][0].values[:0], offsets_of(lengths if order is None else lengths[order]))
    if len(lengths) > FEW * len(parts) and not _are_long(offsets_of(lengths)):
        taken = concatenate([array.take(index) for array, index in parts])
        return taken if order is None else taken.take(order)
    rows = [row for (array, _), cut in zip(parts, bounds, strict=True) for row in array._cut(*cut)]
    if order is not None:
        rows, lengths = [rows[i] for i in order.tolist()], lengths[order]
    return Ragged(_joined(rows, parts[0][0].values.dtype), offsets_of(lengths))
