"""What a user names, as logs: files, folders, patterns, urls, Hugging Face datasets, `-` for stdin."""

import glob
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

from data_tools.errors import DataError
from data_tools.logs.log import Log
from data_tools.store.storage import missing_filesystem

HUB = "hf:"
"""Goes before the name of a Hugging Face dataset: hf:owner/name, or hf:owner/name@revision/folder."""

_GLOB = "*?["


@dataclass(frozen=True, slots=True)
class Source:
    """A log, and whether the user named it; a file found in a named folder may turn out to be no log.

    `swept`: it is named by a pattern, which may match such files too.
    """

    log: Log
    named: bool
    swept: bool = False


def expand(sources: Sequence[str], stack: ExitStack) -> list[Source]:
    """Find the logs that `sources` name, in a stable order; raises DataError for one that is not there.

    What can be read only once (standard input, a pipe) is copied to a temporary file, removed with `stack`.
    """
    if not sources:
        raise DataError("no log was named", "name files, folders, globs, urls, or - for standard input")
    return [found for source in sources for found in _expand_one(str(source), stack)]


def _expand_one(source: str, stack: ExitStack) -> list[Source]:
    if source == "-":
        return [Source(_spooled("-", sys.stdin.buffer, stack), True)]
    if source.startswith(HUB) and "://" not in source and not os.path.exists(source):
        return _remote(f"hf://datasets/{source.removeprefix(HUB)}")
    if "://" in source and not source.startswith("file://"):
        return _remote(source)
    path = source.removeprefix("file://")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return _matches(path, stack)
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error.strerror}", "check the path") from error
    if stat.S_ISDIR(mode):
        return _folder(path)
    return [Source(_local(path, mode, stack), True)]


def _local(path: str, mode: int, stack: ExitStack) -> Log:
    if stat.S_ISREG(mode):
        return Log.at(path)
    with open(path, "rb") as pipe:
        return _spooled(path, pipe, stack)


def _spooled(name: str, stream: BinaryIO, stack: ExitStack) -> Log:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rec-pipe-"))
    copy = os.path.join(folder, "log")
    with open(copy, "wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)
    return Log.at(copy, name)


def _matches(pattern: str, stack: ExitStack) -> list[Source]:
    if not any(mark in pattern for mark in _GLOB):
        broken = " (a broken link)" if os.path.islink(pattern) else ""
        raise DataError(f"{pattern} does not exist{broken}", "check the path")
    # `**` follows links, also one to a folder above it: each file counts once, under its shortest path.
    paths = sorted(glob.glob(pattern, recursive=True), key=lambda path: (len(path), path))
    files = {os.path.realpath(path): path for path in reversed(paths)}
    if not files:
        raise DataError(f"no file matches {pattern}", "check the pattern, and quote it against the shell")
    found = [found for path in sorted(files.values()) for found in _expand_one(path, stack)]
    # A folder that matches holds files that match, too.
    once = {os.path.realpath(one.log.path): one for one in found if one.log.path is not None}
    rest = [one for one in found if one.log.path is None]
    return [replace(one, swept=True) for one in (*once.values(), *rest)]


def _folder(folder: str) -> list[Source]:
    """Every visible regular file below a folder; links to folders are not followed, so none can loop."""
    found = [Source(Log.at(path), False) for path in _walk(folder)]
    if not found:
        raise DataError(f"{folder} holds no files", "name the folder that the logs are in")
    return found


def _walk(folder: str) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (os.path.join(parent, name) for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if os.path.isfile(path))


def _remote(url: str) -> list[Source]:
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        paths = _remote_paths(filesystem, path)
    except ImportError as error:
        raise missing_filesystem(url, error) from error
    except Exception as error:  # every store has errors of its own
        raise DataError(f"{url} cannot be read: {error}", "check the url and your credentials") from error
    if not paths:
        raise DataError(f"{url} holds no files", "check the url")
    named, swept = paths == [path], any(mark in path for mark in _GLOB)
    return [Source(Log(_url(filesystem, at), partial(_opened, filesystem, at)), named, swept) for at in paths]


def _opened(filesystem: Any, path: str) -> BinaryIO:
    try:
        opened: BinaryIO = filesystem.open(path, "rb")
    except OSError:
        raise
    except Exception as error:
        raise OSError(str(error)) from error
    return opened


def _remote_paths(filesystem: Any, path: str) -> list[str]:
    if any(mark in path for mark in _GLOB):
        return sorted(at for at in filesystem.glob(path) if filesystem.isfile(at))
    if not filesystem.isdir(path):
        return [path]
    below = len(path.rstrip("/")) + 1
    return sorted(at for at in filesystem.find(path) if "/." not in f"/{at[below:]}")


def _url(filesystem: Any, path: str) -> str:
    return str(filesystem.unstrip_protocol(path))
