"""Files of a dataset, on a local disk or behind an fsspec URL, where a file appears whole or not at all.

A local file is written beside its final place under a hidden name, flushed to disk, then renamed. An object
store has no rename, but one PUT is atomic there: the file grows on the local disk and is uploaded when it is
published.
"""

import contextlib
import errno
import os
import shutil
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_tools.errors import DataError, MissingExtra, RecError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

STALE_SECONDS = 24 * 3600
"""A hidden file that nobody has written to for this long was left by a killed process."""


Stamp = tuple[str, int, int, int]
"""Path, number, size and time of change of a file."""


class Storage(ABC):
    """The folder tree under one root; every `name` is relative to it, with `/` between its parts."""

    root: str
    is_local: bool

    @abstractmethod
    def url(self, name: str) -> str:
        """Return the path that DuckDB reads `name` by."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether the file exists."""

    @abstractmethod
    def entries(self, folder: str) -> list[str]:
        """Return the sorted names of the visible entries of `folder`; [] where it does not exist."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a small file."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the bytes of a file."""

    @abstractmethod
    def total_size(self, folder: str) -> int:
        """Return the bytes of all files under a folder; 0 where it does not exist."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; one that is gone already is fine."""

    @abstractmethod
    def staging_path(self, name: str) -> str:
        """Return a fresh local path to write the future content of `name` to."""

    @abstractmethod
    def publish(self, staged: str, name: str, *, exclusive: bool = False) -> None:
        """Make the finished local file `staged` visible as `name`, replacing what was there.

        With `exclusive` an existing `name` raises FileExistsError.
        """

    @abstractmethod
    def parquet(self, name: str) -> "pq.ParquetFile":
        """Open a Parquet file for reading by row group."""

    @abstractmethod
    def sweep(self, folder: str, *, older_than: float = STALE_SECONDS) -> None:
        """Remove the hidden files that killed writers left in `folder`, once they are so many seconds old."""

    @abstractmethod
    def locked(self) -> "contextlib.AbstractContextManager[None]":
        """Hold the lock of those who rewrite existing files; DataError where another process has it."""

    @abstractmethod
    def committing(self) -> "contextlib.AbstractContextManager[None]":
        """Wait for, then hold, the lock of those who look at what is committed and commit accordingly."""

    def filesystem(self) -> Any:
        """Return the fsspec filesystem that DuckDB needs to be told of, None for local paths."""
        return None

    def stamp(self, name: str) -> Stamp | None:
        """Return what tells this content of a file from any other in this process; None if nothing does."""
        return None

    def stems(self, folder: str, suffix: str) -> list[str]:
        """Return the sorted names without `suffix` of the files in `folder` that end in it."""
        return [name.removesuffix(suffix) for name in self.entries(folder) if name.endswith(suffix)]

    def write(self, name: str, content: bytes, *, exclusive: bool = False) -> None:
        """Write a small file atomically."""
        staged = self.staging_path(name)
        try:
            Path(staged).write_bytes(content)
            self.publish(staged, name, exclusive=exclusive)
        except FileExistsError:
            raise
        except OSError as error:
            raise write_error(self.url(name), error) from error
        finally:
            discard(staged)


class LocalStorage(Storage):
    """A directory."""

    is_local = True

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)

    def url(self, name: str) -> str:
        """Return the absolute path."""
        return f"{self.root}/{name}" if name else self.root

    def exists(self, name: str) -> bool:
        """Return whether the file exists."""
        return os.path.exists(self.url(name))

    def entries(self, folder: str) -> list[str]:
        """Return the sorted visible entries."""
        try:
            return sorted(name for name in os.listdir(self.url(folder)) if not name.startswith((".", "_")))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        return Path(self.url(name)).read_bytes()

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        return os.path.getsize(self.url(name))

    def stamp(self, name: str) -> Stamp | None:
        """Return path, number, size and time of the file."""
        try:
            found = os.stat(self.url(name))
        except FileNotFoundError:
            return None
        return self.url(name), found.st_ino, found.st_size, found.st_mtime_ns

    def total_size(self, folder: str) -> int:
        """Return the bytes of all files under a folder."""
        found = 0
        for path in Path(self.url(folder)).rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                found += path.stat().st_size if path.is_file() else 0
        return found

    def remove(self, name: str) -> None:
        """Remove a file."""
        discard(self.url(name))

    def staging_path(self, name: str) -> str:
        """Return a hidden name in the target's own folder, so that the rename cannot cross file systems."""
        folder, base = os.path.split(self.url(name))
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise write_error(folder, error) from error
        return f"{folder}/.{base}.{uuid.uuid4().hex[:8]}.tmp"

    def publish(self, staged: str, name: str, *, exclusive: bool = False) -> None:
        """Flush, then rename: after a power cut the name shows the old content or all of the new."""
        target = self.url(name)
        sync(staged)
        if exclusive:
            os.link(staged, target)  # unlike a rename, it refuses to replace
            os.unlink(staged)
        else:
            os.replace(staged, target)
        sync(os.path.dirname(target))

    def parquet(self, name: str) -> "pq.ParquetFile":
        """Open a Parquet file."""
        import pyarrow.parquet as pq

        return pq.ParquetFile(self.url(name))

    def sweep(self, folder: str, *, older_than: float = STALE_SECONDS) -> None:
        """Remove old hidden temporary files."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.url(folder)) as found:
            for entry in found:
                if entry.name.startswith(".") and entry.name.endswith(".tmp") and _age(entry) >= older_than:
                    discard(entry.path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock that the kernel drops with the process, so that a crash leaves none behind."""
        import fcntl

        try:
            file = open(self.url(".lock"), "a")  # noqa: SIM115 - closed below, which also gives the lock back
        except OSError as error:
            raise write_error(self.url(".lock"), error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise DataError(
                    f"{self.root}: another process is deleting from or compacting this dataset",
                    "wait until it has finished, then run the command again",
                ) from error
            yield

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Wait for a lock that the kernel drops with the process."""
        import fcntl

        try:
            file = open(self.url(".commit.lock"), "a")  # noqa: SIM115 - closed below, which gives it back
        except OSError as error:
            raise write_error(self.url(".commit.lock"), error) from error
        with file:
            with contextlib.suppress(OSError):  # a file system without locks has none to wait for
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


class RemoteStorage(Storage):
    """A prefix of an object store, through fsspec."""

    is_local = False

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            self.fs, path = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise missing_filesystem(url, error) from error
        except ValueError as error:
            raise DataError(
                f"{url}: {error}", "use a local path or an fsspec URL such as s3://bucket/prefix"
            ) from error
        self.path = path.rstrip("/")
        self.root = self.fs.unstrip_protocol(self.path)

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def url(self, name: str) -> str:
        """Return the URL with its protocol, in the spelling that DuckDB gets back when it lists it."""
        return str(self.fs.unstrip_protocol(self._at(name)))

    def exists(self, name: str) -> bool:
        """Return whether the object exists."""
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self._at(name)))

    def entries(self, folder: str) -> list[str]:
        """Return the sorted visible entries, past any listing cache: other writers commit meanwhile."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rsplit("/", 1)[-1] for path in found)
        return sorted(name for name in names if not name.startswith((".", "_")))

    def read(self, name: str) -> bytes:
        """Return the content of a small object."""
        return bytes(self.fs.cat_file(self._at(name)))

    def size(self, name: str) -> int:
        """Return the bytes of an object."""
        return int(self.fs.size(self._at(name)))

    def total_size(self, folder: str) -> int:
        """Return the bytes of all objects under a prefix."""
        try:
            return int(self.fs.du(self._at(folder)))
        except FileNotFoundError:
            return 0

    def remove(self, name: str) -> None:
        """Remove an object."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._at(name))

    def staging_path(self, name: str) -> str:
        """Return a path in the local temporary folder."""
        return os.path.join(tempfile.gettempdir(), f"rec-{uuid.uuid4().hex}.tmp")

    def publish(self, staged: str, name: str, *, exclusive: bool = False) -> None:
        """Upload in one PUT. Stores without a conditional PUT leave `exclusive` a small window."""
        if exclusive and self.exists(name):
            raise FileExistsError(name)
        self.fs.put_file(staged, self._at(name))
        discard(staged)

    def parquet(self, name: str) -> "pq.ParquetFile":
        """Open a Parquet object."""
        import pyarrow.parquet as pq

        return pq.ParquetFile(self._at(name), filesystem=self.fs)

    def sweep(self, folder: str, *, older_than: float = STALE_SECONDS) -> None:
        """Leave everything: a killed writer never uploaded anything."""

    def locked(self) -> "contextlib.AbstractContextManager[None]":
        """Return no lock: object stores have none."""
        return contextlib.nullcontext()

    def committing(self) -> "contextlib.AbstractContextManager[None]":
        """Return no lock: object stores have none."""
        return contextlib.nullcontext()

    def filesystem(self) -> Any:
        """Return the fsspec filesystem."""
        return self.fs


def open_storage(path: "str | os.PathLike[str]") -> Storage:
    """Return the storage of a local path (also `file://`) or of an fsspec URL."""
    path = os.fspath(path)
    if path.startswith("file://"):
        return LocalStorage(path.removeprefix("file://"))
    return RemoteStorage(path) if "://" in path else LocalStorage(path)


_FILESYSTEMS = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gs"),
    "gcs": ("gcsfs", "gs"),
    "hf": ("huggingface_hub", "hf"),
}


def missing_filesystem(url: str, error: ImportError) -> RecError:
    """Return the error for a url whose filesystem is not installed: the extra that brings it, if one does."""
    scheme = url.split("://", 1)[0]
    if scheme in _FILESYSTEMS:
        return MissingExtra(*_FILESYSTEMS[scheme])
    return DataError(f"{url}: no filesystem is installed for {scheme}://", str(error))


def sync(path: str) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: str) -> None:
    """Remove a local file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def write_error(path: str, error: OSError) -> DataError:
    """Return the error a user reads when a write failed: the path, the reason, and what to do."""
    folder = os.path.dirname(path)
    todo = "check the permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(folder).free / 2**30
        todo = f"make room ({free:.1f} GiB are free in {folder})"
    reason = error.strerror or str(error)
    return DataError(f"could not write {path}: {reason}", f"nothing became visible; {todo} and run it again")


def _age(entry: "os.DirEntry[str]") -> float:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - entry.stat().st_mtime
    return 0.0
