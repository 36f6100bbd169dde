"""Values that stand in another log, found by an id: requests of a batch, messages of a stored completion."""

import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from data_tools.logs.jsontext import dump
from data_tools.logs.log import Log

Keyed = Iterable[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Found:
    """A value of a log; `log` is its place among the logs that were joined."""

    log: int
    value: Any


class Joined:
    """Values of some logs by key, in the order of the logs; read when first asked for.

    They lie in a temporary SQLite database on disk, which goes away with the object: looking up by id is what
    an index is for. Memory is bounded by its cache of 32 MB.
    """

    def __init__(self, logs: Sequence[Log], keyed: Callable[[Log], Keyed]) -> None:
        self.logs = list(logs)
        self._keyed = keyed
        self._database: sqlite3.Connection | None = None

    def of(self, key: str) -> list[Found]:
        """The values with a key; equal ones of one log count once."""
        query = "SELECT DISTINCT log, value FROM joined WHERE key = ? ORDER BY log, place"
        rows = self._filled().execute(query, [key])
        return [Found(log, orjson.loads(value)) for log, value in rows]

    def nearest(self, key: str, log: Log) -> list[Any]:
        """The different values with a key, in those logs alone that are nearest to `log` by folder."""
        found = self.of(key)
        near = max((_shared_folders(self.logs[one.log], log) for one in found), default=0)
        values: list[Any] = []
        for one in found:
            if _shared_folders(self.logs[one.log], log) == near and one.value not in values:
                values.append(one.value)
        return values

    def _filled(self) -> sqlite3.Connection:
        if self._database is None:
            self._database = made = sqlite3.connect("")
            made.executescript(
                """PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF; PRAGMA cache_size = -32000;
                CREATE TABLE joined (key TEXT, log INT, place INTEGER PRIMARY KEY, value TEXT);"""
            )
            for at, log in enumerate(self.logs):
                rows = ((key, at, dump(value)) for key, value in self._keyed(log))
                made.executemany("INSERT INTO joined (key, log, value) VALUES (?, ?, ?)", rows)
            made.execute("CREATE INDEX by_key ON joined (key)")
        return self._database


def join(logs: Sequence[Log], others: Sequence[Log], role: str, keyed: Callable[[Log], Keyed]) -> None:
    """Let `logs` share the values of the other logs, each of which is named with the log nearest to it."""
    joined = Joined(others, keyed)
    for log in logs:
        log.shared = joined
    for other in others:
        owner = max(logs, key=lambda log: _shared_folders(log, other))
        count = sum(name.startswith(role) for name in owner.companions)
        owner.companions[f"{role} {count + 1}" if count else role] = other


def joined_of(log: Log) -> Joined:
    """What a log was joined with; nothing if it was read alone."""
    return log.shared if isinstance(log.shared, Joined) else Joined((), lambda _: ())


def _shared_folders(one: Log, other: Log) -> int:
    """How many folders the paths of two logs begin with alike."""
    paths = (os.path.dirname(log.name).split("/") for log in (one, other))
    return sum(1 for _ in _while_equal(*paths))


def _while_equal(one: Sequence[str], other: Sequence[str]) -> Iterable[str]:
    for left, right in zip(one, other, strict=False):
        if left != right:
            return
        yield left
