"""Plain values out of a pickle: dicts, lists, tuples, texts, bytes, numbers, booleans, None; never an object.

Python's own unpickler is not used, so there is nothing to restrict: of the format's instructions only those
that build such values are known here, and any other (a class, a call, a persistent id) refuses the data.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from data_tools.collecting.reasons import Refused

MAX_ITEMS = 1_000_000
"""Values in all, counted wherever they are repeated: a few bytes can say "this list, ten times" ten times."""

MAX_TEXT = 1 << 28
"""Characters and bytes of all texts, counted the same way."""

_MAX_INTEGER_BYTES = 9
_KEYS = {str, bytes, int, float, bool, type(None)}


class _Mark:
    """Stands on the stack where a group of values begins."""


_MARK = _Mark()


def plain(data: bytes) -> Any:
    """Read a pickle of protocol 2 or later; raises Refused (`pickle_refused`) where it holds more."""
    if data[:1] != b"\x80":
        raise Refused("pickle_refused", "not a pickle of protocol 2 or later")
    reading = _Reading(data)
    try:
        value = reading.run()
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise Refused("pickle_refused", f"a broken pickle ({type(error).__name__}: {error})") from None
    _check_size(value)
    return value


@dataclass(slots=True)
class _Reading:
    """Where reading is: a position in the data, a stack of values, and those that are remembered."""

    data: bytes
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self) -> Any:
        """Follow the instructions up to STOP."""
        while True:
            code = self.data[self.at]
            self.at += 1
            if code == _STOP:
                value = self.pop()
                if self.stack:
                    raise ValueError("more than one value")
                return value
            step = _STEPS.get(code)
            if step is None:
                raise Refused(
                    "pickle_refused", f"instruction {bytes([code])!r} at byte {self.at}: no plain value"
                )
            step(self)

    def take(self, size: int) -> bytes:
        """The next bytes."""
        piece = self.data[self.at : self.at + size]
        if len(piece) < size:
            raise ValueError("it breaks off")
        self.at += size
        return piece

    def number(self, kind: str) -> Any:
        """The next number, in the notation of `struct`."""
        return struct.unpack(kind, self.take(struct.calcsize(kind)))[0]

    def pop(self) -> Any:
        """The value on top of the stack."""
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a value is missing")
        return value

    def group(self) -> list[Any]:
        """The values above the last mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a mark is missing")
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values


Step = Callable[[_Reading], None]


def _pushed(value: Callable[[_Reading], Any]) -> Step:
    def step(reading: _Reading) -> None:
        reading.stack.append(value(reading))

    return step


def _text(size: str) -> Step:
    return _pushed(lambda reading: reading.take(reading.number(size)).decode("utf-8", "surrogatepass"))


def _bytes(size: str) -> Step:
    return _pushed(lambda reading: reading.take(reading.number(size)))


def _integer(size: str) -> Step:
    return _pushed(lambda reading: int.from_bytes(_digits(reading, size), "little", signed=True))


def _digits(reading: _Reading, size: str) -> bytes:
    length = reading.number(size)
    if not 0 <= length <= _MAX_INTEGER_BYTES:
        raise ValueError(f"an integer of {length} bytes")
    return reading.take(length)


def _tuple(length: int) -> Step:
    return _pushed(lambda reading: tuple(reversed([reading.pop() for _ in range(length)])))


def _put(place: Callable[[_Reading], int]) -> Step:
    def step(reading: _Reading) -> None:
        value = reading.stack[-1]
        if value is _MARK:
            raise ValueError("a value is missing")
        reading.memo[place(reading)] = value

    return step


def _get(size: str) -> Step:
    return _pushed(lambda reading: reading.memo[reading.number(size)])


def _append(values: Callable[[_Reading], list[Any]]) -> Step:
    def step(reading: _Reading) -> None:
        added = values(reading)
        if type(reading.stack[-1]) is not list:
            raise TypeError("items for what is no list")
        reading.stack[-1].extend(added)

    return step


def _set(values: Callable[[_Reading], list[Any]]) -> Step:
    def step(reading: _Reading) -> None:
        pairs = values(reading)
        if type(reading.stack[-1]) is not dict:
            raise TypeError("fields for what is no dict")
        if not set(map(type, pairs[::2])) <= _KEYS:  # the hash of a deep tuple would overflow the C stack
            raise TypeError("a key that is no plain scalar")
        reading.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    return step


def _one(reading: _Reading) -> list[Any]:
    return [reading.pop()]


def _two(reading: _Reading) -> list[Any]:
    value = reading.pop()
    return [reading.pop(), value]


def _skip(size: int) -> Step:
    def step(reading: _Reading) -> None:
        reading.take(size)

    return step


_STOP = ord(".")

_STEPS: dict[int, Step] = {
    0x80: _skip(1),  # protocol
    0x95: _skip(8),  # frame
    ord("("): _pushed(lambda _: _MARK),
    ord("N"): _pushed(lambda _: None),
    0x88: _pushed(lambda _: True),
    0x89: _pushed(lambda _: False),
    ord("J"): _pushed(lambda reading: reading.number("<i")),
    ord("K"): _pushed(lambda reading: reading.number("<B")),
    ord("M"): _pushed(lambda reading: reading.number("<H")),
    0x8A: _integer("<B"),
    0x8B: _integer("<i"),
    ord("G"): _pushed(lambda reading: reading.number(">d")),
    0x8C: _text("<B"),
    ord("X"): _text("<I"),
    0x8D: _text("<Q"),
    ord("C"): _bytes("<B"),
    ord("B"): _bytes("<I"),
    0x8E: _bytes("<Q"),
    ord("}"): _pushed(lambda _: {}),
    ord("]"): _pushed(lambda _: []),
    ord(")"): _tuple(0),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("t"): _pushed(lambda reading: tuple(reading.group())),
    ord("a"): _append(_one),
    ord("e"): _append(_Reading.group),
    ord("s"): _set(_two),
    ord("u"): _set(_Reading.group),
    ord("q"): _put(lambda reading: int(reading.number("<B"))),
    ord("r"): _put(lambda reading: int(reading.number("<I"))),
    0x94: _put(lambda reading: len(reading.memo)),
    ord("h"): _get("<B"),
    ord("j"): _get("<I"),
}
"""What each instruction does, by its byte; see the table of Python's pickletools."""


def _check_size(value: Any) -> None:
    """Refuse what is endless, or would be huge once it is written out; stops counting at the limit."""
    items, text, waiting = 0, 0, [value]
    while waiting:
        found = waiting.pop()
        items += 1
        if isinstance(found, str | bytes):
            text += len(found)
        elif isinstance(found, dict):
            waiting.extend(found)
            waiting.extend(found.values())
        elif isinstance(found, list | tuple):
            waiting.extend(found)
        if items + len(waiting) > MAX_ITEMS or text > MAX_TEXT:
            raise Refused("pickle_refused", "a pickle of more values than a record can hold")
