"""Groups by order, for logs without a group key: only where the user says how many responses a group has."""

from collections import Counter
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from data_tools.errors import ConfigError
from data_tools.readers.base import Chunk

OPTION = "--group-size"


def groups_by_order(chunk: Chunk, size: int, logged: pa.Array | None, scope: str) -> pa.Array:
    """The log's own group keys, and where it names none those of every `size` lines or table rows.

    Where a record holds several responses, those are counted instead. A line that cannot be used keeps its
    place. `scope` names the log: places of two logs never meet, even in one run. Raises ConfigError for a
    table of text (CSV), whose records are not one a line.
    """
    if size < 2:
        raise ConfigError(f"{OPTION} {size}: a group has at least 2 responses", "leave it out")
    if chunk.textual:
        raise ConfigError(f"{OPTION} cannot count the rows of CSV", "name a column: --map group_id=...")
    keys = pa.array([key and f"order/{scope}/{key}" for key in _places(chunk.source_row, size)], pa.string())
    return keys if logged is None else pc.coalesce(logged, keys)


def _places(rows: Sequence[int | None], size: int) -> list[str | None]:
    held, seen = Counter(rows), Counter[int | None]()
    places: list[str | None] = []
    for row in rows:
        if row is None:
            places.append(None)
        elif held[row] > 1:
            places.append(f"{row}/{seen[row] // size}")
        else:
            places.append(str((row - 1) // size))
        seen[row] += 1
    return places
