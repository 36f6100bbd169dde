"""Plain rows: JSON lines, JSON arrays, Parquet or CSV whose fields have the dataset's or well-known names."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import orjson
import pyarrow as pa

from data_tools.columns import CONVERSATION, MERGED, candidates, is_response, pick
from data_tools.logs import Log
from data_tools.prompts import is_chat, split_conversation
from data_tools.readers.base import Carries, Chunk, Reader
from data_tools.reasons import Refused
from data_tools.records import Block, blocks, flat
from data_tools.tables import parquet_batches, row_digests

_RESPONSES = ("response", "response_ids", "response_messages")
_DUPLICATES_MATTER = ("reward", "response", "response_ids", "behavior_logprobs", "loss_mask", "prompt")


class RowsReader(Reader):
    """One record is one response; fields are found by name (docs/collect.md has the table of names)."""

    name = "rows"
    title = "rows with the dataset's column names or well-known aliases (JSONL, JSON, Parquet, CSV)"
    carries = Carries(*["optional"] * 7)

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first records name a prompt and a response, or that has no whole record."""
        if not samples:
            return log.kind in ("jsonl", "json")
        return any(isinstance(record, dict) and is_response(record) for record in samples)

    def chunks(self, log: Log) -> Iterator[Chunk]:
        """Read the log column by column."""
        if log.kind == "parquet":
            yield from table_chunks(parquet_batches(log))
            return
        for block in blocks(log):
            yield record_chunk(flat(block), textual=log.kind == "csv")


def record_chunk(block: Block, *, textual: bool = False) -> Chunk:
    """Columns of a block of records, found by name; all other fields go to `extra`."""
    _drop_what_is_no_object(block)
    records = block.records
    found = candidates(dict.fromkeys(key for record in records for key in record))
    used: list[set[str]] = [set() for _ in records] if any(len(names) > 1 for names in found.values()) else []
    columns: dict[str, Sequence[Any]] = {}
    for column, names in found.items():
        if len(names) == 1:
            columns[column] = [record.get(names[0]) for record in records]
        else:
            columns[column] = _picked(records, names, column, used)
    single = {names[0] for names in found.values() if len(names) == 1}
    columns["extra"] = [
        _rest(record, single | used[row] if used else single) for row, record in enumerate(records)
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


def _rest(record: dict[str, Any], used: set[str]) -> dict[str, Any]:
    return merged_extra({key: value for key, value in record.items() if key not in used})


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
    for raw in block.raws:
        if any(raw.count(mark) > 1 for mark in marks) and _has_duplicate_key(raw):
            block.notes["duplicate_key"] += 1


def _has_duplicate_key(raw: bytes) -> bool:
    seen: list[bool] = []

    def collect(pairs: list[tuple[str, Any]]) -> None:
        seen.append(len({key for key, _ in pairs}) < len(pairs))

    json.loads(raw, object_pairs_hook=collect)
    return seen[-1]  # the outermost object closes last


def table_chunks(batches: Iterable[pa.RecordBatch], row_column: str | None = None) -> Iterator[Chunk]:
    """Columns of Arrow batches, found by name. `row_column` holds source rows; else they count from 1."""
    row = 1
    for batch in batches:
        rows: Sequence[int] = range(row, row + batch.num_rows)
        row += batch.num_rows
        if row_column in batch.schema.names:
            rows = batch.column(row_column).to_pylist()
            batch = batch.drop_columns([row_column])
        yield table_chunk(batch, rows)


def table_chunk(batch: pa.RecordBatch, rows: Sequence[int]) -> Chunk:
    """Columns of one Arrow batch; its unused columns go to `extra`, where a missing value is left out."""
    found = candidates(batch.schema.names)
    columns: dict[str, Sequence[Any] | pa.Array] = {}
    used: list[set[str]] = [set() for _ in rows]
    for column, names in found.items():
        if len(names) == 1 or column == "reward":
            columns[column] = batch.column(names[0])
        else:
            columns[column] = _picked(batch.select(names).to_pylist(), names, column, used)
    single = {names[0] for column, names in found.items() if len(names) == 1 or column == "reward"}
    others = batch.select([name for name in batch.schema.names if name not in single])
    columns["extra"] = [
        merged_extra({key: value for key, value in record.items() if value is not None and key not in taken})
        for record, taken in zip(_records(others, len(rows)), used, strict=True)
    ]
    if any(name in CONVERSATION for name in found.get("prompt", [])):
        columns |= {name: _listed(columns[name]) for name in ("prompt", *_RESPONSES) if name in columns}
        _split_conversations(columns, found["prompt"])
    origin = {column: fields[0] for column, fields in found.items()}
    return Chunk(columns, rows, row_digests(batch), names=origin, input_rows=len(rows))


def _listed(values: Sequence[Any] | pa.Array) -> Sequence[Any]:
    return values.to_pylist() if isinstance(values, pa.Array) else values


def _records(batch: pa.RecordBatch, count: int) -> list[dict[str, Any]]:
    return batch.to_pylist() if batch.num_columns else [{}] * count
