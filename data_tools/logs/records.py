"""A log as records: JSON lines, array elements, table rows; each with its number and a hash of its content.

What cannot be parsed becomes a `Reject` with its physical number; nothing here ends a collect.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import orjson
import simdjson

from data_tools.collecting.ids import digest, record_digest
from data_tools.collecting.reasons import Refused, Reject
from data_tools.logs.documents import elements
from data_tools.logs.jsontext import dump, parse
from data_tools.logs.lines import LineBlock, line_blocks
from data_tools.logs.log import Log
from data_tools.logs.packed import NumberKind, packed_record
from data_tools.logs.tables import columns_of, csv_records, listed, parquet_batches, row_digests

SAMPLES = 16
ELEMENTS = 1024


@dataclass(slots=True)
class Block:
    """Some consecutive records, as parallel lists; `rows` counts lines or rows of the log from 1.

    `raws` holds the bytes of the line of each record, where records are lines; of a packed one, which has no
    key twice, it holds nothing.
    """

    rows: list[int] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    raws: list[bytes] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    input_rows: int = 0

    def add(self, row: int, record: Any, content: bytes) -> None:
        """Append one record."""
        self.rows.append(row)
        self.records.append(record)
        self.contents.append(content)
        self.input_rows += 1

    def refuse(self, reject: Reject) -> None:
        """Append a record that cannot be parsed."""
        self.rejects.append(reject)
        self.input_rows += 1


def blocks(log: Log) -> Iterator[Block]:
    """Read a log as records, in blocks of bounded size.

    A line that is a JSON array stays one record (its elements may be one group); `flat` takes it apart.
    """
    if log.kind == "json":
        yield from _element_blocks(log)
    elif log.kind == "parquet":
        yield from _parquet_blocks(log)
    elif log.kind == "csv":
        yield from _csv_blocks(log)
    else:
        yield from map(json_block, line_blocks(log.blocks()))


def json_block(lines: LineBlock, numbers: Mapping[str, NumberKind] | None = None) -> Block:
    """Parse lines of JSON; empty lines are no records. Lists of fields in `numbers` may be Numbers."""
    numbered = [(row, line) for row, raw in enumerate(lines.lines, lines.first) if (line := raw.strip())]
    block = _clean_block(numbered) if numbers is None else _packed_block(numbered, numbers)
    if block is None:
        block = Block()
        for row, line in numbered:
            _add_line(block, row, line)
    for row, size in lines.oversized.items():
        block.refuse(Reject(row, "line_too_long", f"{size} bytes"))
    if lines.torn:
        block.refuse(Reject(lines.first + len(lines.lines), "torn_archive", lines.torn))
    return block


def _clean_block(lines: list[tuple[int, bytes]]) -> Block | None:
    """The block of lines that all are good records; None where one is not."""
    try:
        records = [orjson.loads(line) for _, line in lines]
    except orjson.JSONDecodeError:
        return None
    if not set(map(type, records)) <= {dict, list}:
        return None
    raws = [line for _, line in lines]
    rows = [row for row, _ in lines]
    return Block(rows, records, list(map(record_digest, raws)), raws, input_rows=len(rows))


def _packed_block(lines: list[tuple[int, bytes]], numbers: Mapping[str, NumberKind]) -> Block:
    """The block of lines, each packed where it is plainly good."""
    block, parser = Block(), simdjson.Parser()
    for row, line in lines:
        record = packed_record(parser, line, numbers)
        if record is None:
            _add_line(block, row, line)
        else:
            block.add(row, record, record_digest(line))
            block.raws.append(b"")
    return block


def _add_line(block: Block, row: int, line: bytes) -> None:
    try:
        record = parse(line, block.notes)
        if not isinstance(record, dict | list):
            raise Refused("not_an_object", f"a bare {type(record).__name__}")
    except Refused as refused:
        block.refuse(refused.at(row, line))
        return
    block.add(row, record, record_digest(line))
    block.raws.append(line)


def flat(block: Block) -> Block:
    """Take apart the records that are lists: each element becomes a record of its own, at the same row."""
    if not any(isinstance(record, list) for record in block.records):
        return block
    made = Block(rejects=block.rejects, notes=block.notes)
    for row, record, content in zip(block.rows, block.records, block.contents, strict=True):
        if not isinstance(record, list):
            made.add(row, record, content)
            continue
        for element in record:
            made.add(row, element, element_digest(element))
    made.input_rows += len(made.rejects)
    return made


def element_digest(element: Any) -> bytes:
    """Content hash of an element of a JSON array, whatever white space its file has."""
    return record_digest(dump(element).encode())


def _element_blocks(log: Log) -> Iterator[Block]:
    numbered = enumerate(elements(log.blocks()), 1)
    while items := list(islice(numbered, ELEMENTS)):
        block = Block()
        for row, element in items:
            if isinstance(element, Refused):
                block.refuse(element.at(row))
            else:
                block.add(row, element, element_digest(element))
        yield block


def _parquet_blocks(log: Log) -> Iterator[Block]:
    row = 1
    for batch in parquet_batches(log):
        columns = columns_of(batch)
        values = zip(*map(listed, columns.values()), strict=True)
        records = [dict(zip(columns, record, strict=True)) for record in values]
        numbers = list(range(row, row + batch.num_rows))
        yield Block(numbers, records, row_digests(columns), input_rows=batch.num_rows)
        row += batch.num_rows


def _csv_blocks(log: Log) -> Iterator[Block]:
    rows = csv_records(log.blocks())
    while items := list(islice(rows, ELEMENTS)):
        block = Block()
        for row, record in items:
            if isinstance(record, Refused):
                block.refuse(record.at(row))
            else:
                block.add(row, record, element_digest(record))
        yield block


def samples(log: Log) -> list[Any]:
    """Values of the first records, elements of arrays one by one: what a reader's `detect` looks at."""
    if log.kind in ("empty", "binary", "utf16", "sqlite", "sse", "text"):
        return []
    if log.kind == "jsonl":
        found = flat(json_block(next(line_blocks([log.head]))))
        return found.records[:SAMPLES] or _first_record(log)
    return next((flat(block).records[:SAMPLES] for block in blocks(log)), [])


def is_empty_table(log: Log) -> bool:
    """Whether a table has columns and no rows."""
    return log.kind in ("parquet", "csv") and not any(block.input_rows for block in blocks(log))


def first_reject(log: Log) -> Reject | None:
    """The first record that cannot be parsed, if that is true of all at the beginning of the log."""
    if log.kind not in ("json", "jsonl", "csv") or samples(log):
        return None
    return next((block.rejects[0] for block in blocks(log) if block.rejects), None)


def _first_record(log: Log) -> list[Any]:
    """The first record of a log whose first line is longer than the head."""
    return next((flat(block).records[:SAMPLES] for block in blocks(log)), [])


def looked_through(log: Log, marks: Sequence[bytes] = (b"",)) -> Iterator[Any]:
    """Yield the values of the records of a log; of lines only those that hold one of `marks`.

    For a look through a log before it is read: what cannot be parsed is left out without a word.
    """
    if log.kind in ("json", "parquet", "csv"):
        for block in blocks(log):
            yield from flat(block).records
        return
    for lines in line_blocks(log.blocks()):
        for line in lines.lines:
            if not any(mark in line for mark in marks):
                continue
            with suppress(Refused):
                value = parse(line.strip(), Counter())
                yield from value if isinstance(value, list) else [value]


def fingerprint(log: Log) -> bytes:
    """Hash of the first record: the same for a log that has grown, moved or was compressed again."""
    if log.kind in ("json", "csv", "parquet"):
        first = next((block.contents[0] for block in blocks(log) if block.contents), b"")
        return digest("log", first)
    for lines in line_blocks(log.blocks(), block_bytes=1):
        first = next((line for line in lines.lines if line.strip()), b"")
        if first:
            return digest("log", _line_digest(first))
    return digest("log", b"")


def _line_digest(line: bytes) -> bytes:
    """Hash of a first line; of its first element where it is an array, which may later span lines."""
    if line.lstrip().startswith(b"["):
        with suppress(Refused):
            record = parse(line.strip(), Counter())
            if isinstance(record, list) and record:
                return element_digest(record[0])
    return record_digest(line)
