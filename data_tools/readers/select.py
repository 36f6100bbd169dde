"""Any log through one SELECT: `source` is the log as DuckDB reads it, the result's columns are the dataset's.

Lines that are no JSON objects, and broken CSV rows, are found first and refused by their number; DuckDB sees
good ones only. `source_row` is the line or row of the log, from 1.
"""

import csv
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from data_tools.columns import LOOSE, MAPPED
from data_tools.connection import lock, open_duckdb
from data_tools.errors import ConfigError, DataError
from data_tools.guard import check_expression, check_select
from data_tools.jsontext import dump
from data_tools.logs import Log
from data_tools.readers.base import Carries, Chunk, Reader
from data_tools.readers.rows import Layout, table_chunks
from data_tools.reasons import Refused, Reject
from data_tools.records import Block, blocks, element_digest, flat
from data_tools.tables import csv_records, damaged
from data_tools.views import identifier, literal

_ROW = "__source_row"
ROW = "source_row"
CONTENT = "__content"
"""Hidden field: the hash of the record as it stands, so that a mapped row has the id it has without --map."""

_BATCH = 2048


class SelectReader(Reader):
    """Reads a log by the user's SELECT, or by expressions for single columns."""

    title = "any log through a SELECT over `source` (--select, --map)"
    carries = Carries(*["as selected"] * 7)

    def __init__(self, query: str, *, mapped: bool = False) -> None:
        """`mapped` says that the query keeps every field, so its rows are the log's own rows."""
        self.query, self.mapped = query, mapped
        self.name = "rows" if mapped else "select"

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take whatever DuckDB can read."""
        return log.kind in ("jsonl", "json", "csv", "parquet")

    def chunks(self, log: Log) -> Iterator[Chunk]:
        """Run the query over the log and stream its result."""
        if not self.detect(log, ()):
            hint = "give JSON, CSV or Parquet"
            raise DataError(f"{log.name}: nothing can be selected from {log.kind} content", hint)
        with _prepared(log) as prepared:
            yield Chunk(rejects=prepared.rejects, input_rows=prepared.input_rows)
            if prepared.scan:
                yield from self._rows(log, prepared)

    def _rows(self, log: Log, prepared: "_Prepared") -> Iterator[Chunk]:
        with open_duckdb() as con:
            fields = _create_source(con, log, prepared, () if self.mapped else (CONTENT,))
            with _query_errors(log, fields):
                result = con.sql(check_select(self.query, con))
                kinds = zip(result.columns, result.types, strict=True)
                json_columns = {name for name, kind in kinds if str(kind) == "JSON"}
                layout = Layout(ROW, json_columns, CONTENT if self.mapped else None)
                yield from table_chunks(result.to_arrow_reader(_BATCH), layout)


def map_query(expressions: Mapping[str, str]) -> str:
    """The SELECT that keeps every field and gives columns by expressions over the source row."""
    for column, text in expressions.items():
        if column not in LOOSE:
            raise ConfigError(f"--map: there is no column {column!r}", f"columns: {', '.join(LOOSE)}")
        check_expression(text, f"--map {column}", subqueries=True)
    mapped = [f"({text}\n) AS {identifier(MAPPED + column)}" for column, text in expressions.items()]
    return f"SELECT *, {', '.join(mapped)} FROM source"


@contextmanager
def _query_errors(log: Log, fields: Sequence[str]) -> Iterator[None]:
    """Say of a failed query which fields there are; an error in the middle of a stream is an OSError."""
    try:
        yield
    except (duckdb.Error, OSError) as error:
        message = " ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())
        hint = f"source has the fields: {', '.join(fields)}"
        raise ConfigError(f"SQL over {log.name}: {message}", hint) from error


def _create_source(
    con: duckdb.DuckDBPyConnection, log: Log, prepared: "_Prepared", hidden_fields: Sequence[str]
) -> list[str]:
    """Create the view `source`, leave the connection nothing else to read, and return the fields."""
    try:
        names = con.sql(f"SELECT * FROM {prepared.scan} LIMIT 0").columns
        own = [name for name in names if name in (prepared.row_column, ROW, *hidden_fields)]
        hidden = ", ".join(identifier(name) for name in own)
        row = f"CAST({prepared.row_sql} AS BIGINT) AS {ROW}"
        con.execute(f"CREATE VIEW source AS SELECT * EXCLUDE ({hidden}), {row} FROM {prepared.scan}")
    except duckdb.Error as error:
        hint = "check the file, or read it without --select and --map"
        raise DataError(f"{log.name}: {str(error).splitlines()[0]}", hint) from error
    lock(con, [prepared.path])
    return [name for name in names if name not in own] + [ROW]


@dataclass(slots=True)
class _Prepared:
    """A log made safe for DuckDB: a copy of its good records with their row numbers; Parquet needs none."""

    path: str
    scan: str = ""
    row_column: str = _ROW
    row_sql: str = _ROW
    input_rows: int = 0
    rejects: list[Reject] = field(default_factory=list)


@contextmanager
def _prepared(log: Log) -> Iterator[_Prepared]:
    if log.kind == "parquet":
        with log.local_file() as path:
            yield _prepared_parquet(log, path)
        return
    folder = tempfile.mkdtemp(prefix="rec-select-")
    try:
        prepare = _prepared_csv if log.kind == "csv" else _prepared_json
        yield prepare(log, f"{folder}/source")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepared_parquet(log: Log, path: str) -> _Prepared:
    try:
        rows = pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        raise damaged(log, error) from error
    scan = f"read_parquet({literal(path)}, file_row_number = true)"
    return _Prepared(path, scan, "file_row_number", "file_row_number + 1", rows)


def _prepared_json(log: Log, path: str) -> _Prepared:
    made, longest = _Prepared(path), 0
    with open(path, "wb") as copy:
        for block in map(flat, blocks(log)):
            made.input_rows += block.input_rows
            made.rejects += block.rejects
            good = list(_json_lines(block, made.rejects))
            longest = max(longest, *map(len, good), 0)
            copy.writelines(good)
    if longest:
        size = max(longest + 1, 1 << 24)
        made.scan = f"""read_json({literal(path)}, format = 'newline_delimited', sample_size = -1,
            maximum_object_size = {size}, compression = 'none')"""
    return made


def _json_lines(block: Block, rejects: list[Reject]) -> Iterator[bytes]:
    """Each record with its row number on one line, written anew: as JSON that any parser takes alike."""
    for row, record, content in zip(block.rows, block.records, block.contents, strict=True):
        try:
            if not isinstance(record, dict):
                raise Refused("not_an_object", "an element that is no object")
            yield dump({**record, _ROW: row, CONTENT: content.hex()}).encode() + b"\n"
        except Refused as refused:
            rejects.append(refused.at(row))


def _prepared_csv(log: Log, path: str) -> _Prepared:
    made, header = _Prepared(path), False
    with open(path, "w", encoding="utf-8", newline="") as copy:
        writer = csv.writer(copy)
        for row, record in csv_records(log.blocks()):
            made.input_rows += 1
            if isinstance(record, Refused):
                made.rejects.append(record.at(row))
                continue
            if not header:
                writer.writerow([_ROW, CONTENT, *record])
                header = True
            writer.writerow([row, element_digest(record).hex(), *record.values()])
    if header:
        made.scan = f"""read_csv({literal(path)}, header = true, delim = ',', quote = '"', escape = '"',
            sample_size = -1, compression = 'none')"""
    return made
