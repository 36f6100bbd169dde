"""Opens DuckDB the way every part of the program does: bounded memory, spilling to disk, and locked in."""

import contextlib
import os
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_tools.store.storage import Storage
from data_tools.store.views import literal

if TYPE_CHECKING:
    import duckdb

MEMORY_VARIABLE = "REC_MEMORY_LIMIT"
"""Environment variable with DuckDB's memory limit, such as 2GB."""

_SHARE, _LEAST, _MOST = 0.25, 1 << 30, 8 << 30


def memory_limit() -> str:
    """Return DuckDB's memory limit: a quarter of the machine's memory within 1 to 8 GiB, unless the variable
    says else.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max" where the container has no limit of its own
        machine = min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return os.environ.get(MEMORY_VARIABLE) or f"{min(max(int(machine * _SHARE), _LEAST), _MOST)}B"


def open_duckdb(storage: Storage | None = None) -> "duckdb.DuckDBPyConnection":
    """Return an in-memory database that spills to a temporary folder, knows the storage and sees no Python
    variables.
    """
    import duckdb

    con = duckdb.connect()
    con.execute(f"SET memory_limit = {literal(memory_limit())}")
    # DuckDB makes the folder when it first spills and removes it when the connection closes.
    con.execute(
        f"SET temp_directory = {literal(os.path.join(tempfile.gettempdir(), f'rec-{uuid.uuid4().hex}'))}"
    )
    con.execute("SET TimeZone = 'UTC'")
    con.execute("SET python_enable_replacements = false")
    con.execute("SET autoinstall_known_extensions = false")
    con.execute("SET parquet_metadata_cache = true")  # several statements read the same files
    if storage is not None and storage.filesystem() is not None:
        con.register_filesystem(storage.filesystem())
    return con


def lock(con: "duckdb.DuckDBPyConnection", files: Sequence[str]) -> None:
    """Leave `files` as all that the connection can ever read, and its settings as they are."""
    con.execute(f"SET allowed_paths = [{', '.join(literal(file) for file in files)}]")
    con.execute("SET enable_external_access = false")
    con.execute("SET lock_configuration = true")
