"""Replaces batches by rewritten ones at a single moment, although many files change.

A swap is announced in `swaps/<id>.pending.json`: the batches it adds and those it removes. While only that
file is there, readers ignore what it adds. One more file, `swaps/<id>.json`, is the commit: from then on
readers ignore what it removes. Whoever rewrites next undoes a swap that stayed pending, and clears up after
one that was committed. So a process killed at any moment leaves a dataset that opens, complete and aligned,
without anybody mending it first.
"""

import contextlib
import uuid
from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from data_tools.store.storage import Storage

_PENDING, _COMMITTED, _DONE = ".pending.json", ".json", ".done"

SIDECAR_KINDS = ("tokens", "logprobs")
"""Folders of folders of files that are aligned with the rollouts file of the same name."""


class Swap(BaseModel):
    """What one swap changes, by batch name; `erases` where the rewards of removed rows have to go as well."""

    adds: list[str]
    removes: list[str]
    erases: bool = False


def live_batches(storage: Storage) -> list[str]:
    """Return the sorted names of the batches that count at this moment.

    A swap that moved on during the listing could show its old and its new batches, or neither: list again
    then. The last swap stays noted after its end, so that one that began and ended meanwhile is seen as well.
    """
    while True:
        before = storage.entries("swaps")
        listed = storage.stems("rollouts", ".parquet")
        hidden = _hidden(storage, before)
        if hidden is not None and storage.entries("swaps") == before:
            return [name for name in listed if name not in hidden]


def _hidden(storage: Storage, entries: Sequence[str]) -> set[str] | None:
    """Return the batches that swaps hide, or None where a swap ended while it was read."""
    pending, committed = _keys(entries, _PENDING), _keys(entries, _COMMITTED)
    try:
        added = [_read(storage, key + _PENDING).adds for key in pending - committed]
        removed = [_read(storage, key + _COMMITTED).removes for key in committed]
    except FileNotFoundError:
        return None
    return {name for names in added + removed for name in names}


def _keys(entries: Sequence[str], ending: str) -> set[str]:
    """Return the swaps that have a file of just this ending (`.pending.json` is not `.json`)."""
    found = (entry.partition(".") for entry in entries)
    return {key for key, dot, rest in found if dot + rest == ending}


def _read(storage: Storage, name: str) -> Swap:
    return Swap.model_validate_json(storage.read(f"swaps/{name}"))


@contextlib.contextmanager
def swapping(storage: Storage, swap: Swap) -> Iterator[None]:
    """Announce `swap`, let the body publish the added batches, then commit; undo it on an error."""
    key = uuid.uuid4().hex[:12]
    storage.write(f"swaps/{key}{_PENDING}", swap.model_dump_json().encode())
    try:
        yield
        storage.write(f"swaps/{key}{_COMMITTED}", swap.model_dump_json().encode())
    except BaseException:
        if not storage.exists(f"swaps/{key}{_COMMITTED}"):  # it may be there: Ctrl-C right after the rename
            _forget(storage, swap.adds)
            storage.remove(f"swaps/{key}{_PENDING}")
        raise
    storage.remove(f"swaps/{key}{_PENDING}")


def recover(storage: Storage) -> list[Swap]:
    """Undo the swaps that a killed process left pending; return the committed ones, which `clear` finishes.

    Needs the storage's lock, as `clear` does. Sidecars of batches that are gone go as well.
    """
    entries = storage.entries("swaps")
    committed = _keys(entries, _COMMITTED)
    for key in _keys(entries, _PENDING):
        if key not in committed:
            _forget(storage, _read(storage, key + _PENDING).adds)
        storage.remove(f"swaps/{key}{_PENDING}")
    present = set(storage.stems("rollouts", ".parquet"))
    for folder in sidecar_folders(storage):
        for orphan in set(storage.stems(folder, ".parquet")) - present:
            storage.remove(f"{folder}/{orphan}.parquet")
    return [_read(storage, key + _COMMITTED) for key in committed]


def clear(storage: Storage) -> None:
    """Remove the files that committed swaps replaced, and note the swaps as done."""
    entries = storage.entries("swaps")
    for key in _keys(entries, _COMMITTED):
        _forget(storage, _read(storage, key + _COMMITTED).removes)
        storage.write(f"swaps/{key}{_DONE}", b"")
        storage.remove(f"swaps/{key}{_COMMITTED}")
        for earlier in _keys(entries, _DONE) - {key}:
            storage.remove(f"swaps/{earlier}{_DONE}")


def sidecar_folders(storage: Storage) -> list[str]:
    """Return the folders whose files are aligned with rollouts, such as `tokens/3f2a`."""
    return [f"{kind}/{key}" for kind in SIDECAR_KINDS for key in storage.entries(kind)]


def _forget(storage: Storage, batches: Sequence[str]) -> None:
    """Remove every file of some batches, rollouts first, so that no reader finds them half there."""
    folders = ["rollouts", "rejects", *sidecar_folders(storage)]
    for folder in folders:
        for batch in batches:
            storage.remove(f"{folder}/{batch}.parquet")
