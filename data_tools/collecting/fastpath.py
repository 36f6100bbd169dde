"""A column at a time: values that all have their column's type become Arrow arrays at once.

Only where some value has another type is the column read value by value (coerce.py); both give the same rows.
"""

from array import array as machine_array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.collecting.coerce import coerce
from data_tools.collecting.columns import LOOSE, ColumnKind
from data_tools.collecting.prompts import response_parts
from data_tools.collecting.reasons import Notes, Refused
from data_tools.logs.packed import NumberKind, Numbers, unpacked
from data_tools.logs.tables import listed
from data_tools.readers.base import Chunk

_NONE = type(None)

ARROW: dict[ColumnKind, pa.DataType] = {
    "text": pa.string(),
    "prompt": pa.string(),
    "key": pa.string(),
    "label": pa.string(),
    "json": pa.string(),
    "int32": pa.int64(),
    "int64": pa.int64(),
    "float": pa.float64(),
    "reward": pa.float64(),
    "time": pa.timestamp("us", tz="UTC"),
    "bool": pa.bool_(),
    "ids": pa.list_(pa.int64()),
    "logprobs": pa.list_(pa.float64()),
    "mask": pa.list_(pa.int64()),
    "texts": pa.list_(pa.string()),
}
"""The loose type of each kind of column: wide, so that the rules can still see what is out of range."""

_PYTHON: dict[ColumnKind, set[type]] = {
    "text": {str},
    "prompt": {str},
    "key": {str},
    "label": {str},
    "int32": {int},
    "int64": {int},
    "float": {int, float},
    "reward": {int, float},
    "bool": {bool},
    "logprobs": {int, float, _NONE},
}
"""Exact types of the values (of the items of log-probs) that need no coercion; bool is not int here."""


@dataclass(slots=True)
class Typed:
    """The rows of a chunk as typed loose columns; a column that the log lacks is absent.

    `extra` gained what could not be read; `refused` maps a row of the chunk to why it cannot be used.
    """

    columns: dict[str, pa.Array]
    extra: list[dict[str, Any]]
    rows: int
    notes: Notes = field(default_factory=Notes)
    refused: dict[int, Refused] = field(default_factory=dict)


def typed(chunk: Chunk, *, tolerant: bool = False) -> Typed:
    """Give every column its type; `tolerant` reads all of them value by value."""
    unknown = set(chunk.columns) - set(LOOSE) - {"extra"}
    if unknown:
        raise KeyError(f"a reader gave columns that do not exist: {sorted(unknown)}")
    count = len(chunk.source_row)
    extra = [dict(other or {}) for other in chunk.columns.get("extra", ())] or [{} for _ in range(count)]
    made = Typed({}, extra, count)
    for column, values in _with_response_parts(chunk).items():
        kind = LOOSE[column]
        array = None if tolerant else _strict(kind, values)
        made.columns[column] = _tolerant(made, chunk, column, values) if array is None else array
    return made


def _tolerant(made: Typed, chunk: Chunk, column: str, values: Sequence[Any] | pa.Array) -> pa.Array:
    kind = LOOSE[column]
    read = coerce(kind, plain(values), textual=chunk.textual)
    made.notes.merge(read.notes)
    made.refused |= {row: why for row, why in read.refused.items() if row not in made.refused}
    for row, value in read.lost.items():
        made.extra[row][chunk.names.get(column, column)] = value
    if kind == "time":
        return pa.array(read.values, pa.int64()).cast(ARROW["time"])
    return pa.array(read.values, ARROW[kind])


def plain(values: Sequence[Any] | pa.Array) -> Sequence[Any]:
    """Python values of a column; those of a JSON column are parsed."""
    if not isinstance(values, pa.Array):
        return list(map(unpacked, values)) if Numbers in set(map(type, values)) else values
    if isinstance(values.type, pa.BaseExtensionType):
        return [None if text is None else _parsed(text) for text in values.storage.to_pylist()]
    return listed(values)


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _strict(kind: ColumnKind, values: Sequence[Any] | pa.Array) -> pa.Array | None:
    """The column as an Arrow array, or None where some value needs coercion."""
    array = _from_arrow(kind, values) if isinstance(values, pa.Array) else _from_python(kind, values)
    return array if array is not None and _in_range(kind, array) else None


def _from_python(kind: ColumnKind, values: Sequence[Any]) -> pa.Array | None:
    types = set(map(type, values)) - {_NONE}
    if not types:
        return pa.nulls(len(values), ARROW[kind])
    if pa.types.is_list(ARROW[kind]):
        return _lists(kind, values) if types <= {list, Numbers} else None
    if kind in ("key", "label") and types == {int}:
        return _text_of_integers(values)
    return _array(values, ARROW[kind]) if types <= _PYTHON.get(kind, set()) else None


def _lists(kind: ColumnKind, values: Sequence[Any]) -> pa.Array | None:
    """Lists of items of the right type. Items are looked at one by one only where Arrow would not refuse."""
    if (packed := _packed_lists(values)) is not None:
        return packed
    values = plain(values)
    if kind == "ids":
        return _integer_lists(values)
    if kind == "logprobs":
        return _float_lists(values)
    if kind == "texts":
        return _array(values, ARROW[kind])
    found = _array(values, None)  # Arrow finds int64 only where every item is an int
    if found is not None and found.type.value_type == pa.null():
        return found.cast(ARROW[kind])
    return found if found is not None and found.type == ARROW[kind] else None


def _packed_lists(values: Sequence[Any]) -> pa.Array | None:
    """Lists of numbers that were never Python objects; None where some were."""
    if set(map(type, values)) - {_NONE} != {Numbers}:
        return None
    lists = [value for value in values if value is not None]
    if len({numbers.kind for numbers in lists}) > 1:
        return None
    items = np.frombuffer(b"".join(numbers.data for numbers in lists), _PACKED[lists[0].kind])
    sizes = np.array([-8 if value is None else len(value.data) for value in values], np.int64)
    return pa.ListArray.from_arrays(_bounds(sizes // 8), pa.array(items))


_PACKED: dict[NumberKind, type[np.generic]] = {"i": np.int64, "d": np.float64}


def _bounds(lengths: npt.NDArray[np.int64]) -> pa.Array:
    """The bounds of lists in their joined items; a length of -1 is no list."""
    bounds = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0))]).astype(np.int32)
    return pa.array(bounds, mask=np.append(lengths < 0, False))


def _float_lists(values: Sequence[Any]) -> pa.Array | None:
    found = _array(values, ARROW["logprobs"])
    if found is None:
        return None
    items = found.values.to_numpy(zero_copy_only=False)
    doubtful = (items == 1.0) | ((items == 0.0) & ~np.signbit(items))
    return found if _plain_items(values, found.offsets.to_numpy(), doubtful, _PYTHON["logprobs"]) else None


def _integer_lists(values: Sequence[Any]) -> pa.Array | None:
    """Lists of integers through one machine array, which takes half the time of Arrow's own way."""
    items = machine_array("q")
    try:
        for value in values:
            if value is not None:
                items.fromlist(value)
    except (TypeError, OverflowError):
        return None
    flat = np.frombuffer(items, np.int64) if items else np.zeros(0, np.int64)
    lengths = np.array([-1 if value is None else len(value) for value in values], np.int64)
    found = pa.ListArray.from_arrays(_bounds(lengths), pa.array(flat))
    doubtful = (flat == 0) | (flat == 1)
    return found if _plain_items(values, found.offsets.to_numpy(), doubtful, {int}) else None


def _plain_items(
    values: Sequence[Any], bounds: npt.NDArray[np.int32], doubtful: npt.NDArray[np.bool_], types: set[type]
) -> bool:
    """Whether lists with a 0 or 1 hold no booleans, which arrays take for numbers without a word."""
    rows = np.unique(np.searchsorted(bounds, np.flatnonzero(doubtful), "right") - 1)
    return set(map(type, chain.from_iterable(values[row] for row in rows.tolist()))) <= types


def _array(values: Sequence[Any], kind: pa.DataType | None) -> pa.Array | None:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return None


def _text_of_integers(values: Sequence[Any]) -> pa.Array | None:
    integers = _array(values, pa.int64())
    return None if integers is None else integers.cast(pa.string())


def _in_range(kind: ColumnKind, array: pa.Array) -> bool:
    if kind in ("float", "reward"):
        return pc.all(pc.is_finite(array)).as_py() in (True, None)
    if kind == "mask":
        bits = pc.is_in(array.values, pa.array([0, 1]))
        return bool(pc.all(bits).as_py() in (True, None))
    if kind == "int32" and array.null_count < len(array):
        bounds = pc.min_max(array)
        return bool(bounds["min"].as_py() >= -(2**31) and bounds["max"].as_py() < 2**31)
    return True


def _from_arrow(kind: ColumnKind, array: pa.Array) -> pa.Array | None:
    have, want = array.type, ARROW[kind]
    if pa.types.is_null(have):
        return pa.nulls(len(array), want)
    if pa.types.is_dictionary(have):
        return _from_arrow(kind, array.dictionary_decode())
    if kind == "time":
        return _utc(array) if pa.types.is_timestamp(have) else None
    if pa.types.is_list(want):
        listed = pa.types.is_list(have) or pa.types.is_large_list(have) or pa.types.is_fixed_size_list(have)
        clean = listed and _fits(have.value_type, want.value_type)
    else:
        clean = _fits(have, want) or (kind in ("key", "label") and _fits(have, pa.int64()))
    return _cast(array, want) if clean and kind != "json" else None


def _fits(have: pa.DataType, want: pa.DataType) -> bool:
    """Whether every value of one type is a value of the other, exactly or as the nearest number."""
    if have == pa.uint64():
        return False
    if pa.types.is_string(want):
        return bool(pa.types.is_string(have) or pa.types.is_large_string(have))
    if pa.types.is_floating(want):
        return bool(pa.types.is_floating(have) or pa.types.is_integer(have))
    return bool(pa.types.is_integer(have)) if pa.types.is_integer(want) else bool(have == want)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array | None:
    try:
        return array.cast(kind)
    except pa.ArrowException:
        return None


def _utc(array: pa.Array) -> pa.Array:
    if array.type.tz is None:
        return pc.assume_timezone(array.cast(pa.timestamp("us"), safe=False), "UTC")
    return array.cast(ARROW["time"], safe=False)


def _with_response_parts(chunk: Chunk) -> dict[str, Sequence[Any] | pa.Array]:
    """Split responses that are messages into their text and, where they hold more, the messages."""
    columns = {name: values for name, values in chunk.columns.items() if name != "extra"}
    if not _has_messages(columns):
        return columns
    count = len(chunk.source_row)
    nothing = [None] * count
    texts = list(plain(columns.get("response", nothing)))
    messages = list(plain(columns.get("response_messages", nothing)))
    flags = [list(flags or ()) for flags in plain(columns.get("flags", nothing))]
    for row in range(count):
        logged = texts[row] if isinstance(texts[row], dict | list) else messages[row]
        text, kept, found = response_parts(_parsed(logged) if isinstance(logged, str) else logged)
        if text is None and kept is None:
            continue
        texts[row] = texts[row] if isinstance(texts[row], str) else text
        messages[row] = kept
        flags[row] += found
    return columns | {"response": texts, "response_messages": messages, "flags": flags}


def _has_messages(columns: dict[str, Sequence[Any] | pa.Array]) -> bool:
    if "response_messages" in columns:
        return True
    values = columns.get("response", ())
    if isinstance(values, pa.Array):
        return not (_fits(values.type, pa.string()) or pa.types.is_null(values.type))
    return bool(set(map(type, values)) & {list, dict})
