"""Logs of streamed responses: the event stream of a server as text, or its pieces as JSON lines.

A stream has no prompt, except where the server returns its ids with the first piece (vLLM).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha1
from operator import itemgetter
from typing import Any

from data_tools.collecting.ids import DIGEST_BYTES, choice_digest, digest, record_digest
from data_tools.collecting.reasons import Refused, Reject
from data_tools.logs.jsontext import dump
from data_tools.logs.lines import line_blocks
from data_tools.logs.log import Log
from data_tools.logs.records import blocks, fingerprint, flat
from data_tools.readers.base import Carries, Chunk, ChunkBuilder, Reader, Values
from data_tools.readers.completions import completions
from data_tools.readers.exchange import exchange
from data_tools.readers.stream_pieces import Stream, events_of, is_event, is_piece

MAX_OPEN = 1024
"""Streams that may be unfinished at one point of a log; beyond that the oldest is taken as broken off."""

MAX_FINISHED = 16
"""Finished streams that are kept for what may come behind the end: usage, the last log-probs."""

_ROWS = 1024


@dataclass(slots=True)
class _Open:
    row: int
    stream: Stream = field(default_factory=Stream)
    content: Any = field(default_factory=partial(sha1, usedforsecurity=False))


class StreamReader(Reader):
    """Pieces of one response have one id; several streams of one log may interleave."""

    name = "openai-stream"
    title = "streamed responses of OpenAI's API and its like (event stream, or chunks as JSONL)"
    carries = Carries(
        prompt="ids if the server returned them",
        group="choices of a call, else equal prompts",
        ids="optional",
        logprobs="optional",
        time="yes",
    )

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record or event is a piece of a stream."""
        if log.kind == "sse":
            values = (value for _, value in events_of(enumerate(log.head.split(b"\n"), 1)))
            return next((is_event(value) for value in values if not isinstance(value, Refused)), False)
        return is_piece(next(iter(samples), None))

    def fingerprint(self, log: Log) -> bytes:
        """Hash of the first piece: event streams begin with the same comments."""
        if log.kind != "sse":
            return fingerprint(log)
        values = (value for _, value in _events(log) if not isinstance(value, Refused | Reject))
        first = next(values, None)
        return digest("log", dump(first))

    def chunks(self, log: Log) -> Iterator[Chunk]:
        """Put streams together as their pieces come."""
        events = log.kind == "sse"
        joining = _Joining(is_event if events else is_piece)
        for row, value in _events(log) if events else _records(log):
            joining.take(row, value)
            if joining.made.input_rows >= _ROWS:
                yield joining.made.chunk()
                joining.made = ChunkBuilder()
        joining.close(list(joining.open))
        yield joining.made.chunk()


def _events(log: Log) -> Iterator[tuple[int, Any]]:
    torn: list[tuple[int, Reject]] = []

    def lines() -> Iterator[tuple[int, bytes]]:
        for block in line_blocks(log.blocks()):
            yield from enumerate(block.lines, block.first)
            if block.torn:
                row = block.first + len(block.lines)
                torn.append((row, Reject(row, "torn_archive", block.torn)))

    yield from events_of(lines())
    yield from torn


def _records(log: Log) -> Iterator[tuple[int, Any]]:
    """Records and rejects of a log, in the order of the log."""
    for block in map(flat, blocks(log)):
        found: list[tuple[int, Any]] = list(zip(block.rows, block.records, strict=True))
        found += [(reject.row or 0, reject) for reject in block.rejects]
        yield from sorted(found, key=itemgetter(0))


@dataclass(slots=True)
class _Joining:
    """Streams that are not read to their end, by id; the one that was touched last is the last."""

    is_piece: Callable[[Any], bool]
    open: dict[Any, _Open] = field(default_factory=dict)
    finished: dict[Any, None] = field(default_factory=dict)
    made: ChunkBuilder = field(default_factory=ChunkBuilder)

    def take(self, row: int, value: Any) -> None:
        """Read an event or record."""
        if value is None:  # the end of a stream that it does not name
            self.close(list(self.finished))
            return
        self.made.input_rows += 1
        if isinstance(value, Reject | Refused):
            self._lost(value.at(row) if isinstance(value, Refused) else value)
        elif self.is_piece(value):
            self._add(row, value)
        else:
            self._enter(row, record_digest(dump(value).encode()), value)

    def _lost(self, reject: Reject) -> None:
        """Any stream that was going on may lack a piece now."""
        self.made.rejects.append(reject)
        for opened in self.open.values():
            if not opened.stream.finished:
                opened.stream.broken = f"a piece may be lost in line {reject.row}"

    def _add(self, row: int, piece: Any) -> None:
        key = piece.get("id") or next(reversed(self.open), "")
        key = key if isinstance(key, str | int) else dump(key)
        nameless = self.open.get("")
        if key not in self.open and nameless is not None and not nameless.stream.begun:
            self.open[key] = self.open.pop("")  # some servers name a stream only in its second piece
        opened = self.open.pop(key, None) or _Open(row)
        self.open[key] = opened
        opened.content.update(dump(piece).encode())
        opened.stream.add(piece)
        if key in self.finished and not piece["choices"] and piece.get("usage"):
            self.close([key])
        elif opened.stream.finished:
            self.finished[key] = None
        self._bound()

    def _bound(self) -> None:
        if len(self.finished) > MAX_FINISHED:
            self.close([next(iter(self.finished))])
        if len(self.open) > MAX_OPEN:
            self.close([next(iter(self.open))])

    def close(self, keys: Iterable[Any]) -> None:
        """Make rows of streams, which end here."""
        for key in keys:
            opened = self.open.pop(key)
            self.finished.pop(key, None)
            content = opened.content.digest()[:DIGEST_BYTES]
            self._enter(opened.row, content, opened.stream.body())

    def _enter(self, row: int, content: bytes, body: Any) -> None:
        for choice, values in enumerate(_responses(body)):
            self.made.add(row, choice_digest(content, choice), values, body)


def _responses(body: Any) -> Iterator[Values | Refused]:
    """The rows of a response, whether it was streamed or stands whole among others that were."""
    choices = body.get("choices") if isinstance(body, dict) else None
    if isinstance(choices, list) and choices and all(isinstance(choice, Refused) for choice in choices):
        yield from choices
        return
    try:
        yield from completions(exchange(body))
    except Refused as refused:
        yield refused
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        yield Refused("bad_record", f"not a streamed response ({type(error).__name__}: {error})")
