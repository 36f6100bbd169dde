"""Chunks of a log turned into rows by several processes, in the order of the log.

A log of lines is cut into blocks here; parsing, rules and identities of a block need nothing but the block.
Of a plain file a process is told the place of a block, and reads it there; other logs are sent to it.
Whatever keeps state from block to block (rewards by function, redaction, formats that join records) stays in
this process. Blocks come back as Arrow tables, and only a few are on their way, so memory stays flat.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NoReturn

from data_tools.collecting.identity import Scope
from data_tools.collecting.pipeline import Processed, Settings, process, rare_garbage_collection
from data_tools.errors import DataError
from data_tools.logs.lines import LineBlock, Span, line_blocks, spans
from data_tools.logs.log import Log
from data_tools.processes import helpers
from data_tools.readers.base import BlockReader, Reader

BLOCKS_ALONE = 8
"""Blocks of a collect that are read before processes are started: they take as long to start as these."""

KEPT_BYTES = 64 << 20
"""Freed memory that a process keeps for its next block, which takes an eighth less time so."""

Piece = LineBlock | Span


@dataclass
class Workers:
    """Reads logs with `count` processes, started at the first log that is worth it; 1 is this one alone."""

    count: int
    settings: Settings
    _pool: ProcessPoolExecutor | None = None
    _alone: int = field(default=0, init=False)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def read(self, log: Log, reader: Reader, scope: Scope) -> Iterator[Processed]:
        """The chunks of a log as rows and rejects, in its order."""
        task = self._task(log, reader, scope)
        if task is None:
            for chunk in reader.chunks(log):
                yield process(chunk, scope, self.settings)
            return
        try:
            yield from self._pieces_read(task, log)
        except BrokenProcessPool as error:
            raise DataError(
                f"a process that read {log.name} was ended from outside, perhaps for want of memory",
                "collect again with --workers 1; nothing was written",
            ) from error

    def _pieces_read(self, task: "Task", log: Log) -> Iterator[Processed]:
        """The first blocks are read here, the rest elsewhere; at most two a process are on their way."""
        pieces = _pieces(log)
        alone: Iterable[Piece] = islice(pieces, max(BLOCKS_ALONE - self._alone, 0))
        waiting: deque[Future[Processed]] = deque()
        if log.plain:  # the places of a few blocks are nothing, so processes start while those are read
            alone = list(alone)
            waiting.extend(self._submit(task, piece) for piece in islice(pieces, 2 * self.count))
        for piece in alone:
            self._alone += 1
            yield task(piece)
        for piece in pieces:
            waiting.append(self._submit(task, piece))
            if len(waiting) > 2 * self.count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _task(self, log: Log, reader: Reader, scope: Scope) -> "Task | None":
        """What a process has to know of a log; None where it cannot be read block by block."""
        alone = self.settings.reward is not None or self.settings.intake is not None
        if self.count < 2 or alone or log.kind != "jsonl" or log.companions or log.shared is not None:
            return None
        if not isinstance(reader, BlockReader) or not reader.by_block:
            return None
        return Task(reader, replace(log, opener=_elsewhere), scope, self.settings)

    def _submit(self, task: "Task", piece: Piece) -> Future[Processed]:
        if self._pool is None:
            self._pool = helpers(self.count, keeps=KEPT_BYTES)
        return self._pool.submit(task, piece)


@dataclass(frozen=True)
class Task:
    """Turns a block of lines into rows, in whatever process it is sent to."""

    reader: BlockReader
    log: Log
    scope: Scope
    settings: Settings

    def __call__(self, piece: Piece) -> Processed:
        """The rows and rejects of a block."""
        with rare_garbage_collection():
            block = piece.lines() if isinstance(piece, Span) else piece
            return process(self.reader.chunk_of_lines(block, self.log), self.scope, self.settings)


def _pieces(log: Log) -> Iterator[Piece]:
    if log.path is not None and log.plain:
        return spans(log.path)
    return line_blocks(log.blocks())


def _elsewhere() -> NoReturn:
    raise RuntimeError("a block is read without its log")
