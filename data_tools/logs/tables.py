"""Table files as records: Parquet in Arrow batches, CSV as text; and a content hash of Arrow rows."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_tools.collecting.ids import record_digest
from data_tools.collecting.reasons import Refused
from data_tools.errors import DataError
from data_tools.logs.jsontext import canonical
from data_tools.logs.lines import line_blocks
from data_tools.logs.log import Log

BATCH_BYTES = 8 << 20
BATCH_ROWS = 4096
FIELD_BYTES = 1 << 27
"""Longest CSV field; a quote that is never closed swallows no more than this."""


def parquet_batches(log: Log) -> Iterator[pa.RecordBatch]:
    """Yield a Parquet log in batches of bounded size; raises DataError where the file is damaged."""
    # A pre-buffered file keeps what was read of it in memory until it is closed.
    with log.local_file() as path, _reading(log), pq.ParquetFile(path, pre_buffer=False) as file:
        for batch in file.iter_batches(batch_size=_batch_rows(file.metadata)):
            batch.validate(full=True)  # text that is no UTF-8 would fail much later
            yield batch


@contextmanager
def _reading(log: Log) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise damaged(log, error) from error


def damaged(log: Log, error: Exception) -> DataError:
    """The error for a Parquet file that cannot be read."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"{log.name} is a damaged Parquet file: {reason}", "copy it again, or leave it out")


def _batch_rows(metadata: Any) -> int:
    size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    per_row = max(size // max(metadata.num_rows, 1), 1)
    return int(min(max(BATCH_BYTES // per_row, 1), BATCH_ROWS))


def csv_records(data: Iterable[bytes]) -> Iterator[tuple[int, dict[str, str | None] | Refused]]:
    """Yield (line, record) of a CSV or TSV log whose first row names the columns; an empty value is None.

    `line` is the physical line on which the row begins, from 1. A broken row is yielded as a Refused.
    """
    csv.field_size_limit(FIELD_BYTES)
    text = _CsvLines(data)
    first = next(text, "")
    reader = csv.reader(chain([first], text), delimiter=max(",\t;", key=first.count), strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            header = [] if header is None else header  # rows below a broken header belong to no column
            yield line, Refused("bad_csv", str(error))
            continue
        if header is None:
            header = values
        elif values:
            yield line, _csv_record(header, values)
    if text.torn:
        yield line, Refused("torn_archive", text.torn)


class _CsvLines:
    """Lines of text for the csv module, which needs their ends; remembers whether an archive broke."""

    def __init__(self, data: Iterable[bytes]) -> None:
        self.torn: str | None = None
        self._lines = self._read(data)

    def _read(self, data: Iterable[bytes]) -> Iterator[str]:
        for block in line_blocks(data):
            self.torn = block.torn
            # A byte that is no UTF-8 becomes a lone surrogate, by which `_csv_record` knows what to refuse.
            yield from (line.decode("utf-8", "surrogateescape") + "\n" for line in block.lines)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._lines)


def _csv_record(header: list[str], values: list[str]) -> dict[str, str | None] | Refused:
    if len(values) != len(header):
        return Refused("bad_csv", f"{len(values)} values for {len(header)} columns")
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        return Refused("bad_csv", "not UTF-8 text")
    return {name: value or None for name, value in zip(header, values, strict=True)}


def listed(array: pa.Array) -> list[Any]:
    """Python values of an Arrow array; times that Python cannot hold are their text."""
    try:
        values: list[Any] = array.to_pylist()
    except (ValueError, OverflowError):
        values = _with_times_as_text(array).to_pylist()
    return values


def _with_times_as_text(array: pa.Array) -> pa.Array:
    return array.cast(_text_for_times(array.type))


def _text_for_times(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_text_for_times(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_text_for_times(kind.value_type))
    return kind


def columns_of(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Columns of a batch by name."""
    return dict(zip(batch.schema.names, batch.columns, strict=True))


def row_digests(columns: Mapping[str, pa.Array | Sequence[Any]]) -> list[bytes]:
    """Content hash of each row: names and values of its columns, whatever their order, width or encoding.

    1 and 1.0 are equal, and a missing value counts as an absent column: what a larger export, or DuckDB's
    guess at a type, changes about the rows that it had before does not change their hashes.
    """
    names = sorted(columns)
    cells = [_cells(columns[name]) for name in names]
    heads = [b"%d:%b=" % (len(name.encode()), name.encode()) for name in names]
    return [
        record_digest(
            b"".join(head + cell for head, cell in zip(heads, row, strict=True) if cell is not None)
        )
        for row in zip(*cells, strict=True)
    ]


def _cells(values: pa.Array | Sequence[Any]) -> list[bytes | None]:
    """The bytes of each value, None where it is missing."""
    if isinstance(values, pa.Array):
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if _is_list_of_numbers(values.type):
            return _number_lists(values.cast(pa.large_list(pa.float64()), safe=False))
        values = listed(values)
    return [None if value is None else _cell(value) for value in values]


def _is_list_of_numbers(kind: pa.DataType) -> bool:
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(listed and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)))


def _number_lists(array: pa.Array) -> list[bytes | None]:
    bounds = array.offsets.to_numpy()
    numbers = pc.fill_null(array.values, np.nan).to_numpy(zero_copy_only=False)
    raw = np.ascontiguousarray(numbers).tobytes()
    return [
        _sized(b"l", raw[8 * start : 8 * end]) if valid else None
        for start, end, valid in zip(bounds[:-1], bounds[1:], array.is_valid().to_pylist(), strict=True)
    ]


def _cell(value: Any) -> bytes:
    if isinstance(value, str):
        return _sized(b"t", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, list) and all(type(item) in _NUMBERS for item in value):
        numbers = np.array([np.nan if item is None else item for item in value], np.float64)
        return _sized(b"l", numbers.tobytes())
    return _sized(b"j", canonical(_without_width(value)).encode())


_NUMBERS = (int, float, type(None))


def _sized(kind: bytes, data: bytes) -> bytes:
    return b"%b%d:%b" % (kind, len(data), data)


def _without_width(value: Any) -> Any:
    """Whole floats as integers, and mappings without missing values."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_without_width(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_width(item) for key, item in value.items() if item is not None}
    return value
