"""Bytes to lines: split at 0x0A only, numbered as they stand in the file, in constant memory.

JSON text may hold U+0085, U+2028 and U+2029 literally, so `str.splitlines` would shred records.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data_tools.errors import DataError
from data_tools.logs.log import BLOCK_BYTES, TornArchive

LINES_BYTES = 4 << 20
"""Text of one block of lines: large enough to work in columns, small enough that memory stays flat."""

LINES_ROWS = 4096

COUNTED_BYTES = 1 << 18
"""Text whose lines are counted at once, which a cache should hold."""

MAX_LINE_BYTES = 1 << 30
"""Some trainers write a whole batch as one line, so 100 MB are real; a line beyond this is skipped."""

BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class LineBlock:
    """Consecutive lines without their 0x0A; `first` is the number of lines[0], counted from 1.

    `oversized` maps the number of a line over the limit to its size; the line itself is empty here.
    `torn` says that the archive broke behind the last line.
    """

    lines: list[bytes] = field(default_factory=list)
    first: int = 1
    oversized: dict[int, int] = field(default_factory=dict)
    torn: str | None = None

    def pieces(self, size: int) -> "Iterator[LineBlock]":
        """The same lines in blocks of about `size` bytes, at least one line each."""
        begin = length = 0
        for end, line in enumerate(self.lines, 1):
            length += len(line)
            if length >= size and end < len(self.lines):
                yield self._piece(begin, end)
                begin, length = end, 0
        yield self._piece(begin, len(self.lines), self.torn)

    def _piece(self, begin: int, end: int, torn: str | None = None) -> "LineBlock":
        rows = range(self.first + begin, self.first + end)
        oversized = {row: size for row, size in self.oversized.items() if row in rows}
        return LineBlock(self.lines[begin:end], self.first + begin, oversized, torn)


def line_blocks(
    data: Iterable[bytes], *, block_bytes: int = LINES_BYTES, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[LineBlock]:
    """Cut blocks of bytes into blocks of whole lines; a torn archive ends in a block that says so."""
    splitter = _Splitter(max_line_bytes)
    torn: str | None = None
    try:
        for piece in data:
            splitter.feed(piece)
            if splitter.size >= block_bytes or len(splitter.block.lines) >= LINES_ROWS:
                yield splitter.take()
    except TornArchive as error:
        torn = str(error)
    splitter.end_line()
    splitter.block.torn = torn
    if splitter.block.lines or torn:
        yield splitter.take()


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive lines by their place in a local, uncompressed file; `first` is the number of the first."""

    path: str
    begin: int
    end: int
    first: int = 1

    def lines(self) -> LineBlock:
        """Read them; a DataError where the file has become shorter."""
        splitter = _Splitter(MAX_LINE_BYTES, self.first)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.begin)
            left = self.end - self.begin
            while left:
                piece = file.read(min(left, LINES_BYTES + BLOCK_BYTES))
                if not piece:
                    raise DataError(f"{self.path} became shorter while it was read", "collect it again")
                splitter.feed(piece)
                left -= len(piece)
        splitter.end_line()
        return splitter.take()


def spans(path: str | Path, *, block_bytes: int = LINES_BYTES, piece: int = COUNTED_BYTES) -> Iterator[Span]:
    """Cut a file into spans of the size of blocks; lines are counted here, and read elsewhere."""
    buffer = bytearray(piece)
    found = np.frombuffer(buffer, np.uint8), np.empty(piece, np.bool_)
    begin = at = count = 0
    first = 1
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            read, ends = (array[:size] for array in found)
            lines = int(np.count_nonzero(np.equal(read, 0x0A, out=ends)))  # bytes.count takes twice the time
            count += lines
            if lines and (at + size - begin >= block_bytes or count >= LINES_ROWS):
                end = at + buffer.rfind(b"\n", 0, size) + 1
                yield Span(str(path), begin, end, first)
                begin, first, count = end, first + count, 0
            at += size
    if at > begin:
        yield Span(str(path), begin, at, first)


class _Splitter:
    """Holds the unfinished line between pieces; joins its parts once, so a huge line costs linear time."""

    def __init__(self, max_line_bytes: int, first: int = 1) -> None:
        self.max_line_bytes = max_line_bytes
        self.block = LineBlock(first=first)
        self.size = 0
        self._parts: list[bytes] = []
        self._length = 0

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the file."""
        first, *rest = piece.split(b"\n")
        self._extend(first)
        if not rest:
            return
        self.end_line()
        self.block.lines += rest[:-1]
        self.size += len(piece)
        self._extend(rest[-1])

    def _extend(self, part: bytes) -> None:
        self._length += len(part)
        if self._length > self.max_line_bytes:
            self._parts = []
        elif part:
            self._parts.append(part)

    def end_line(self) -> None:
        """Close the line begun, if any; at the end of a file without a last newline too."""
        lines = self.block.lines
        if self._length > self.max_line_bytes:
            self.block.oversized[self.block.first + len(lines)] = self._length
        lines.append(b"".join(self._parts))
        if self.block.first == 1 and len(lines) == 1:
            lines[0] = lines[0].removeprefix(BOM)
        self.size += self._length
        self._parts, self._length = [], 0

    def take(self) -> LineBlock:
        """Hand over the whole lines so far."""
        done, self.block, self.size = self.block, LineBlock(first=self.block.first + len(self.block.lines)), 0
        return done
