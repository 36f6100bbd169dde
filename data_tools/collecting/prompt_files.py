"""Files of prompts: rows without responses, whose other fields are kept under their own names."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from data_tools.collecting.coerce import coerce
from data_tools.collecting.columns import CONVERSATION, candidates, names_of, pick
from data_tools.collecting.prompts import is_chat, split_conversation
from data_tools.errors import DataError
from data_tools.logs.log import Log
from data_tools.logs.records import Block, blocks, flat
from data_tools.logs.sources import expand

_KINDS = ("jsonl", "json", "csv", "parquet")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt as a dataset has it: text, or the JSON of chat messages; `tools` is JSON of definitions."""

    prompt: str
    tools: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)


def read_prompts(source: str) -> list[PromptRow]:
    """The prompts of a JSONL, JSON, CSV or Parquet file (a path, a URL, `-`), equal rows once.

    The prompt goes by the names that a log may give it (`prompt`, `question`, `messages`, ...); of a
    conversation that ends with a response the prompt is what comes before. Raises DataError that names the
    first row that cannot be read or has no prompt.
    """
    with ExitStack() as stack:
        rows = (row for one in expand([source], stack) for row in _rows(one.log))
        found = {repr(row): row for row in rows}
    if not found:
        raise DataError(f"{source} holds no prompts")
    return list(found.values())


def _rows(log: Log) -> Iterator[PromptRow]:
    if log.kind not in _KINDS:
        raise DataError(
            f"{log.name} is {log.kind}, not rows with prompts", "give JSONL, JSON, CSV or Parquet"
        )
    for block in map(flat, blocks(log)):
        _check(log.name, block)
        for number, record in zip(block.rows, block.records, strict=True):
            yield _row(f"{log.name}:{number}", record, textual=log.kind == "csv")


def _check(name: str, block: Block) -> None:
    if block.rejects:
        first = block.rejects[0]
        raise DataError(f"{name}:{first.row}: {first.reason} {first.detail}".rstrip(), "mend or remove it")


def _row(where: str, record: Any, *, textual: bool) -> PromptRow:
    if not isinstance(record, dict):
        raise DataError(f"{where} is a {type(record).__name__}, not an object with fields")
    names = candidates(record)
    name = pick(record, names.get("prompt", []), "prompt")
    if name is None or record[name] in (None, "", []):
        known = ", ".join(names_of("prompt")[1:])
        raise DataError(f"{where} has no prompt", f"it may be called: {known}")
    value = record[name]
    if name in CONVERSATION and is_chat(value):
        value = split_conversation(value)[0] or value
    tools = pick(record, names.get("tools", []), "tools")
    return PromptRow(
        prompt=_read(where, "prompt", value, textual=textual),
        tools=None if tools is None or not record[tools] else _read(where, "json", record[tools]),
        fields={key: kept for key, kept in record.items() if key not in (name, tools)},
    )


def _read(where: str, kind: Any, value: Any, *, textual: bool = False) -> str:
    read = coerce(kind, [value], textual=textual)
    if read.values[0] is None:
        raise DataError(f"{where}: the prompt or its tools cannot be read: {str(value)[:60]!r}")
    return str(read.values[0])
