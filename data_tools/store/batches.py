"""Writes one batch of a dataset: all of it becomes visible at one moment, or none of it."""

import contextlib
import re
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING

from data_tools.errors import ConfigError, DataError
from data_tools.schema import REJECTS, ROLLOUTS
from data_tools.store.parquet_writer import ParquetFileWriter
from data_tools.store.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

_STAMP = "%Y%m%dT%H%M%S%fZ"
_SCHEMAS = {"rollouts": ROLLOUTS, "rejects": REJECTS}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}")


def fresh_name(existing: list[str]) -> str:
    """Return a batch name that sorts after all of `existing`, whatever the clock says, and that nobody else
    picks.
    """
    stamp = datetime.now(UTC).strftime(_STAMP)
    last = max((name[: len(stamp)] for name in existing), default="")
    if stamp <= last:
        with contextlib.suppress(ValueError):  # a name given by hand is no time stamp
            stamp = (datetime.strptime(last, _STAMP) + timedelta(microseconds=1)).strftime(_STAMP)
    return f"{stamp}-{uuid.uuid4().hex[:8]}"


def check_name(name: str) -> str:
    """Return the name if it can be a file's stem in every store, else raise ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a file here", "use letters, digits, '-' and '_'")
    return name


class BatchWriter:
    """A batch being written; a context manager that forgets everything unless `commit` was called.

    The rollouts file is published last, by one rename: it is the commit. Rejects without it stay invisible,
    so a batch that holds nothing but rejects still gets a rollouts file, of zero rows.
    """

    def __init__(self, storage: Storage, name: str | None = None) -> None:
        self._storage = storage
        self._name = name
        if name is not None and storage.exists(f"rollouts/{check_name(name)}.parquet"):
            raise DataError(
                f"{storage.root}: a batch {name!r} exists already", "batches are never overwritten"
            )
        for folder in ("rollouts", "rejects"):
            storage.sweep(folder)
        self._rollouts, self._rejects = self._new("rollouts"), self._new("rejects")

    def __enter__(self) -> "BatchWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    @property
    def n_rollouts(self) -> int:
        """Rows given to `rollouts` so far."""
        return self._rollouts.rows

    @property
    def n_rejects(self) -> int:
        """Rows given to `rejects` so far."""
        return self._rejects.rows

    def rollouts(self, table: "pa.Table | pa.RecordBatch") -> None:
        """Append rows of the schema ROLLOUTS; nullable columns may be left out."""
        self._rollouts.write(table)

    def rejects(self, table: "pa.Table | pa.RecordBatch") -> None:
        """Append rows of the schema REJECTS."""
        self._rejects.write(table)

    def revise(self, change: "Callable[[pa.Table], pa.Table]") -> None:
        """Pass every row given to `rollouts` through `change`, a row group at a time and in order.

        `change` may leave rows out or alter them.
        """
        staged, self._rollouts = self._rollouts, self._new("rollouts")
        _pass(staged, self._rollouts, change)

    def revise_rejects(self, change: "Callable[[pa.Table], pa.Table]") -> None:
        """Do the same with the rows given to `rejects`."""
        staged, self._rejects = self._rejects, self._new("rejects")
        _pass(staged, self._rejects, change)

    def _new(self, folder: str) -> ParquetFileWriter:
        return ParquetFileWriter(self._storage, f"{folder}/new.parquet", _SCHEMAS[folder])

    def commit(self) -> str:
        """Make the batch visible and return its name."""
        self._rollouts.finish()
        self._rejects.finish()
        name = self._name or fresh_name(self._storage.stems("rollouts", ".parquet"))
        if self._rejects.rows:
            self._rejects.publish(f"rejects/{name}.parquet")
        try:
            self._rollouts.publish(f"rollouts/{name}.parquet", exclusive=self._name is not None)
        except BaseException:
            if not self._storage.exists(f"rollouts/{name}.parquet"):
                self._storage.remove(f"rejects/{name}.parquet")
            raise
        return name

    def discard(self) -> None:
        """Remove what is not committed."""
        self._rollouts.discard()
        self._rejects.discard()


def _pass(
    staged: ParquetFileWriter, into: ParquetFileWriter, change: "Callable[[pa.Table], pa.Table]"
) -> None:
    """Write the rows of a staged file into another one, changed, and forget the first."""
    import pyarrow.parquet as pq

    try:
        staged.finish()
        with pq.ParquetFile(staged.staged) as file:
            for group in range(file.num_row_groups):
                into.write(change(file.read_row_group(group)))
    finally:
        staged.discard()
