"""Plain rows: JSON lines, JSON arrays, Parquet or CSV whose fields have the dataset's or well-known names."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa

from data_tools.collecting.columns import (
    CONVERSATION,
    MAPPED,
    MERGED,
    candidates,
    is_response,
    number_fields,
    pick,
)
from data_tools.collecting.prompts import is_chat, split_conversation
from data_tools.collecting.reasons import Refused
from data_tools.logs.log import Log
from data_tools.logs.packed import unpacked
from data_tools.logs.records import Block, blocks, flat
from data_tools.logs.tables import columns_of, listed, parquet_batches, row_digests
from data_tools.readers.base import BlockReader, Carries, Chunk

Columns = dict[str, Any]
"""Name -> values: an Arrow array or a list."""

_RESPONSES = ("response", "response_ids", "response_messages")
_DUPLICATES_MATTER = ("reward", "response", "response_ids", "behavior_logprobs", "loss_mask", "prompt")


class RowsReader(BlockReader):
    """One record is one response; fields are found by name (docs/collect.md has the table of names)."""

    name = "rows"
    title = "rows with the dataset's column names or well-known aliases (JSONL, JSON, Parquet, CSV)"
    carries = Carries(*["optional"] * 7)
    numbers = number_fields()

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first records name a prompt and a response, or that has no whole record."""
        if not samples:
            return log.kind in ("jsonl", "json")
        return any(isinstance(record, dict) and is_response(record) for record in samples)

    @property
    def by_block(self) -> bool:
        """True: what `chunks` adds is for tables."""
        return type(self).chunks is RowsReader.chunks

    def chunk(self, block: Block, log: Log) -> Chunk:
        """The columns of a block."""
        return record_chunk(flat(block))

    def chunks(self, log: Log) -> Iterator[Chunk]:
        """Read the log column by column."""
        if log.kind == "parquet":
            yield from table_chunks(parquet_batches(log), Layout())
        elif log.kind == "csv":
            yield from (record_chunk(block, textual=True) for block in blocks(log))
        else:
            yield from super().chunks(log)


def record_chunk(block: Block, *, textual: bool = False) -> Chunk:
    """Columns of a block of records, found by name; all other fields go to `extra`."""
    _drop_what_is_no_object(block)
    records = block.records
    shapes = list(map(tuple, records))
    kinds = set(shapes)
    found = candidates(key for shape in kinds for key in shape)
    used: list[set[str]] = [set() for _ in records] if any(len(names) > 1 for names in found.values()) else []
    alike = len(kinds) == 1  # then all columns are found in one go
    fields = dict(zip(shapes[0], zip(*map(dict.values, records), strict=True), strict=True)) if alike else {}
    columns: dict[str, Sequence[Any]] = {}
    for column, names in found.items():
        if len(names) == 1:
            columns[column] = fields.get(names[0]) or [record.get(names[0]) for record in records]
        else:
            columns[column] = _picked(records, names, column, used)
    single = {names[0] for names in found.values() if len(names) == 1}
    others = {shape: [key for key in shape if key not in single] for shape in kinds}
    columns["extra"] = [
        _rest(record, others[shape], used[row] if used else ()) if others[shape] else {}
        for row, (record, shape) in enumerate(zip(records, shapes, strict=True))
    ]
    _split_conversations(columns, found.get("prompt", []))
    _note_duplicate_keys(block, found)
    return Chunk(
        columns=columns,
        source_row=block.rows,
        content=block.contents,
        rejects=block.rejects,
        notes=block.notes,
        names={column: fields[0] for column, fields in found.items()},
        input_rows=block.input_rows,
        textual=textual,
    )


def _drop_what_is_no_object(block: Block) -> None:
    if all(type(record) is dict for record in block.records):
        return
    kept = [at for at, record in enumerate(block.records) if isinstance(record, dict)]
    lost = sorted(set(range(len(block.records))) - set(kept))
    refused = Refused("not_an_object", "an element that is no object")
    block.rejects += [refused.at(block.rows[at], str(block.records[at])) for at in lost]
    block.raws = [block.raws[at] for at in kept] if block.raws else []
    block.rows = [block.rows[at] for at in kept]
    block.contents = [block.contents[at] for at in kept]
    block.records = [block.records[at] for at in kept]


def _picked(records: list[Any], names: list[str], column: str, used: list[set[str]]) -> list[Any]:
    values = []
    for record, taken in zip(records, used, strict=True):
        name = pick(record, names, column)
        values.append(None if name is None else record[name])
        if name is not None:
            taken.add(name)
    return values


def _rest(record: dict[str, Any], others: list[str], used: Collection[str]) -> dict[str, Any]:
    return merged_extra({key: unpacked(record[key]) for key in others if key not in used})


def merged_extra(rest: dict[str, Any]) -> dict[str, Any]:
    """Other fields of a record; what the log itself calls `extra` is merged into them, not nested."""
    if MERGED not in rest:
        return rest
    own = rest.pop(MERGED)
    if isinstance(own, str) and own.startswith("{"):
        with suppress(orjson.JSONDecodeError):
            own = orjson.loads(own)
    if isinstance(own, dict):
        return {**own, **rest}
    return rest if own is None else {**rest, MERGED: own}


def _split_conversations(columns: dict[str, Any], prompt_names: list[str]) -> None:
    """Where a record is one conversation, its last turns are the response."""
    if not any(name in CONVERSATION for name in prompt_names):
        return
    given = [columns[name] for name in _RESPONSES if name in columns]
    prompts = list(columns["prompt"])
    responses = list(columns.get("response", [None] * len(prompts)))
    for row, prompt in enumerate(prompts):
        if is_chat(prompt) and all(values[row] is None for values in given):
            prompts[row], turns = split_conversation(prompt)
            responses[row] = turns or None
    columns["prompt"], columns["response"] = prompts, responses


def _note_duplicate_keys(block: Block, found: dict[str, list[str]]) -> None:
    """Parsers keep the last of two equal keys without a word; that must be told of a reward written twice."""
    marks = [f'"{name}"'.encode() for column in _DUPLICATES_MATTER for name in found.get(column, [])]
    for raw, record in zip(block.raws, block.records, strict=False):  # only lines have raws
        if not raw:
            continue
        # Two quotes for each field and each text: more of them mean nested values, escapes or a key again.
        texts = sum(type(value) is str for value in record.values())
        if raw.count(b'"') == 2 * (len(record) + texts):
            continue
        if any(raw.count(mark) > 1 for mark in marks) and _has_duplicate_key(raw):
            block.notes["duplicate_key"] += 1


def _has_duplicate_key(raw: bytes) -> bool:
    seen: list[bool] = []

    def collect(pairs: list[tuple[str, Any]]) -> None:
        seen.append(len({key for key, _ in pairs}) < len(pairs))

    json.loads(raw, object_pairs_hook=collect)
    return seen[-1]  # the outermost object closes last


@dataclass(frozen=True, slots=True)
class Layout:
    """What some columns of a table are: source rows (else counted from 1), JSON text, record hashes."""

    row: str | None = None
    json: Collection[str] = ()
    content: str | None = None


def table_chunks(batches: Iterable[pa.RecordBatch], layout: Layout) -> Iterator[Chunk]:
    """Columns of Arrow batches, found by name, as chunks."""
    first = 1
    for batch in batches:
        columns: Columns = dict(columns_of(batch))
        for name in layout.json:
            columns[name] = [
                None if text is None else orjson.loads(text) for text in columns[name].to_pylist()
            ]
        count = batch.num_rows
        rows: Sequence[int | None] = range(first, first + count)
        if layout.row is not None:
            rows = columns.pop(layout.row).to_pylist() if layout.row in columns else [None] * count
        given = None if layout.content is None else columns.pop(layout.content, None)
        chunk = table_chunk(columns, rows)
        if given is not None:
            chunk.content = [bytes.fromhex(text) for text in given.to_pylist()]
        chunk.input_rows = count if layout.row is None else 0
        first += count
        yield chunk


def table_chunk(fields: Columns, rows: Sequence[int | None]) -> Chunk:
    """Columns of one batch; its unused ones go to `extra`, where a missing value is left out."""
    found = candidates(fields)
    columns: Columns = {}
    used: list[set[str]] = [set() for _ in rows]
    for column, names in found.items():
        if len(names) == 1 or column == "reward":
            columns[column] = fields[names[0]]
        else:
            records = _records({name: fields[name] for name in names}, len(rows))
            columns[column] = _picked(records, names, column, used)
    single = {names[0] for column, names in found.items() if len(names) == 1 or column == "reward"}
    others = _records({name: values for name, values in fields.items() if name not in single}, len(rows))
    columns["extra"] = [
        merged_extra({key: value for key, value in other.items() if value is not None and key not in taken})
        for other, taken in zip(others, used, strict=True)
    ]
    if any(name in CONVERSATION for name in found.get("prompt", [])):
        columns |= {name: _listed(columns[name]) for name in ("prompt", *_RESPONSES) if name in columns}
        _split_conversations(columns, found["prompt"])
    origin = {column: names[0].removeprefix(MAPPED) for column, names in found.items()}
    logged = {name: values for name, values in fields.items() if not name.startswith(MAPPED)}
    return Chunk(columns, rows, row_digests(logged), names=origin)


def _listed(values: Sequence[Any] | pa.Array) -> Sequence[Any]:
    return listed(values) if isinstance(values, pa.Array) else values


def _records(fields: Columns, count: int) -> list[dict[str, Any]]:
    if not fields:
        return [{}] * count
    return [dict(zip(fields, row, strict=True)) for row in zip(*map(_listed, fields.values()), strict=True)]
