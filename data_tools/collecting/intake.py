"""Safe intake: what must not be stored is replaced, hashed or refused before anything is written.

Works on typed columns, before the rules and the ids: so hashes of prompts and groups, rewards, and the rules
about ids and log-probs see nothing but what will be stored.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, TypeVar

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.collecting.columns import LOOSE
from data_tools.collecting.fastpath import ARROW, Typed
from data_tools.collecting.ids import digest
from data_tools.collecting.prompts import parse_prompt
from data_tools.collecting.ragged import Bools
from data_tools.collecting.reasons import RAW_CHARS, Refused, Reject
from data_tools.collecting.redaction import Redactor, redactor
from data_tools.errors import ConfigError
from data_tools.logs.jsontext import canonical, dump
from data_tools.readers.base import Chunk

_T = TypeVar("_T")

HASHABLE = ("policy", "trajectory_id", "group_id", "run")
"""Columns that may be hashed; every other name means a field of `extra`."""

_OF_TEXT = ("prompt_ids", "response_ids", "behavior_logprobs", "logprob_tokens")
"""What belongs to the texts as they were logged, and to no other."""

_SOME_FIELDS = 1024

_CUT = 64
"""Characters at the end of a reject's cut text that may begin something too short to be recognised."""


@dataclass(slots=True)
class Intake:
    """What the user wants kept out; `salt` is the dataset's secret."""

    redactor: Redactor | None = None
    hash_columns: Sequence[str] = ()
    max_response_chars: int | None = None
    salt: str = ""
    hashed: set[str] = field(default_factory=set)
    """Names of `hash_columns` that were found in some row."""

    fields: set[str] = field(default_factory=set)
    """Some names of fields that rows had, for the error about one that none has."""

    rows: int = 0

    def clean(self, loose: Typed, chunk: Chunk) -> None:
        """Refuse, hash and redact the rows of a chunk, in place."""
        self.rows += loose.rows
        if self.max_response_chars is not None:
            _refuse_long(loose, self.max_response_chars)
        for name in self.hash_columns:
            self._hash(loose, chunk, name)
        if self.redactor is not None:
            _redact(loose, self.redactor)

    def reject(self, reject: Reject, *, counted: bool = False) -> Reject:
        """Return a reject with what may be kept of its text: none where columns are hashed.

        `counted`: the row went through `clean` already, so what is replaced here is not counted again.
        """
        if self.hash_columns:
            return replace(reject, raw="", detail="")
        if self.redactor is None:
            return reject
        before = self.redactor.counts.copy()
        raw = self.redactor.text(_unescaped(reject.raw))
        if len(reject.raw) >= RAW_CHARS:
            raw = raw[:-_CUT]
        detail = self.redactor.text(reject.detail)
        if counted:
            self.redactor.counts = before
        return replace(reject, raw=raw, detail=detail)

    def take_counts(self) -> Counter[str]:
        """Return what was replaced since the last call, by kind."""
        if self.redactor is None:
            return Counter()
        taken, self.redactor.counts = self.redactor.counts, Counter()
        return taken

    def check_names(self) -> None:
        """Raise ConfigError for a name that no row had: a misspelt one would have been stored as it is."""
        for name in self.hash_columns:
            if self.rows and name not in self.hashed:
                near = get_close_matches(name, [*self.fields, *HASHABLE], 1)
                hint = f"did you mean {near[0]}?" if near else "leave it out, or name a field of `extra`"
                raise ConfigError(f"--hash-columns: no record has a field {name!r}", hint)

    def _hash(self, loose: Typed, chunk: Chunk, name: str) -> None:
        for column in HASHABLE:
            array = loose.columns.get(column)
            if array is not None and name in (column, chunk.names.get(column)):
                self.hashed.add(name)
                loose.columns[column] = pa.array(list(map(self._hash_of, array.to_pylist())), pa.string())
        for row, rest in enumerate(loose.extra):
            if len(self.fields) < _SOME_FIELDS:
                self.fields.update(rest)
            path = [name] if name in rest else name.split(".")
            loose.extra[row] = self._hashed_at(rest, path, name)

    def _hashed_at(self, value: Any, path: Sequence[str], name: str) -> Any:
        """A copy with the field at `path` hashed; other rows may share parts of the value."""
        if not path:
            self.hashed.add(name)
            return self._hash_of(value)
        if isinstance(value, list):
            return [self._hashed_at(item, path, name) for item in value]
        if not isinstance(value, dict) or path[0] not in value:
            return value
        return {**value, path[0]: self._hashed_at(value[path[0]], path[1:], name)}

    def _hash_of(self, value: Any) -> str | None:
        """A hash of the value as text: 7, 7.0 and "7" are one user."""
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return digest("hashed", self.salt, value if isinstance(value, str) else canonical(value)).hex()


def intake(redact: bool, hash_columns: Sequence[str], max_response_chars: int | None) -> Intake | None:
    """Return what was asked for, None where nothing was; raises ConfigError for what makes no sense."""
    for name in hash_columns:
        if name in LOOSE and name not in HASHABLE:
            raise ConfigError(
                f"--hash-columns: the column {name!r} cannot be hashed",
                f"columns that can: {', '.join(HASHABLE)}; other names are fields of `extra`",
            )
    if max_response_chars is not None and max_response_chars < 1:
        raise ConfigError("--max-response-chars must be at least 1", "leave it out to keep every length")
    if not (redact or hash_columns or max_response_chars):
        return None
    return Intake(redactor() if redact else None, tuple(hash_columns), max_response_chars)


def _refuse_long(loose: Typed, limit: int) -> None:
    """Refuse responses over the limit. None is cut: a cut text is nothing that a policy has sampled."""
    for column in ("response", "response_messages"):
        array = loose.columns.get(column)
        if array is None:
            continue
        lengths = pc.fill_null(pc.utf8_length(array), 0).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(lengths > limit).tolist():
            loose.refused.setdefault(row, Refused("too_long", f"{lengths[row]} characters of {column}"))


def _redact(loose: Typed, found: Redactor) -> None:
    _refuse_textless(loose)
    changed = np.zeros(loose.rows, bool)
    for column, read in _TEXTS.items():
        if column in loose.columns:
            changed |= _redact_column(loose, column, found, read)
    for column in _OF_TEXT:
        array = loose.columns.get(column)
        if array is not None and changed.any():
            loose.columns[column] = pc.if_else(pa.array(changed), pa.scalar(None, array.type), array)
    for row, rest in enumerate(loose.extra):
        clean = _or_refuse(loose, row, Redactor.value, found, rest)
        if clean != rest:
            loose.extra[row] = clean or {}
            changed[row] = True
    _flag(loose, changed)


def _refuse_textless(loose: Typed) -> None:
    """Ids without their text cannot be looked through, and spell out whatever the text held."""
    for ids, texts in (("prompt_ids", ("prompt",)), ("response_ids", ("response", "response_messages"))):
        if ids not in loose.columns:
            continue
        lengths = pc.fill_null(pc.list_value_length(loose.columns[ids]), 0).to_numpy(zero_copy_only=False)
        bare = lengths > 1
        for text in texts:
            array = loose.columns.get(text, pa.nulls(loose.rows, pa.string()))
            bare &= ~np.asarray(
                pc.fill_null(pc.not_equal(array, ""), False).to_numpy(zero_copy_only=False), bool
            )
        for row in np.flatnonzero(bare).tolist():
            loose.refused.setdefault(row, Refused("not_redactable", f"{ids} without text"))


def _redact_column(loose: Typed, column: str, found: Redactor, read: "_Read") -> Bools:
    """Redact a column of text; tell which rows changed. A text that stands in many rows is read once."""
    before = loose.columns[column].to_pylist()
    known: dict[str | None, tuple[str | None, Counter[str]]] = {None: (None, Counter())}
    after: list[str | None] = []
    for row, text in enumerate(before):
        if text in known:
            found.counts.update(known[text][1])
        else:
            counted = found.counts.copy()
            known[text] = _or_refuse(loose, row, read, found, text), found.counts - counted
        after.append(known[text][0])
    loose.columns[column] = pa.array(after, pa.string())
    return np.array([old != new for old, new in zip(before, after, strict=True)], bool)


def _or_refuse(
    loose: Typed, row: int, read: Callable[[Redactor, Any], _T], found: Redactor, value: Any
) -> _T | None:
    """The value redacted; None, and the row refused, where it is nested too deeply to be looked through."""
    try:
        return read(found, value)
    except Refused as refused:
        loose.refused.setdefault(row, refused)
    except RecursionError:
        loose.refused.setdefault(row, Refused("too_deep", "nested too deeply"))
    return None


def _clean_prompt(found: Redactor, text: str) -> str:
    parsed = parse_prompt(text)
    return found.text(text) if isinstance(parsed, str) else _clean_value(found, parsed, text)


def _clean_json(found: Redactor, text: str) -> str:
    return _clean_value(found, orjson.loads(text), text)


def _clean_value(found: Redactor, value: Any, text: str) -> str:
    """JSON text redacted; exactly as logged where nothing had to be."""
    clean = found.value(value)
    return text if clean == value else dump(clean)


_Read = Callable[[Redactor, str], str]

_TEXTS: dict[str, _Read] = {
    "prompt": _clean_prompt,
    "tools": _clean_json,
    "response": Redactor.text,
    "response_messages": _clean_json,
}


def _flag(loose: Typed, changed: Bools) -> None:
    if changed.any():
        logged = loose.columns.get("flags", pa.nulls(loose.rows, ARROW["texts"])).to_pylist()
        flags = [[*(own or ()), "redacted"] if new else own for own, new in zip(logged, changed, strict=True)]
        loose.columns["flags"] = pa.array(flags, ARROW["texts"])


def _unescaped(raw: str) -> str:
    """The text of a record, or a piece of one, without the escapes of JSON that would hide what it says."""
    spaced = re.sub(r"\\[nrtbf]", " ", raw)
    return re.sub(r"\\u(?!d[89a-f])([0-9a-f]{4})", lambda code: chr(int(code[1], 16)), spaced, flags=re.I)
