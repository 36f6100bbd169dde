"""Table files as records: Parquet in Arrow batches, CSV as text; and a content hash of Arrow rows."""

import csv
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_tools.errors import DataError
from data_tools.ids import DIGEST_BYTES, blake
from data_tools.jsontext import canonical
from data_tools.lines import line_blocks
from data_tools.logs import Log
from data_tools.reasons import Refused

BATCH_BYTES = 8 << 20
BATCH_ROWS = 4096
FIELD_BYTES = 1 << 27
"""Longest CSV field; a quote that is never closed swallows no more than this."""


def parquet_batches(log: Log, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield a Parquet log in batches of bounded size; raises DataError where the file is damaged."""
    with log.local_file() as path:
        try:
            with pq.ParquetFile(path) as file:
                yield from file.iter_batches(batch_size=_batch_rows(file.metadata), columns=columns)
        except (pa.ArrowException, OSError) as error:
            hint = "copy it again, or leave it out"
            raise DataError(
                f"{log.name} is a damaged Parquet file: {str(error).splitlines()[0]}", hint
            ) from error


def _batch_rows(metadata: Any) -> int:
    size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    per_row = max(size // max(metadata.num_rows, 1), 1)
    return int(min(max(BATCH_BYTES // per_row, 1), BATCH_ROWS))


def csv_records(data: Iterable[bytes]) -> Iterator[tuple[int, dict[str, str | None] | Refused]]:
    """Yield (line, record) of a CSV or TSV log whose first row names the columns; an empty value is None.

    `line` is the physical line on which the row begins, from 1. A broken row is yielded as a Refused.
    """
    csv.field_size_limit(FIELD_BYTES)
    text = (
        line.decode("utf-8", "surrogateescape") + "\n" for lines in line_blocks(data) for line in lines.lines
    )
    first = next(text, "")
    delimiter = max(",\t;", key=first.count)
    header = next(csv.reader([first], delimiter=delimiter), [])
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 2
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, Refused("bad_csv", str(error))
            continue
        if values:
            yield line, _csv_record(header, values)


def _csv_record(header: list[str], values: list[str]) -> dict[str, str | None] | Refused:
    if len(values) != len(header):
        return Refused("bad_csv", f"{len(values)} values for {len(header)} columns")
    if not all(map(str.isascii, values)):
        with suppress(UnicodeEncodeError):
            "".join(values).encode()
            return {name: value or None for name, value in zip(header, values, strict=True)}
        return Refused("bad_csv", "not UTF-8 text")
    return {name: value or None for name, value in zip(header, values, strict=True)}


def row_digests(batch: pa.RecordBatch) -> list[bytes]:
    """Content hash of each row: names and values of its columns, whatever their order, width or encoding.

    A missing value counts as an absent column, so a column of nulls that a later export adds changes nothing.
    """
    cells = [(name.encode(), _cells(batch.column(name))) for name in sorted(set(batch.schema.names))]
    return [_row_digest([(name, column[row]) for name, column in cells]) for row in range(batch.num_rows)]


def _row_digest(cells: list[tuple[bytes, bytes | None]]) -> bytes:
    parts = [b"%d:%b=%d:%b" % (len(name), name, len(cell), cell) for name, cell in cells if cell is not None]
    return blake(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def _cells(array: pa.Array) -> list[bytes | None]:
    """The bytes of each value, None where it is missing."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        plain = _canonical_type(kind.value_type)
        if plain is not None and plain != pa.large_binary():
            return _list_cells(array.cast(pa.large_list(plain)))
    plain = _canonical_type(kind)
    if plain == pa.large_binary():
        binary = array.cast(pa.large_string()) if pa.types.is_string(kind) else array
        return [None if value is None else value for value in binary.cast(plain).to_pylist()]
    if plain is not None:
        values = _numbers(array.cast(plain))
        return [
            values[row : row + 1].tobytes() if valid else None
            for row, valid in enumerate(array.is_valid().to_pylist())
        ]
    return [None if value is None else canonical(value).encode() for value in array.to_pylist()]


def _list_cells(array: pa.Array) -> list[bytes | None]:
    bounds = array.offsets.to_numpy()
    values = memoryview(_numbers(array.values).view(np.uint8).data)
    return [
        bytes(values[8 * start : 8 * end]) if valid else None
        for start, end, valid in zip(bounds[:-1], bounds[1:], array.is_valid().to_pylist(), strict=True)
    ]


def _numbers(array: pa.Array) -> np.ndarray[Any, Any]:
    """Values as 8-byte numbers; a null within a list gets a value no log holds."""
    hole: float = np.nan if pa.types.is_floating(array.type) else np.iinfo(np.int64).min
    return np.ascontiguousarray(pc.fill_null(array, hole).to_numpy(zero_copy_only=False))


def _canonical_type(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and kind != pa.uint64()):
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.large_binary()
    return None
