"""JSON documents that span lines, read as a stream: an array of records, or indented records one by one."""

import codecs
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from data_tools.collecting.reasons import Refused
from data_tools.logs.jsontext import bounded_integer, without_surrogates
from data_tools.logs.log import TornArchive

_SPACE = " \t\r\n"
_NEAR_END = 16
"""An error this close to the end of the text read so far may only mean that more text must be read."""


class _Text:
    """A window of the decoded stream: grows while a record is incomplete, forgets what was parsed."""

    def __init__(self, data: Iterable[bytes]) -> None:
        self._data = iter(data)
        # A byte that is no UTF-8 becomes a lone surrogate, by which `_value` knows the record to refuse.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.text, self.at, self.ended = "", 0, False
        self.torn: str | None = None

    def grow(self) -> None:
        """Read on until the window has doubled, so that a large record is parsed few times."""
        self.text, self.at = self.text[self.at :], 0
        pieces, wanted = [self.text], len(self.text)
        while wanted >= 0 and not self.ended:
            pieces.append(self._next())
            wanted -= len(pieces[-1]) or 1
        self.text = "".join(pieces)

    def _next(self) -> str:
        try:
            return self._decoder.decode(next(self._data))
        except TornArchive as error:
            self.torn = str(error)
        except StopIteration:
            pass
        self.ended = True
        return self._decoder.decode(b"", True)

    def peek(self, skip: str) -> str:
        """The next character that is not in `skip`, without taking it; "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in skip:
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self.grow()


def elements(data: Iterable[bytes]) -> Iterator[Any]:
    """Yield the records of a stream of JSON documents, the elements of top-level arrays one by one.

    A part that cannot be parsed is yielded as a Refused; reading goes on at the next line opening a record.
    """
    window = _Text(data)
    decoder = json.JSONDecoder(parse_int=bounded_integer)
    inside = False
    while mark := window.peek(_SPACE + "," if inside else _SPACE):
        if mark == ("]" if inside else "["):
            inside = not inside
            window.at += 1
            continue
        try:
            value, raw = _value(window, decoder)
        except Refused as refused:
            yield refused
            _resume(window)
        else:
            yield _checked(value, raw)
    if window.torn:
        yield Refused("torn_archive", window.torn)


def _value(window: _Text, decoder: json.JSONDecoder) -> tuple[Any, str]:
    while True:
        try:
            value, end = decoder.raw_decode(window.text, window.at)
        except json.JSONDecodeError as error:
            if _is_broken(window, error):
                raise Refused("torn_line", f"{error.msg} within a JSON document") from None
        except RecursionError:
            raise Refused("too_deep", "nested too deeply") from None
        else:
            if end < len(window.text) or window.ended:  # a number at the very end may go on
                raw, window.at = window.text[window.at : end], end
                return value, raw
        window.grow()


def _is_broken(window: _Text, error: json.JSONDecodeError) -> bool:
    if window.ended:
        return True
    return not error.msg.startswith("Unterminated string") and error.pos < len(window.text) - _NEAR_END


def _checked(value: Any, raw: str) -> Any:
    if not raw.isascii():
        try:
            raw.encode()
        except UnicodeEncodeError:
            return Refused("not_json", "not UTF-8 text")
    if not isinstance(value, dict | list):
        return Refused("not_an_object", f"a bare {type(value).__name__}")
    return without_surrogates(value, Counter()) if "\\u" in raw else value


def _resume(window: _Text) -> None:
    """Skip to the next line that opens a record, or to the end."""
    window.at += 1
    while True:
        at = window.text.find("\n{", window.at)
        if at >= 0:
            window.at = at + 1
            return
        window.at = max(window.at, len(window.text) - 1)
        if window.ended:
            window.at = len(window.text)
            return
        window.grow()
