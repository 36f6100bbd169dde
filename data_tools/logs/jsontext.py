"""JSON in and out: fast where the text is clean, tolerant of NaN and Infinity, and clear about torn text."""

import json
import math
from collections import Counter
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import orjson

from data_tools.collecting.reasons import Refused

MAX_DEPTH = 200
"""orjson writes at most 254 levels; texts nested deeper are refused rather than half stored."""

_RESUMES = 32
"""How many places of a torn line are tried as the start of a good record glued to it."""


def parse(line: bytes, notes: Counter[str]) -> Any:
    """Parse one stripped line; raises Refused (`not_json`, `torn_line`, `too_deep`) with what is wrong.

    The fast and the tolerant parser give the same values: integers beyond 64 bits become floats in both.
    """
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return _parse_tolerantly(line, notes)


def _parse_tolerantly(line: bytes, notes: Counter[str]) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused("not_json", f"not UTF-8 text at byte {error.start + 1}") from None
    try:
        value = json.loads(text, parse_int=bounded_integer)
    except RecursionError:
        raise Refused("too_deep", "nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _broken(text, error) from None
    if not text.isascii() or "\\u" in text:
        value = without_surrogates(value, notes)
    return value


def bounded_integer(digits: str) -> int | float:
    """Read an integer as orjson does: beyond 64 bits it is a float."""
    if len(digits) <= 20:
        value = int(digits)
        if -(2**63) <= value < 2**64:
            return value
    return float(digits)


def _broken(text: str, error: json.JSONDecodeError) -> Refused:
    if not text.startswith(("{", "[")):
        return Refused("not_json", f"{error.msg} at column {error.pos + 1}")
    again = _glued_at(text)
    if again:
        return Refused("torn_line", f"breaks off; another record begins at column {again + 1}")
    if error.msg == "Extra data":
        return Refused("torn_line", f"more text behind the record at column {error.pos + 1}")
    # A cut inside a string, number, literal or escape: nothing but the end of the text stops the parser.
    if error.msg.startswith("Unterminated string") or error.pos >= len(text) - 8:
        return Refused("torn_line", f"breaks off at column {len(text)}")
    return Refused("not_json", f"{error.msg} at column {error.pos + 1}")


def _glued_at(text: str) -> int:
    """Column of a whole record at the end of a torn line, 0 if there is none."""
    at = 0
    for _ in range(_RESUMES):
        at = text.find('{"', at + 1)
        if at < 0:
            return 0
        try:
            orjson.loads(text[at:])
        except orjson.JSONDecodeError:
            continue
        return at
    return 0


def without_surrogates(value: Any, notes: Counter[str]) -> Any:
    """Escape halves of surrogate pairs, which UTF-8 cannot hold."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            notes["lone_surrogate"] += 1
            return value.encode("utf-8", "backslashreplace").decode()
        return value
    if isinstance(value, list):
        return [without_surrogates(item, notes) for item in value]
    if isinstance(value, dict):
        return {
            without_surrogates(key, notes): without_surrogates(item, notes) for key, item in value.items()
        }
    return value


def dump(value: Any) -> str:
    """Write a value as compact JSON; NaN and infinities become null. Raises Refused (`too_deep`)."""
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS).decode()
    except (orjson.JSONEncodeError, RecursionError) as error:
        if "recursion" in str(error).lower():
            raise Refused("too_deep", "nested too deeply") from None
        return json.dumps(_finite(value), ensure_ascii=False, default=str, separators=(",", ":"))


def canonical(value: Any) -> str:
    """Write a value with sorted keys: equal values give equal text. Raises Refused (`too_deep`)."""
    try:
        option = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
        return orjson.dumps(value, default=_plain, option=option).decode()
    except (orjson.JSONEncodeError, RecursionError) as error:
        if "recursion" in str(error).lower():
            raise Refused("too_deep", "nested too deeply") from None
        return json.dumps(
            _finite(value), ensure_ascii=False, default=str, sort_keys=True, separators=(",", ":")
        )


def _plain(value: Any) -> Any:
    """What table files hold beyond JSON."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, datetime | date):
        return value.isoformat()
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return value
