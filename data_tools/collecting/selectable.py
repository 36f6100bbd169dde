"""A log made ready for SQL: its good records as something that DuckDB reads without guessing at texts.

Lines that are no JSON objects, and broken CSV rows, are found first and refused by their number. What is left
is copied with its row numbers; JSON texts stay texts (DuckDB would take "12:00" for a time of day).
"""

import csv
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from data_tools.collecting.columns import LOOSE, names_of
from data_tools.collecting.json_types import NOTHING, Kind, merged, sql_type
from data_tools.collecting.reasons import Refused, Reject
from data_tools.errors import DataError
from data_tools.logs.jsontext import dump
from data_tools.logs.log import Log
from data_tools.logs.records import Block, blocks, element_digest, flat
from data_tools.logs.tables import csv_records, damaged
from data_tools.store.views import literal

ROW = "__source_row"
CONTENT = "__content"
"""Hidden fields of the copy: the number of a record, and the hash of its content as it stands in the log."""

_TEXTS = [
    name
    for column, kind in LOOSE.items()
    if kind in ("text", "prompt", "key", "label")
    for name in names_of(column)
]


@dataclass(slots=True)
class Selectable:
    """What SQL can read of a log: `scan` is a FROM item, empty where there is no good record.

    `row_sql` gives the row number; `hidden` are fields of the scan that the log does not have.
    """

    path: str
    scan: str = ""
    row_sql: str = ROW
    hidden: tuple[str, ...] = (ROW, CONTENT)
    input_rows: int = 0
    rejects: list[Reject] = field(default_factory=list)


@contextmanager
def selectable(log: Log) -> Iterator[Selectable]:
    """Prepare a log; a copy that this needs is removed at the end."""
    if log.kind == "parquet":
        with log.local_file() as path:
            yield _parquet(log, path)
        return
    folder = tempfile.mkdtemp(prefix="rec-select-")
    try:
        yield (_csv if log.kind == "csv" else _json)(log, f"{folder}/source")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parquet(log: Log, path: str) -> Selectable:
    try:
        rows = pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        raise damaged(log, error) from error
    scan = f"read_parquet({literal(path)}, file_row_number = true)"
    return Selectable(path, scan, "file_row_number + 1", ("file_row_number",), rows)


def _json(log: Log, path: str) -> Selectable:
    made, longest = Selectable(path), 0
    fields: dict[str, Kind] = {}
    with open(path, "wb") as copy:
        for block in map(flat, blocks(log)):
            made.input_rows += block.input_rows
            made.rejects += block.rejects
            good = list(_json_lines(block, fields, made.rejects))
            longest = max(longest, *map(len, good), 0)
            copy.writelines(good)
    if longest:
        size = max(longest + 1, 1 << 24)
        made.scan = f"""read_json({literal(path)}, format = 'newline_delimited', compression = 'none',
            maximum_object_size = {size}, columns = {_json_columns(log, fields)})"""
    return made


def _json_lines(block: Block, fields: dict[str, Kind], rejects: list[Reject]) -> Iterator[bytes]:
    """Each record with its row number on one line, written anew: as JSON that any parser takes alike."""
    for row, record, content in zip(block.rows, block.records, block.contents, strict=True):
        try:
            if not isinstance(record, dict):
                raise Refused("not_an_object", "an element that is no object")
            line = dump({**record, ROW: row, CONTENT: content.hex()}).encode() + b"\n"
        except Refused as refused:
            rejects.append(refused.at(row))
            continue
        for name, value in record.items():
            fields[name] = merged(fields.get(name, NOTHING), value)
        yield line


def _json_columns(log: Log, fields: dict[str, Kind]) -> str:
    twice = sorted(name for name, count in Counter(map(str.lower, fields)).items() if count > 1)
    if twice:
        found = [name for name in sorted(fields) if name.lower() == twice[0]]
        hint = "rename one of them, or collect without --select and --map"
        raise DataError(f"{log.name}: SQL cannot tell the fields {' and '.join(found)} apart", hint)
    types = {name: sql_type(kind) for name, kind in fields.items() if name not in ("", ROW, CONTENT)}
    types |= {ROW: "BIGINT", CONTENT: "VARCHAR"}
    return "{" + ", ".join(f"{literal(name)}: {literal(kind)}" for name, kind in types.items()) + "}"


def _csv(log: Log, path: str) -> Selectable:
    made = Selectable(path)
    header: list[str] = []
    with open(path, "w", encoding="utf-8", newline="") as copy:
        writer = csv.writer(copy)
        for row, record in csv_records(log.blocks()):
            made.input_rows += 1
            if isinstance(record, Refused):
                made.rejects.append(record.at(row))
                continue
            if not header:
                header = [ROW, CONTENT, *record]
                writer.writerow(header)
            writer.writerow([row, element_digest(record).hex(), *record.values()])
    if header:
        # A response of 0x10 must not become 16; columns of other names may hold numbers to calculate with.
        texts = ", ".join(f"{literal(name)}: 'VARCHAR'" for name in [CONTENT, *_TEXTS] if name in header)
        made.scan = f"""read_csv({literal(path)}, header = true, delim = ',', quote = '"', escape = '"',
            sample_size = -1, compression = 'none', types = {{{texts}}},
            auto_type_candidates = ['BOOLEAN', 'BIGINT', 'DOUBLE', 'VARCHAR'])"""
    return made
