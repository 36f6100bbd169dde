"""Turns what DuckDB says about a user's statement into an error that says what to do."""

import contextlib
from collections.abc import Iterator

import duckdb

from data_tools.errors import ConfigError, DataError
from data_tools.store.connection import MEMORY_VARIABLE

VIEWS = "a dataset has the views rollouts, groups, rejects and policies; a run has metrics and lineage"
COLUMNS = 'list the columns with: rec sql DATASET "DESCRIBE rollouts" (or another view)'


@contextlib.contextmanager
def sql_errors(what: str = "SQL") -> Iterator[None]:
    """Raise a ConfigError or DataError that begins with `what` for what DuckDB raises in the body.

    An error in the middle of a stream reaches Python as an OSError of Arrow, with the same text.
    """
    try:
        yield
    except (duckdb.Error, OSError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise _readable(f"{what}: ", lines or [type(error).__name__]) from error


def _readable(prefix: str, lines: list[str]) -> ConfigError | DataError:
    if lines[0].startswith("Out of Memory"):
        hint = (
            f"raise the limit with the environment variable {MEMORY_VARIABLE}=16GB, or ask for fewer columns"
        )
        return DataError(prefix + lines[0], hint)
    if any(
        mark in lines[0].lower() for mark in ("magic bytes", "parquet file", "zstd", "thrift", "tprotocol")
    ):
        return DataError(prefix + lines[0], "the file is damaged: restore it from a copy, or remove it")
    if "schema mismatch" in lines[0]:
        return DataError(prefix + lines[0], "that file is none of this dataset: remove it")
    if lines[0].startswith("IO Error"):
        hint = "if another process deletes from or compacts this dataset, run the command again"
        return DataError(prefix + lines[0], hint)
    if "Table with name" in lines[0]:
        return ConfigError(prefix + lines[0], VIEWS)
    return ConfigError(prefix + "\n".join(lines[:4]), COLUMNS)
