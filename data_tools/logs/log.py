"""One log: a named stream of bytes whose compression and kind are told by its content, never by its name."""

import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

import orjson
import zstandard

from data_tools.errors import DataError

Kind = Literal["jsonl", "json", "csv", "sse", "parquet", "sqlite", "utf16", "empty", "binary", "text"]

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 1 << 18
SAMPLE_LINES = 64


class TornArchive(Exception):
    """A compressed log ends, or breaks, in the middle of its stream; what came before was good."""


@dataclass(eq=False)
class Log:
    """A log to read: `name` is its path or url as the user knows it, `opener` opens its stored bytes.

    `companions` holds further logs that a reader joined to this one, by their role in words ("requests").
    """

    name: str
    opener: Callable[[], BinaryIO]
    path: str | None = None
    """The local file, if there is one; None for a url or standard input."""
    companions: dict[str, "Log"] = field(default_factory=dict)
    shared: Any = None
    """What a reader found out about logs that are read together (Reader.plan)."""

    def __post_init__(self) -> None:
        # The name of a file may hold bytes that are no UTF-8, which Python keeps as lone surrogates.
        self.name = self.name.encode("utf-8", "backslashreplace").decode()

    @classmethod
    def at(cls, path: str, name: str | None = None) -> "Log":
        """The log in a local file, under its path or another name."""

        def opened() -> BinaryIO:
            return open(path, "rb")

        return cls(name or path, opened, path)

    def blocks(self) -> Iterator[bytes]:
        """Yield the decompressed bytes in blocks; raises TornArchive at the point where an archive breaks."""
        with self._open() as raw:
            first = raw.read(BLOCK_BYTES)
            stored = chain([first], iter(lambda: raw.read(BLOCK_BYTES), b""))
            yield from _decompressed(stored, compression_of(first))

    def _open(self) -> BinaryIO:
        try:
            return self.opener()
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            what = "does not exist" if missing else f"cannot be read: {error.strerror or error}"
            raise DataError(f"{self.name} {what}", "check the path") from error

    @cached_property
    def compression(self) -> str | None:
        """`gz`, `zst` or None."""
        with self._open() as raw:
            return compression_of(raw.read(8))

    @property
    def plain(self) -> bool:
        """Whether the log is a local file whose bytes are its content."""
        return self.path is not None and self.compression is None

    @cached_property
    def head(self) -> bytes:
        """The first decompressed bytes (at most HEAD_BYTES), a byte order mark included."""
        found = bytearray()
        with suppress(TornArchive):
            for block in self.blocks():
                found += block
                if len(found) >= HEAD_BYTES:
                    break
        return bytes(found[:HEAD_BYTES])

    @cached_property
    def kind(self) -> Kind:
        """What the content is, judged by the head alone."""
        return kind_of(self.head)

    @contextmanager
    def local_file(self) -> Iterator[str]:
        """Give the path of a local, decompressed file: itself where it is one, else a temporary copy."""
        if self.path is not None and self.compression is None:
            yield self.path
            return
        folder = tempfile.mkdtemp(prefix="rec-log-")
        try:
            copy = Path(folder) / "log"
            with copy.open("wb") as out:
                out.writelines(self.blocks())
            yield str(copy)
        except TornArchive as error:
            raise DataError(f"{self.name}: {error}", "copy the file again, or leave it out") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def compression_of(first: bytes) -> str | None:
    """Tell gz and zst by their magic bytes."""
    if first.startswith(b"\x1f\x8b"):
        return "gz"
    return "zst" if first.startswith(b"\x28\xb5\x2f\xfd") else None


def _decompressed(stored: Iterator[bytes], compression: str | None) -> Iterator[bytes]:
    if compression is None:
        yield from filter(None, stored)
        return
    new: Callable[[], Any] = _gz if compression == "gz" else zstandard.ZstdDecompressor().decompressobj
    stream, fed = new(), False
    # Small pieces: one block of a hostile archive may expand a thousandfold.
    for data in (block[at : at + 65536] for block in stored for at in range(0, len(block), 65536)):
        while data:
            try:
                out = stream.decompress(data)
            except (zlib.error, zstandard.ZstdError) as error:
                raise TornArchive(f"the {compression} stream is damaged: {error}") from None
            if out:
                yield out
            fed, data = not stream.eof, stream.unused_data
            if stream.eof:
                stream = new()
    if fed:
        raise TornArchive(f"the {compression} stream ends early")


def _gz() -> Any:
    return zlib.decompressobj(wbits=31)


def kind_of(head: bytes) -> Kind:
    """Tell what a log holds by its first bytes: magic numbers, lines that parse as JSON, a table."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text:
        return "empty"
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    lines = [line for line in text.split(b"\n", SAMPLE_LINES)[:SAMPLE_LINES] if line.strip()]
    if text[:1] in (b"{", b"["):
        return _json_kind(lines, whole=b"\n" not in text)
    if any(_parses(line) for line in lines):
        return "jsonl"
    if text.startswith((b"data:", b"event:", b": ", b":\n")):
        return "sse"
    return _text_kind(head, lines)


_MAGIC: tuple[tuple[bytes, Kind], ...] = (
    (b"PAR1", "parquet"),
    (b"SQLite format 3\x00", "sqlite"),
    (b"\xff\xfe", "utf16"),
    (b"\xfe\xff", "utf16"),
)


def _json_kind(lines: list[bytes], whole: bool) -> Kind:
    """One document over many lines, or one record a line (a torn first line does not hide the rest)."""
    first = lines[0].strip()
    if whole:
        return "json" if first.startswith(b"[") else "jsonl"
    if any(_parses(line) for line in lines[1:]):
        return "json" if first in (b"[", b"{") else "jsonl"
    if _parses(first):
        return "json" if first.startswith(b"[") else "jsonl"
    opened = first[-1:] in (b"{", b"[", b",", b":") or first in (b"[", b"{")
    return "json" if opened else "jsonl"


def _parses(line: bytes) -> bool:
    if line.lstrip()[:1] not in (b"{", b"["):
        return False
    try:
        return isinstance(orjson.loads(line), dict | list)
    except orjson.JSONDecodeError:
        return False


def _text_kind(head: bytes, lines: list[bytes]) -> Kind:
    text = head.decode("utf-8", "ignore")
    # A head cut inside a character loses at most 3 bytes; more means that this is not UTF-8 text.
    if b"\x00" in head[:1024] or len(text.encode()) < len(head) - 3:
        return "binary"
    return "csv" if any(mark in lines[0] for mark in (b",", b"\t", b";")) else "text"
