"""`snapshot.json`: exactly which data a run learns from, so that a resume can tell if it still does."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_tools.errors import DataError

if TYPE_CHECKING:
    from data_tools.dataset import Dataset

FILE = "snapshot.json"
TAIL = 8
"""Bytes at the end of a Parquet file: the footer's length, then `PAR1`."""


@dataclass(frozen=True)
class SourceFile:
    """A file that shaping read: its name in the dataset, its size, and a hash of its Parquet footer.

    The footer holds place, size and statistics of every column chunk: it changes with the content, which need
    not be read for it.
    """

    name: str
    bytes: int
    footer: str


@dataclass(frozen=True)
class Snapshot:
    """The files, the statement that was run over them, and what came of it.

    `index` is the digest of the rows trained on; `now` is the moment that `age_days` counts back from.
    `model`: fingerprint of the starting weights. `tokens_key`, `anchor_key`, `reference_key`: sidecars of the
    dataset in use, null where none is. `longest`, `largest_group`: tokens of the longest row, and of the
    group that has most. `provenance`: where the rows trained on come from. Written last of all that prepares
    a run.
    """

    files: Sequence[SourceFile]
    now: str
    split: str
    sql: str
    rows: int
    groups: int
    n_tokens: int
    left_out: dict[str, int]
    index: str = ""
    holdout: dict[str, int] = field(default_factory=dict)
    model: str = ""
    tokens_key: str | None = None
    anchor_key: str | None = None
    reference_key: str | None = None
    notes: list[str] = field(default_factory=list)
    longest: int = 0
    largest_group: int = 0
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """64 hex digits over the rows trained on and the statement that chose and weighed them.

        Neither files nor times count: the same log, collected again elsewhere, trains in the same order.
        """
        facts = [self.index, self.split, self.sql, self.rows, self.groups]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write it atomically: its presence says that the index is whole."""
        staged = folder / f".{FILE}.tmp"
        content = {"hash": self.hash} | asdict(self)
        with staged.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, folder / FILE)

    @classmethod
    def read(cls, folder: Path) -> "Snapshot | None":
        """The snapshot of a run, None if its preparation never ended; `DataError` if edited."""
        path = folder / FILE
        if not path.exists():
            return None
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            stored = content.pop("hash")
            found = cls(**content | {"files": [SourceFile(**entry) for entry in content["files"]]})
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read: {error}", "start a new run") from error
        if found.hash != stored:
            raise DataError(f"{path} does not fit its own hash", "it was edited: start a new run")
        return found

    def check(self, ds: "Dataset", *, may_grow: bool) -> int:
        """How many files have joined; `DataError` if some changed, or joined unless `may_grow`."""
        there = set(source_names(ds))
        for known in self.files:
            if known.name not in there or source_file(ds, known.name) != known:
                raise DataError(
                    f"the dataset has changed since this run began: {known.name} is another or gone",
                    "restore the file, or start a new run with another --out",
                )
        grown = sorted(there - {known.name for known in self.files})
        if grown and not may_grow:
            raise DataError(
                f"the dataset has grown since this run began: {len(grown)} more files, such as {grown[0]}",
                "go on with the rows of the start by --set on_new_data=ignore, or start a new run",
            )
        return len(grown)


def source_names(ds: "Dataset") -> list[str]:
    """The files that shaping reads: rollouts in the order of their commits, then later rewards."""
    rewards = ds.storage.stems("rewards", ".parquet")
    return [f"rollouts/{name}.parquet" for name in ds.batches()] + [
        f"rewards/{name}.parquet" for name in rewards
    ]


def source_file(ds: "Dataset", name: str) -> SourceFile:
    """The facts of one file, from its last bytes."""
    filesystem = ds.storage.filesystem()
    path = ds.storage.url(name)
    with open(path, "rb") if filesystem is None else filesystem.open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - TAIL, 0))
        length = int.from_bytes(file.read(TAIL)[:4], "little")
        file.seek(max(size - TAIL - length, 0))
        return SourceFile(name, size, hashlib.sha256(file.read(length)).hexdigest())


def source_files(ds: "Dataset") -> list[SourceFile]:
    """The facts of all files that shaping reads."""
    return list(_facts(ds))


def _facts(ds: "Dataset") -> Iterator[SourceFile]:
    for name in source_names(ds):
        yield source_file(ds, name)
