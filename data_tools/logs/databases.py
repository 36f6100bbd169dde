"""SQLite logs: opened read-only, read as a stream, whatever state their writer left them in.

A database is a file that someone else made: nothing in its schema is trusted, and only its tables are read.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote

from data_tools.errors import DataError
from data_tools.logs.log import Log


@contextmanager
def database(log: Log) -> Iterator[sqlite3.Connection]:
    """Open a SQLite log; raises DataError where it is no readable database.

    A damage found later ends a query in an sqlite3.DatabaseError.
    """
    with log.local_file() as path:
        try:
            con = _connect(path)
        except sqlite3.Error as error:
            hint = "copy it again (with its -wal file, if there is one), or leave it out"
            raise DataError(f"{log.name} is a damaged SQLite database: {error}", hint) from error
        with closing(con):
            yield con


def _connect(path: str) -> sqlite3.Connection:
    """A connection that has read the schema.

    A database in a folder that cannot be written may only be read as one that nobody changes.
    """
    try:
        return _opened(f"file:{quote(path)}?mode=ro")
    except sqlite3.OperationalError:
        return _opened(f"file:{quote(path)}?mode=ro&immutable=1")


def _opened(uri: str) -> sqlite3.Connection:
    # Chunks are made in one thread at a time, but not always in the one that opened the log.
    con = sqlite3.connect(uri, uri=True, check_same_thread=False)
    try:
        con.text_factory = _text
        con.execute("PRAGMA trusted_schema = OFF")
        con.execute("PRAGMA query_only = ON")
        con.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        con.close()
        raise
    return con


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def tables(con: sqlite3.Connection) -> dict[str, list[str]]:
    """Columns of each table of a database, in the order of their names."""
    names = con.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
    return {
        name: [column[1] for column in con.execute(f"PRAGMA table_info({quoted(name)})")] for (name,) in names
    }


def records(con: sqlite3.Connection, query: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a query one by one, as mappings by column name."""
    cursor = con.execute(query)
    names = [column[0] for column in cursor.description]
    for row in cursor:
        yield dict(zip(names, row, strict=True))


def quoted(name: str) -> str:
    """A name as an identifier of SQLite."""
    return '"' + name.replace('"', '""') + '"'
