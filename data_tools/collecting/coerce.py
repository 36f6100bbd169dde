"""One value at a time: what a log wrote, as the type its column has; or why that cannot be said.

This is the tolerant way. Columns whose values all have the right type never come here (fastpath.py).
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import orjson

from data_tools.collecting.columns import ColumnKind
from data_tools.collecting.prompts import is_chat
from data_tools.collecting.reasons import Notes, Refused
from data_tools.logs.jsontext import canonical, dump

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
DECIMAL_COMMA = re.compile(r"[+-]?\d+(,\d+)+")
INTEGER = re.compile(r"[+-]?\d+(\.0*)?")

NO_ID = -1
"""Stands for an item of an id list that is no integer: out of range, so the rules find it."""
NO_MASK = 2
"""The same for an item of a mask."""

_EARLIEST, _LATEST = 1e8, 1e11  # seconds: 1973 to the year 5138; beyond that the unit is finer
_UNITS = (1.0, 1e3, 1e6, 1e9)


class Unreadable(Exception):
    """A value that does not fit its column; `note` is the code it is counted under."""

    def __init__(self, note: str = "value_unreadable") -> None:
        super().__init__(note)
        self.note = note


@dataclass(slots=True)
class Coerced:
    """A column after coercion. `lost` holds what became None, by row; `refused` rows that cannot be used."""

    values: list[Any] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    lost: dict[int, Any] = field(default_factory=dict)
    refused: dict[int, Refused] = field(default_factory=dict)


def coerce(kind: ColumnKind, values: Sequence[Any], *, textual: bool = False) -> Coerced:
    """Read the values of a column one by one; `textual` says that text is no oddity here (CSV)."""
    read, made = _READ[kind], Coerced()
    for row, value in enumerate(values):
        told: list[str] = []
        try:
            made.values.append(None if value is None else read(value, told))
        except Unreadable as error:
            made.values.append(None)
            made.lost[row] = value
            told = [error.note]
        except Refused as refused:
            made.values.append(None)
            made.refused[row] = refused
        for note in set(told):
            if not (textual and note.endswith("_from_text")):
                shown = f"the first is {value!r:.60}" if note == "reward_unreadable" else ""
                made.notes.add(note, [row], detail=shown)
    return made


def read_number(value: Any) -> float:
    """Read a number or its text; a boolean is none. Infinite and NaN stay as they are."""
    if isinstance(value, str):
        text = value.strip()
        if NUMBER.fullmatch(text):
            return float(text)
        return _named_number(text)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise Unreadable
    try:
        return float(value)
    except OverflowError:
        raise Unreadable from None


def _named_number(text: str) -> float:
    sign = -1.0 if text.startswith("-") else 1.0
    name = text.lstrip("+-").lower()
    if name in ("inf", "infinity"):
        return sign * math.inf
    if name == "nan":
        return math.nan
    raise Unreadable


def read_reward(value: Any, told: list[str]) -> float:
    """Read a reward: a number, its text, or a boolean as 1 or 0.

    Lists and mappings need a choice that only the user can make (which one, or their sum), so they are
    unreadable; a text that could mean several numbers refuses the row.
    """
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in ("true", "false"):
            told.append("reward_from_text")
            return float(text.lower() == "true")
        if DECIMAL_COMMA.fullmatch(text):
            raise Refused("bad_reward", f"the reward {text!r} could be a decimal or a list")
    try:
        number = read_number(value)
    except Unreadable:
        raise Unreadable("reward_unreadable") from None
    if not math.isfinite(number):
        raise Unreadable("reward_unreadable")
    if isinstance(value, str):
        told.append("reward_from_text")
    return number


def _read_integer(bits: int) -> Callable[[Any, list[str]], int]:
    limit: int = 2 ** (bits - 1)

    def read(value: Any, told: list[str]) -> int:
        if isinstance(value, str):
            if not INTEGER.fullmatch(value.strip()):
                raise Unreadable
            value = int(value.strip().split(".")[0])
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not -limit <= value < limit:
            raise Unreadable
        return value

    return read


def _read_float(value: Any, told: list[str]) -> float:
    number = read_number(value)
    if not math.isfinite(number):
        raise Unreadable
    return number


def _read_bool(value: Any, told: list[str]) -> bool:
    if isinstance(value, str):
        value = {"true": True, "false": False, "1": True, "0": False}.get(value.strip().lower())
    if value in (0, 1) and isinstance(value, bool | int | float):
        return bool(value)
    raise Unreadable


def read_text(value: Any, told: list[str]) -> str:
    """Read a text; a number or boolean in its place is written out (an answer of 7 is the text "7")."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            told.append("lone_surrogate")
            return value.encode("utf-8", "backslashreplace").decode()
        return value
    if isinstance(value, bool | int | float | Decimal):
        return dump(value)
    raise Unreadable


def _read_prompt(value: Any, told: list[str]) -> str:
    return dump(value) if is_chat(value) else read_text(value, told)


def _read_label(value: Any, told: list[str]) -> str:
    # Tables turn integer keys into floats as soon as one is missing; 3 and 3.0 are the same key.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, date):
        return value.isoformat()
    return read_text(value, told)


def _read_key(value: Any, told: list[str]) -> str:
    return canonical(value) if isinstance(value, dict | list) else _read_label(value, told)


def _read_json(value: Any, told: list[str]) -> str:
    if isinstance(value, str):
        try:
            orjson.loads(value)
        except orjson.JSONDecodeError:
            raise Unreadable from None
        return value
    if not isinstance(value, dict | list):
        raise Unreadable
    return dump(value)


def read_time(value: Any, told: list[str]) -> int:
    """Read a time as microseconds since 1970 in UTC: seconds to nanoseconds by size, or ISO text.

    A time without a zone is taken as UTC.
    """
    if isinstance(value, str) and not NUMBER.fullmatch(value.strip()):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            raise Unreadable("time_unreadable") from None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    return _calendar_microseconds(value) if isinstance(value, datetime) else _epoch_microseconds(value)


def _calendar_microseconds(value: datetime) -> int:
    since = (value if value.tzinfo else value.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _epoch_microseconds(value: Any) -> int:
    try:
        number = read_number(value)
    except Unreadable:
        raise Unreadable("time_unreadable") from None
    for unit in _UNITS:
        if _EARLIEST <= number / unit < _LATEST:
            exact = int(value) if isinstance(value, int) else None
            return exact * 1_000_000 // int(unit) if exact is not None else round(number / unit * 1_000_000)
    raise Unreadable("time_unreadable")


def _listed(value: Any) -> list[Any]:
    """A list, or the JSON text of one."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise Unreadable from None
    if not isinstance(value, list | tuple):
        raise Unreadable
    return list(value)


def read_ids(value: Any, told: list[str]) -> list[int]:
    """Read token ids; an item that is no integer becomes NO_ID."""
    return [_read_id(item, told) for item in _listed(value)]


def _read_id(item: Any, told: list[str]) -> int:
    if isinstance(item, str) and re.fullmatch(r"\d{1,18}", item):
        told.append("id_from_text")
        return int(item)
    if isinstance(item, float) and item.is_integer():
        told.append("id_from_float")
        item = int(item)
    valid = isinstance(item, int) and not isinstance(item, bool) and abs(item) < 2**63
    return int(item) if valid else NO_ID


def read_logprobs(value: Any, told: list[str]) -> list[float | None]:
    """Read token log-probs; what is no number is missing, never 0."""
    return [_read_logprob(item) for item in _listed(value)]


def _read_logprob(item: Any) -> float | None:
    try:
        return None if item is None else read_number(item)
    except Unreadable:
        return None


def read_mask(value: Any, told: list[str]) -> list[int]:
    """Read a loss mask; an item that is neither 0 nor 1 becomes NO_MASK, as does a mask that is no list."""
    try:
        items = _listed(value)
    except Unreadable:
        return [NO_MASK]
    return [
        int(item) if isinstance(item, bool | int | float) and item in (0, 1) else NO_MASK for item in items
    ]


def _read_texts(value: Any, told: list[str]) -> list[str | None]:
    return [None if item is None else read_text(item, told) for item in _listed(value)]


_READ: dict[ColumnKind, Callable[[Any, list[str]], Any]] = {
    "text": read_text,
    "prompt": _read_prompt,
    "key": _read_key,
    "label": _read_label,
    "json": _read_json,
    "int32": _read_integer(32),
    "int64": _read_integer(64),
    "float": _read_float,
    "reward": read_reward,
    "time": read_time,
    "bool": _read_bool,
    "ids": read_ids,
    "logprobs": read_logprobs,
    "mask": read_mask,
    "texts": _read_texts,
}
