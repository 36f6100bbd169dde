"""Trinity-RFT: its SQLite buffer (a table of experiences and one of their bytes), and its JSON lines.

The bytes of an experience are "TRXP", a version, two lengths, a pickle of plain values (plain_pickle.py) and
a safetensors part. Older versions pickled the whole object: such bytes are refused. JSON lines hold neither
ids nor log-probs. Experiences of one task of a batch are a group; its runs are trajectories of several steps.
"""

import sqlite3
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import safetensors

from data_tools.collecting.ids import choice_digest, digest
from data_tools.collecting.prompts import is_chat, split_conversation
from data_tools.collecting.reasons import Refused
from data_tools.errors import DataError
from data_tools.logs.databases import database, quoted, records, tables
from data_tools.logs.jsontext import canonical
from data_tools.logs.plain_pickle import plain
from data_tools.readers.base import Carries, Chunk, ChunkBuilder, Log, RecordReader, Values
from data_tools.readers.sequences import compact, partial_mask, produced

Object = dict[str, Any]

BYTES = "experience_bytes"
BLOB = "_blob"
MAGIC = b"TRXP"
CHUNK_ROWS = 256

_HEADER = struct.Struct("<4sBQQ")
_TYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1", "I8": "i1", "BOOL": "?"}
_TYPES |= {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_NAMED = {"eid", "reward", "messages", "tools", "prompt_text", "response_text", "chosen_messages"}
_NAMED |= {"rejected_messages", "multi_modal_input_keys"}
_STREAMS = ("token_level_reward", "advantages", "returns", "teacher_logprobs")


class TrinityReader(RecordReader):
    """One record is one experience: a response, a step of a run, or a pair of preferred and rejected ones."""

    name = "trinity"
    title = "Trinity-RFT experiences: SQLite buffer, JSON lines"
    carries = Carries(
        prompt="yes",
        group="batch and task",
        reward="yes",
        ids="SQLite only",
        logprobs="SQLite only",
        version="model version",
        time="SQLite only",
    )

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a database with a table of experience bytes, or records with an experience id."""
        if log.kind == "sqlite":
            with suppress(DataError), database(log) as con:
                return bool(_buffers(tables(con)))
            return False
        return any(map(_is_experience, samples))

    def fingerprint(self, log: Log) -> bytes:
        """Hash of the first experience."""
        if log.kind != "sqlite":
            return super().fingerprint(log)
        first = next((content for chunk in self._database(log, 1) for content in chunk.content), b"")
        return digest("log", first)

    def chunks(self, log: Log) -> Iterator[Chunk]:
        """Read the buffers of a database, or record by record."""
        yield from self._database(log, CHUNK_ROWS) if log.kind == "sqlite" else super().chunks(log)

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the responses of a record of JSON lines."""
        if not _is_experience(record):
            raise Refused("bad_record", "no experience: it has no eid")
        yield from _responses(record, {})

    def _database(self, log: Log, rows: int) -> Iterator[Chunk]:
        made = ChunkBuilder()
        for row, record in _numbered(log):
            made.input_rows += 1
            if isinstance(record, Refused):
                made.refuse(row, record)
            else:
                self._add(made, row, record)
            if made.input_rows >= rows:
                yield made.chunk()
                made = ChunkBuilder()
        yield made.chunk()

    def _add(self, made: ChunkBuilder, row: int, record: Object) -> None:
        content = _content(record)
        raw = record.pop(BYTES)
        try:
            experiences = list(_unpacked(raw))
        except Refused as refused:
            made.refuse(row, refused, record)
            return
        choice = 0
        for item, tensors in experiences:
            for values in self._stored_responses(item, tensors, record):
                made.add(row, choice_digest(content, choice), values, record)
                choice += 1

    def _stored_responses(self, item: Any, tensors: Object, columns: Object) -> Iterator[Values | Refused]:
        try:
            for values in _responses(item, tensors):
                yield _with_columns(values, columns)
        except Refused as refused:
            yield refused
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            yield Refused("bad_record", f"not a {self.name} record ({type(error).__name__}: {error})")


def _is_experience(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("eid"), dict):
        return False
    return {"batch", "task", "run"} <= record["eid"].keys() and bool(
        {"type", "prompt_length"} & record.keys()
    )


def _buffers(found: Mapping[str, Sequence[str]]) -> list[tuple[str, str | None]]:
    """Tables of experiences, each with the table of their bytes; None where it is the same table."""
    made: list[tuple[str, str | None]] = []
    for name, columns in found.items():
        if BYTES not in columns or "id" not in columns:
            continue
        base = name.removesuffix(BLOB)
        paired = base != name and "id" in found.get(base, ()) and BYTES not in found[base]
        made.append((base, name) if paired else (name, None))
    return made


def _numbered(log: Log) -> Iterator[tuple[int, Object | Refused]]:
    """Rows of every buffer by their id, and a refusal at the point where the database is damaged."""
    row = 0
    with database(log) as con:
        try:
            for record in _stored(con):
                row = record["id"] if type(record["id"]) is int else row + 1
                yield row, record
        except sqlite3.Error as error:
            yield row + 1, Refused("damaged_database", str(error))


def _stored(con: sqlite3.Connection) -> Iterator[Object]:
    """Rows of every buffer; those whose other half is missing too, without its values."""
    for table, blobs in _buffers(tables(con)):
        if blobs is None:
            yield from records(con, f"SELECT * FROM {quoted(table)} ORDER BY id")
            continue
        yield from records(
            con,
            f"""SELECT t.*, b.{BYTES} FROM {quoted(table)} t LEFT JOIN {quoted(blobs)} b ON t.id = b.id
            ORDER BY t.id""",
        )
        yield from records(
            con,
            f"""SELECT id, {BYTES} FROM {quoted(blobs)}
            WHERE id NOT IN (SELECT id FROM {quoted(table)} WHERE id IS NOT NULL) ORDER BY id""",
        )


def _content(record: Object) -> bytes:
    """Hash of a stored experience without its place in the buffer, and how often it was trained on."""
    raw = record[BYTES]
    rest = {name: value for name, value in record.items() if name not in (BYTES, "id", "consumed")}
    return digest("experience", raw if isinstance(raw, bytes) else repr(raw), canonical(rest))


def _unpacked(raw: Any) -> Iterator[tuple[Any, Object]]:
    """The experiences in stored bytes, each with its tensors as lists."""
    if not isinstance(raw, bytes):
        raise Refused("no_response", "a row without its experience bytes")
    if not raw.startswith(MAGIC):
        raise Refused("pickle_refused", "bytes of an older version: a pickle of the whole object")
    if len(raw) < _HEADER.size:
        raise Refused("bad_record", "the experience bytes break off")
    _, version, meta_size, tensor_size = _HEADER.unpack_from(raw)
    if version != 1 or len(raw) != _HEADER.size + meta_size + tensor_size:
        raise Refused(
            "bad_record", f"experience bytes of version {version}, or of another length than they say"
        )
    meta = plain(raw[_HEADER.size : _HEADER.size + meta_size])
    if not isinstance(meta, dict) or not isinstance(meta.get("items"), list):
        raise Refused("bad_record", "the experience bytes list no items")
    tensors = _tensors(raw[_HEADER.size + meta_size :])
    for at, item in enumerate(meta["items"]):
        yield item, tensors.get(str(at), {})


def _tensors(raw: bytes) -> dict[str, Object]:
    """Lists of numbers by item and name; tensors of more than one dimension are not kept."""
    made: dict[str, Object] = {}
    try:
        parts = safetensors.deserialize(raw)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise Refused("bad_record", f"the tensors cannot be read: {error}") from None
    for key, part in parts:
        item, _, name = key.partition(":")
        if part["dtype"] in _TYPES and len(part["shape"]) == 1:
            values = np.frombuffer(part["data"], _TYPES[part["dtype"]]).tolist()
            made.setdefault(item, {})[name] = values
    return made


def _responses(item: Any, tensors: Object) -> Iterator[Values]:
    """The response of an experience, or the two of a preference."""
    shared = _shared(item)
    if "chosen" in tensors or item.get("chosen_messages") is not None:
        for side in ("chosen", "rejected"):
            yield shared | _preferred(item, tensors, side, shared)
        return
    tokens, length, mask = tensors.get("tokens"), item.get("prompt_length"), tensors.get("action_mask")
    row: Object = {}
    if tokens is not None:
        if type(length) is not int or not 0 <= length <= len(tokens):
            raise Refused("bad_record", f"a prompt length of {length} for {len(tokens)} tokens")
        row = {"prompt_ids": tokens[:length], "response_ids": tokens[length:]}
        row["behavior_logprobs"] = tensors.get("logprobs")
    if mask is not None:
        row["behavior_logprobs"] = produced(row.get("behavior_logprobs"), mask)
        row["loss_mask"] = partial_mask(mask)
    streams = compact({name: tensors.get(name) for name in _STREAMS})
    several_turns = mask is not None and not all(mask)
    yield shared | row | _texts(item, several_turns) | {"extra": shared["extra"] | streams}


def _shared(item: Any) -> Object:
    """Columns that do not depend on what an experience holds."""
    if not isinstance(item, dict):
        raise Refused("bad_record", "an experience that is no object")
    eid, info = item.get("eid") or {}, item.get("info") or {}
    parts = [eid.get(name) for name in ("batch", "task", "run", "step", "suffix")]
    known = [part is not None for part in parts]
    status = item.get("truncate_status")
    rest = {name: value for name, value in item.items() if name not in _NAMED and value not in (None, [], {})}
    return {
        "response_id": "/".join(map(str, parts)) if all(known) else None,
        "group_id": "/".join(map(str, parts[:2])) if all(known[:2]) else None,
        "trajectory_id": "/".join(map(str, parts[:3])) if all(known[:3]) else None,
        "turn": parts[3],
        "reward": item.get("reward"),
        "policy_version": info.get("model_version"),
        "tools": item.get("tools"),
        "truncated": True if status == "response_truncated" else None,
        "flags": ["multimodal"] if item.get("multi_modal_input_keys") else [],
        "extra": ({"eid": eid} if eid else {}) | rest,
    }


def _texts(item: Object, several_turns: bool) -> Object:
    """Prompt and response out of the conversation, else out of the texts beside it.

    Where the mask has gaps, the response holds several turns: it begins with the first one.
    """
    messages: Any = item.get("messages")
    if not is_chat(messages):
        return {"prompt": item.get("prompt_text"), "response": item.get("response_text")}
    prompt, turns = split_conversation(messages)
    if several_turns:
        roles = [message.get("role") for message in messages]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        prompt, turns = messages[:first], messages[first:]
    if not turns:
        return {"prompt": messages, "response": item.get("response_text")}
    return {"prompt": prompt or item.get("prompt_text"), "response": turns}


def _preferred(item: Object, tensors: Object, side: str, shared: Object) -> Object:
    """One side of a preference: which of two is better is no reward."""
    messages: Any = item.get(f"{side}_messages")
    prompt, turns = split_conversation(messages) if is_chat(messages) else ([], [])
    given = shared["response_id"]
    return {
        "response_id": None if given is None else f"{given}/{side}",
        "trajectory_id": None,
        "turn": None,
        "prompt": prompt or item.get("prompt_text"),
        "response": turns or None,
        "prompt_ids": tensors.get("tokens"),
        "response_ids": tensors.get(side),
        "extra": shared["extra"] | {"preference": side},
    }


def _with_columns(values: Values, columns: Object) -> Values:
    """A stored response with what its table says beside; its reward and version are the later ones."""
    left = {name: value for name, value in columns.items() if value is not None and name != "id"}
    row = dict(values)
    for column, name in (
        ("reward", "reward"),
        ("policy_version", "model_version"),
        ("sampled_at", "timestamp"),
    ):
        row[column] = left.pop(name) if name in left else row.get(column)
    if row["group_id"] is None:
        row["group_id"] = left.pop("task_id", None)
    return row | {"extra": left | row["extra"]}
