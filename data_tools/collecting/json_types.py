"""The SQL types of JSON fields, gathered record by record from the kinds of their values, nothing guessed.

A text stays a text, whatever it looks like; a field of several kinds is JSON. Memory is flat in the records.
"""

from collections.abc import Mapping
from typing import Any

from data_tools.store.views import identifier

MAX_FIELDS = 200
"""An object with more keys is a mapping (token -> log-prob), not a record; it stays JSON."""

Kind = str | list["Kind"] | dict[str, "Kind"]
"""A scalar type, ["BIGINT"] a list of them, {"a": "VARCHAR"} an object; NOTHING where only null was seen."""

NOTHING = ""

_SCALARS = {bool: "BOOLEAN", int: "BIGINT", float: "DOUBLE", str: "VARCHAR", type(None): NOTHING}
_NUMBERS = ("BIGINT", "HUGEINT", "DOUBLE")


def merged(kind: Kind, value: Any) -> Kind:
    """The kind of a field of `kind` that also holds `value`."""
    if isinstance(value, list):
        if kind == NOTHING:
            return [_items(NOTHING, value)]
        return [_items(kind[0], value)] if isinstance(kind, list) else "JSON"
    if isinstance(value, dict):
        return merged_fields(kind or {}, value) if kind == NOTHING or isinstance(kind, dict) else "JSON"
    return _either(kind, _scalar(value))


def merged_fields(kind: Any, value: Mapping[str, Any]) -> Kind:
    """The kind of an object of `kind` that also has the fields of `value`."""
    for name, inner in value.items():
        kind[name] = merged(kind.get(name, NOTHING), inner)
    return kind if len(kind) <= MAX_FIELDS else "JSON"


def _items(kind: Kind, values: list[Any]) -> Kind:
    types = set(map(type, values))
    if not types <= _SCALARS.keys():
        for value in values:
            kind = merged(kind, value)
        return kind
    for found in types:
        # Token ids are long lists of one type: only the largest integer is looked at.
        kind = _either(kind, _scalar(max(values)) if types == {int} else _SCALARS[found])
    return kind


def _scalar(value: Any) -> str:
    kind = _SCALARS[type(value)]
    return "HUGEINT" if kind == "BIGINT" and value >= 2**63 else kind


def _either(one: Kind, other: str) -> Kind:
    if one == other or other == NOTHING:
        return one
    if one == NOTHING:
        return other
    both = (one, other)
    return max(both, key=_NUMBERS.index) if one in _NUMBERS and other in _NUMBERS else "JSON"


def sql_type(kind: Kind) -> str:
    """The type in SQL; an object whose keys SQL cannot tell apart stays JSON."""
    if isinstance(kind, str):
        return kind or "JSON"
    if isinstance(kind, list):
        return f"{sql_type(kind[0])}[]"
    names = {name.lower() for name in kind}
    if not kind or len(names) < len(kind) or "" in names:
        return "JSON"
    return f"STRUCT({', '.join(f'{identifier(name)} {sql_type(inner)}' for name, inner in kind.items())})"
