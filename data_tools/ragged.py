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
        absent = pc.is_null(items).to_numpy(zero_copy_only=False)
        values = pc.fill_null(items, 0).to_numpy(zero_copy_only=False)
        return cls(values, absent, _bounds(lengths), array.is_valid().to_numpy(zero_copy_only=False))

    @property
    def lengths(self) -> Integers:
        """Items of each row, 0 where there is no list."""
        return np.diff(self.bounds)

    def rows_of_items(self) -> Integers:
        """The row that each item belongs to."""
        return np.repeat(np.arange(len(self.present)), self.lengths)

    def any(self, marked: Bools) -> Bools:
        """Rows that have a marked item."""
        return self.sum(marked) > 0

    def sum(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Sum over the items of each row, each row on its own (an infinite one spoils no other)."""
        if values.dtype == bool:
            total = np.concatenate([[0], np.cumsum(values)])
            return np.asarray(total[self.bounds[1:]] - total[self.bounds[:-1]])
        return np.bincount(self.rows_of_items(), weights=values, minlength=len(self.present))

    def only(self, kept: Bools) -> "Ragged":
        """The same rows, without a list where `kept` is false."""
        stay = np.repeat(kept, self.lengths)
        lengths = np.where(kept, self.lengths, 0)
        return Ragged(self.items[stay], self.absent[stay], _bounds(lengths), self.present & kept)

    def cut(self, first: Integers, last: Integers) -> "Ragged":
        """The same rows, each list cut to its items first[r]..last[r] (exclusive)."""
        place = np.arange(len(self.items)) - np.repeat(self.bounds[:-1], self.lengths)
        stay = (place >= np.repeat(first, self.lengths)) & (place < np.repeat(last, self.lengths))
        lengths = np.clip(np.minimum(last, self.lengths) - first, 0, None)
        return Ragged(self.items[stay], self.absent[stay], _bounds(lengths), self.present)

    def arrow(self, item: pa.DataType) -> pa.Array:
        """An Arrow list array with items of the given type."""
        items = pa.array(self.items, mask=self.absent).cast(item, safe=False)
        bounds = pa.array(self.bounds.astype(np.int32), mask=np.append(~self.present, False))
        return pa.ListArray.from_arrays(bounds, items)


def _bounds(lengths: npt.NDArray[Any]) -> Integers:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
