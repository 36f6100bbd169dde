"""Lines of JSON whose lists of numbers never become Python objects, which takes a third of the time.

simdjson judges lines by the rules of orjson; where it finds anything unusual the line is left to the tolerant
parser, so that both ways give the same records.
"""

from array import array
from collections.abc import Mapping
from typing import Any, Literal

import simdjson

from data_tools.logs.lines import BOM

NumberKind = Literal["i", "d"]


class Numbers:
    """A list of int64 (kind "i") or float64 ("d") as the bytes of its items."""

    __slots__ = ("data", "kind")

    def __init__(self, kind: NumberKind, data: bytes) -> None:
        self.kind = kind
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // 8

    def tolist(self) -> list[Any]:
        """The items as Python numbers."""
        return array("q" if self.kind == "i" else "d", self.data).tolist()


def unpacked(value: Any) -> Any:
    """The value itself, or the list that it stands for."""
    return value.tolist() if type(value) is Numbers else value


def packed_record(
    parser: simdjson.Parser, line: bytes, kinds: Mapping[str, NumberKind]
) -> dict[str, Any] | None:
    """The object of a line, its lists named in `kinds` as Numbers; None where it is not plainly so."""
    if line.startswith(BOM):  # simdjson skips it, and it may stand at the beginning of a file only
        return None
    try:
        document = parser.parse(line)
        if not isinstance(document, simdjson.Object):
            return None
        return _fields(document, line, kinds)
    except (ValueError, TypeError, RuntimeError):
        return None


def _fields(document: simdjson.Object, line: bytes, kinds: Mapping[str, NumberKind]) -> dict[str, Any] | None:
    record: dict[str, Any] = {}
    packed: list[str] = []
    for name in document:
        value: Any = document[name]
        found = type(value)
        if found is simdjson.Array:
            if name in kinds:
                packed.append(name)
                value = Numbers(kinds[name], bytes(value.as_buffer(of_type=kinds[name])))
            else:
                value = value.as_list()
        elif found is simdjson.Object:
            value = value.as_dict()
        record[name] = value
    if len(record) != len(document):  # a key twice
        return None
    # The buffer of a nested list is that of its items, flattened.
    flat = _opens(line, len(packed)) or all(_is_flat(line, name) for name in packed)
    return record if flat else None


def _opens(line: bytes, lists: int) -> bool:
    """Whether no more brackets open than these; looking for the next one is twice as fast as `count`."""
    at = -1
    for _ in range(lists + 1):
        at = line.find(b"[", at + 1)
        if at < 0:
            return True
    return False


def _is_flat(line: bytes, name: str) -> bool:
    """Whether the list of a field surely holds no other list."""
    key = f'"{name}"'.encode()
    # The name may stand elsewhere too, or be spelt with escapes: then it is not told which list is its own.
    if line.count(key) != 1 or b"\\u00" in line:
        return False
    begin = line.find(b"[", line.find(key))
    return b"[" not in line[begin + 1 : line.find(b"]", begin)]
