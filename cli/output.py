"""How rows and facts are shown, the same from every command: table, CSV, JSON, Parquet. stdout is data."""

import csv
import io
import itertools
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, BinaryIO

import click
import orjson

from data_tools.errors import ConfigError
from data_tools.store.storage import discard, open_storage, write_error

if TYPE_CHECKING:
    import pyarrow as pa

TABLE_ROWS = 1000
"""A table is for eyes: more rows than these are cut, with a note; the other forms give all."""

CELL_CHARACTERS = 120


def plain(value: Any) -> Any:
    """A value of a result as JSON knows it: whole decimals as integers, bytes as hexadecimal digits."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() and abs(value) < 2**63 else float(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


def to_json(value: Any, *, indent: bool = False) -> str:
    """Strict JSON: a number that is not finite becomes null."""
    options = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    return orjson.dumps(value, default=plain, option=options).decode()


def printable(text: str) -> str:
    """Text that cannot move the cursor or colour the terminal: control characters are shown escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def cell(value: Any) -> str:
    """A value on one short line."""
    if value is None:
        return ""
    if isinstance(value, bool | str):
        text = str(value)
    elif isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, int):
        text = str(value)
    elif isinstance(value, Decimal | bytes | date | time | timedelta):
        text = str(plain(value))
    else:
        text = to_json(value)
    text = printable(text[: CELL_CHARACTERS + 1])
    return text if len(text) <= CELL_CHARACTERS else f"{text[: CELL_CHARACTERS - 1]}…"


def format_table(
    names: Sequence[str], rows: Iterable[Sequence[Any]], *, width: int | None = None, wrap: bool = False
) -> str:
    """An aligned table, numbers to the right; within a `width` long cells are cut, or wrapped if `wrap`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(names):
        numeric = all(isinstance(row[i], int | float | Decimal | None) for row in rows)
        table.add_column(Text(cell(name)), justify="right" if numeric else "left", no_wrap=not wrap)
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    console = Console(width=width or 1_000_000, file=io.StringIO(), color_system=None)
    with console.capture() as text:
        console.print(table)
    lines = (line.rstrip() for line in text.get().splitlines())
    return "".join(f"{line}\n" for line in lines if line)  # the borders above and below are blank


def print_records(records: Sequence[Mapping[str, Any]]) -> None:
    """Records with the same fields, as a table on stdout that wraps at the width of a terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    rows = [list(record.values()) for record in records]
    click.echo(format_table(list(records[0]), rows, width=width, wrap=True), nl=False)


def show(facts: Mapping[str, Any] | Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Facts, or records with the same fields, on stdout: one JSON document, or text for a reader."""
    if as_json:
        click.echo(to_json(facts, indent=True))
    elif isinstance(facts, Mapping):
        print_facts(facts)
    else:
        print_records(facts)


def write_facts(facts: Mapping[str, Any], target: str) -> None:
    """Facts as one JSON document in a file that appears only once it is whole."""
    write_text(to_json(facts, indent=True) + "\n", target)


def write_text(text: str, target: str) -> None:
    """A text in a file that appears only once it is whole."""
    folder, slash, name = target.rpartition("/")
    open_storage(folder + slash or ".").write(name, text.encode())


def print_facts(facts: Mapping[str, Any]) -> None:
    """Facts for a reader: a line each, then what holds several lines under its name, records as tables."""
    _print_aligned(
        {name: value for name, value in facts.items() if not (_is_nested(value) or _is_records(value))}
    )
    for name, value in facts.items():
        if _is_nested(value):
            click.echo(f"\n{_words(name)}")
            _print_aligned(value, indent="  ")
        elif _is_records(value):
            click.echo(f"\n{_words(name)}")
            print_records(value)


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(inner, Mapping) for inner in value.values())


def _print_aligned(facts: Mapping[str, Any], indent: str = "") -> None:
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        click.echo(f"{indent}{_words(name):<{width}}  {_one_line(value)}".rstrip())


def _words(name: str) -> str:
    return name.replace("_", " ")


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _one_line(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(name)} {_one_line(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, float) and not math.isfinite(value):
        return "none"
    return "none" if value is None or value == [] else cell(value)


def _rows(reader: "pa.RecordBatchReader") -> Iterator[tuple[Any, ...]]:
    for batch in reader:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def write_table(reader: "pa.RecordBatchReader", out: BinaryIO) -> None:
    """The first rows, aligned."""
    rows = _rows(reader)
    width = shutil.get_terminal_size().columns if out.isatty() else None
    out.write(format_table(reader.schema.names, itertools.islice(rows, TABLE_ROWS), width=width).encode())
    if next(rows, None) is not None:
        click.echo(f"note: only the first {TABLE_ROWS} rows are shown; --format csv gives all", err=True)


def write_csv(reader: "pa.RecordBatchReader", out: BinaryIO) -> None:
    """RFC 4180 with a header; a list or a record is JSON text, null is empty."""
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(reader.schema.names)
    for row in _rows(reader):
        writer.writerow([to_json(v) if isinstance(v, list | dict) else _csv_value(v) for v in row])
    text.detach()


def _csv_value(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else plain(value)


def write_json(reader: "pa.RecordBatchReader", out: BinaryIO) -> None:
    """One array with a record a line, so that a JSON parser and a line tool both read it."""
    names = reader.schema.names
    before = "["
    for row in _rows(reader):
        out.write(f"{before}{to_json(dict(zip(names, row, strict=True)))}".encode())
        before = ",\n "
    out.write(b"]\n" if before != "[" else b"[]\n")


def write_parquet(reader: "pa.RecordBatchReader", out: BinaryIO) -> None:
    """Parquet with the types of the result."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        writer = pq.ParquetWriter(out, reader.schema, compression="zstd")
    except pa.ArrowNotImplementedError as error:
        columns = ", ".join(f"{field.name} {field.type}" for field in reader.schema)
        raise ConfigError(
            f"Parquet has no type for a column of the result ({columns})", "cast it to text: column::VARCHAR"
        ) from error
    with writer:
        for batch in reader:
            writer.write_batch(batch)


WRITERS: dict[str, Callable[["pa.RecordBatchReader", BinaryIO], None]] = {
    "table": write_table,
    "csv": write_csv,
    "json": write_json,
    "parquet": write_parquet,
}
"""The forms of a result."""


def write_rows(reader: "pa.RecordBatchReader", form: str | None, target: str | None) -> None:
    """Rows to stdout, or to a file that appears only once it is whole.

    Without a form, the ending of the file chooses it (`rows.csv`), else it is a table.
    """
    if form is None:
        ending = target.rsplit(".", 1)[-1].lower() if target else ""
        form = ending if ending in WRITERS else "table"
    if target is None or target == "-":
        if form == "parquet" and sys.stdout.isatty():
            raise ConfigError("Parquet is binary and stdout is a terminal", "name a file with -o FILE")
        sys.stdout.flush()
        WRITERS[form](reader, sys.stdout.buffer)
        return
    folder, slash, name = target.rpartition("/")
    storage = open_storage(folder + slash or ".")
    staged = storage.staging_path(name)
    try:
        with open(staged, "wb") as out:
            WRITERS[form](reader, out)
        storage.publish(staged, name)
    except OSError as error:
        raise write_error(target, error) from error
    finally:
        discard(staged)
