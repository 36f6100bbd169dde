"""A column of lists as numpy: one array of items, the bounds of each row, and which rows have a list."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Lists of unequal length. `items`: values of all rows one after another; `absent`: which items are null.

    `bounds`: row r is items[bounds[r]:bounds[r + 1]]; `present`: rows that have a list (an empty one counts).
    """

    items: npt.NDArray[Any]
    absent: Bools
    bounds: Integers
    present: Bools

    @classmethod
    def of(cls, array: pa.Array | None, rows: int) -> "Ragged":
        """Read an Arrow list array of numbers; None is a column that is missing everywhere."""
        if array is None:
            empty = np.zeros(0, bool)
            return cls(np.zeros(0), empty, np.zeros(rows + 1, np.int64), np.zeros(rows, bool))
        items = pc.list_flatten(array)
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        absent = np.zeros(len(items), bool)
        if items.null_count:
            absent = pc.is_null(items).to_numpy(zero_copy_only=False)
            items = pc.fill_null(items, 0)
        present = array.is_valid().to_numpy(zero_copy_only=False)
        return cls(items.to_numpy(zero_copy_only=False), absent, _bounds(lengths), present)

    @property
    def lengths(self) -> Integers:
        """Items of each row, 0 where there is no list."""
        return np.diff(self.bounds)

    def rows_of_items(self) -> Integers:
        """The row that each item belongs to."""
        return np.repeat(np.arange(len(self.present)), self.lengths)

    def any(self, marked: Bools) -> Bools:
        """Rows that have a marked item."""
        found = np.zeros(len(self.present), bool)
        if marked.any():
            found[self.rows_of_items()[marked]] = True
        return found

    def outside(self, low: float, high: float) -> Bools:
        """Items that are null, not a number, or not within low..high."""
        if len(self.items) and not self.absent.any() and low <= self.items.min() and self.items.max() <= high:
            return np.zeros(len(self.items), bool)
        return self.absent | ~((self.items >= low) & (self.items <= high))

    def sum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sum over the items of each row, each row on its own (an infinite one spoils no other)."""
        totals = np.zeros(len(self.present))
        filled = self.lengths > 0
        if filled.any():
            totals[filled] = np.add.reduceat(values, self.bounds[:-1][filled])
        return totals

    def only(self, kept: Bools) -> "Ragged":
        """The same rows, without a list where `kept` is false."""
        if kept[self.present].all():
            return self
        stay = np.repeat(kept, self.lengths)
        lengths = np.where(kept, self.lengths, 0)
        return Ragged(self.items[stay], self.absent[stay], _bounds(lengths), self.present & kept)

    def cut(self, first: Integers, last: Integers) -> "Ragged":
        """The same rows, each list cut to its items first[r]..last[r] (exclusive)."""
        if not first.any() and (last >= self.lengths).all():
            return self
        place = np.arange(len(self.items)) - np.repeat(self.bounds[:-1], self.lengths)
        stay = (place >= np.repeat(first, self.lengths)) & (place < np.repeat(last, self.lengths))
        lengths = np.clip(np.minimum(last, self.lengths) - first, 0, None)
        return Ragged(self.items[stay], self.absent[stay], _bounds(lengths), self.present)

    def arrow(self, item: pa.DataType) -> pa.Array:
        """An Arrow list array with items of the given type."""
        mask = self.absent if self.absent.any() else None
        items = pa.array(self.items.astype(item.to_pandas_dtype()), mask=mask)
        bounds = pa.array(self.bounds.astype(np.int32), mask=np.append(~self.present, False))
        return pa.ListArray.from_arrays(bounds, items)


def _bounds(lengths: npt.NDArray[Any]) -> Integers:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
