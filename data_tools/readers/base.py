"""What a reader is: one small file that turns the records of a log format into rows of loose dataset columns.

A reader names the columns it found and hands values over as they were logged. It applies no rule: what a
usable log-prob, reward or mask is, is decided once for all formats (rules.py); so are types (coerce.py), ids
and duplicates (ledger.py). Most formats need only `RecordReader.detect` and `RecordReader.rows`.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from data_tools.collecting.ids import choice_digest
from data_tools.collecting.reasons import Refused, Reject
from data_tools.logs.jsontext import dump
from data_tools.logs.lines import LineBlock, line_blocks
from data_tools.logs.log import Log
from data_tools.logs.packed import NumberKind
from data_tools.logs.records import Block, blocks, fingerprint, flat, json_block

__all__ = [
    "BlockReader",
    "Carries",
    "Chunk",
    "ChunkBuilder",
    "Log",
    "Passed",
    "Reader",
    "RecordReader",
    "Refused",
    "Reject",
    "Row",
    "Values",
    "first_object",
    "without",
]  # fmt: skip

Values = Mapping[str, Any]
"""One response: loose column (a key of columns.LOOSE) -> value as logged; `extra`: a dict of the rest.

`notes` may list codes of reasons.NOTES to be counted for it. `content` may be a hash of what makes it the
same response, where a log gives it an id and may tell of it twice in different words.
"""


@dataclass(frozen=True, slots=True)
class Passed:
    """A record, or part of one, that is no response (a span of a tool, a score): counted by a note's code."""

    note: str


Row = Values | Refused | Passed


@dataclass(frozen=True, slots=True)
class Carries:
    """What a format holds: "yes", "no", "optional" or a few words; the table of `rec formats`."""

    prompt: str = "no"
    group: str = "no"
    reward: str = "no"
    ids: str = "no"
    logprobs: str = "no"
    version: str = "no"
    time: str = "no"


@dataclass(slots=True)
class Chunk:
    """Rows of one log, column by column and equally long, before any type or rule; and what was unreadable.

    A column is a Python list of logged values or an Arrow array. `content` is a hash of each row as logged:
    rows of one log with equal hashes are separate draws. `names` gives the log's own field name of a column.
    """

    columns: dict[str, Sequence[Any] | pa.Array] = field(default_factory=dict)
    source_row: Sequence[int | None] = ()
    content: Sequence[bytes] = ()
    rejects: list[Reject] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    names: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    """What some notes leave open, in words, by their code."""

    input_rows: int = 0
    """Records of the log behind this chunk; its rows may be more, where a record holds several responses."""

    textual: bool = False
    """True where every value is text only because the file format has no types (CSV)."""


class Reader(ABC):
    """A log format. Subclasses are stateless; one instance reads any number of logs."""

    name: str
    """What `--format` takes and what ids are namespaced with: never rename it."""
    title: ClassVar[str]
    carries: ClassVar[Carries]

    @abstractmethod
    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Tell by content whether this is its log: `log.kind`, `log.head`, values of the first records.

        Readers are asked in the order of the registry, the most particular format first.
        """

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Order those logs of one collect that are this reader's; join companions, drop repeated files.

        A log that is left out must be in the `companions` of one that stays.
        """
        return list(logs)

    def fingerprint(self, log: Log) -> bytes:
        """Hash of the log's first record, which names the log whatever its path, size or compression."""
        return fingerprint(log)

    @abstractmethod
    def chunks(self, log: Log) -> Iterator[Chunk]:
        """Yield the log's rows in chunks of bounded size."""


PIECE_BYTES = 1 << 16
"""Text of nested records that are parsed together."""


class BlockReader(Reader):
    """A format of which any block of records can be read without those before it."""

    numbers: ClassVar[Mapping[str, NumberKind] | None] = None
    """Fields whose lists of numbers may come as Numbers (packed.py)."""

    @property
    def by_block(self) -> bool:
        """Whether `chunk` is all there is to it; a format that adds something to `chunks` goes in order."""
        return type(self).chunks is BlockReader.chunks

    @abstractmethod
    def chunk(self, block: Block, log: Log) -> Chunk:
        """The rows of a block; of the log only name, path and companions are known."""

    def chunk_of_lines(self, lines: LineBlock, log: Log) -> Chunk:
        """The rows of some lines."""
        return self.chunk(json_block(lines, self.numbers), log)

    def chunks(self, log: Log) -> Iterator[Chunk]:
        """Read block by block."""
        if log.kind == "jsonl":
            yield from (self.chunk_of_lines(lines, log) for lines in line_blocks(log.blocks()))
        else:
            yield from (self.chunk(block, log) for block in blocks(log))


class RecordReader(BlockReader):
    """A format whose records (lines, array elements, table rows) each turn into zero or more responses."""

    whole_lists: ClassVar[bool] = False
    """True where a line that is a JSON array is one record (for example one request with n > 1)."""

    names: ClassVar[Mapping[str, str]] = {}
    """The log's own field name of a column, by which `--reward` finds a value that a rule replaces."""

    @abstractmethod
    def rows(self, record: Any, log: Log) -> Iterator[Row]:
        """Yield one mapping per response that `record` (the parsed JSON value or table row) holds.

        Yield a `Refused` for a response that cannot be used, or raise it for the whole record; yield a
        `Passed` for what is no response at all.
        """

    def chunk(self, block: Block, log: Log) -> Chunk:
        """Read record by record; a malformed record is a reject with its line number, never a crash."""
        return self._chunk([block], log)

    def chunk_of_lines(self, lines: LineBlock, log: Log) -> Chunk:
        """Parse a few records at a time: nested ones are many objects, and soon out of the cache."""
        return self._chunk(map(json_block, lines.pieces(PIECE_BYTES)), log)

    def records_of(self, block: Block) -> Block:
        """The records of a block one by one."""
        return block if self.whole_lists else flat(block)

    def _chunk(self, blocks: Iterable[Block], log: Log) -> Chunk:
        made = ChunkBuilder()
        for block in map(self.records_of, blocks):
            self._fill(made, block, log)
        chunk = made.chunk()
        chunk.names = dict(self.names)
        return chunk

    def _fill(self, made: "ChunkBuilder", block: Block, log: Log) -> None:
        made.rejects += block.rejects
        made.input_rows += block.input_rows
        made.notes.update(block.notes)
        for row, record, content in zip(block.rows, block.records, block.contents, strict=True):
            for choice, values in enumerate(self._responses(record, log)):
                made.add(row, choice_digest(content, choice), values, record)

    def _responses(self, record: Any, log: Log) -> Iterator[Row]:
        """The rows of a record; whatever goes wrong inside a malformed one ends as its last Refused."""
        try:
            yield from self.rows(record, log)
        except Refused as refused:
            yield refused
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            yield Refused("bad_record", f"not a {self.name} record ({type(error).__name__}: {error})")


def first_object(samples: Sequence[Any]) -> dict[str, Any]:
    """The record by which a log is told; {} if there is none.

    The first alone counts: a log that grows must not change its format, or its ids would change.
    """
    return next((record for record in samples if isinstance(record, dict)), {})


def without(record: Mapping[str, Any], *used: str) -> dict[str, Any]:
    """The fields of a record that are no columns, for `extra`."""
    return {name: value for name, value in record.items() if name not in used and value is not None}


_NO_COLUMNS = ("notes", "content")


@dataclass
class ChunkBuilder:
    """Collects single rows into a chunk, for readers that see a log as records or a stream."""

    rejects: list[Reject] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    input_rows: int = 0
    _values: list[Values] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _contents: list[bytes] = field(default_factory=list)

    def add(self, row: int, content: bytes, values: Row, record: Any = None) -> None:
        """Add a response found at `row` (from 1), or count the refusal of one (`record` is kept with it)."""
        if isinstance(values, Passed):
            self.notes[values.note] += 1
            return
        if isinstance(values, Refused):
            self.refuse(row, values, record)
            return
        self.notes.update(values.get("notes", ()))
        self._values.append(values)
        self._rows.append(row)
        self._contents.append(values.get("content") or content)

    def refuse(self, row: int, refused: Refused, record: Any = None) -> None:
        """Count a record or response that cannot be used."""
        self.rejects.append(refused.at(row, "" if record is None else dump(record)))

    def __len__(self) -> int:
        return len(self._values)

    def chunk(self) -> Chunk:
        """The rows so far, column by column; a column that a row lacks is None there."""
        columns = dict.fromkeys(key for values in self._values for key in values if key not in _NO_COLUMNS)
        return Chunk(
            columns={key: [values.get(key) for values in self._values] for key in columns},
            source_row=self._rows,
            content=self._contents,
            rejects=self.rejects,
            notes=self.notes,
            input_rows=self.input_rows,
        )
