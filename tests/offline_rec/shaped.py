"""The real shaping over a handful of rewards: a DuckDB table in the place of a dataset."""

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb
import pyarrow as pa

from data_tools import schema
from data_tools.shaping.fields import Shaping
from data_tools.shaping.run import shape

VIEW = pa.schema(
    [
        *schema.ROLLOUTS,
        pa.field("age_days", pa.float64()),
        pa.field("staleness", pa.int64()),
        pa.field("split", pa.string()),
        pa.field("file", pa.string()),
        pa.field("file_row", pa.int64()),
    ]
)


def shaped(
    rewards: Sequence[float | None],
    fields: Mapping[str, Any],
    *,
    groups: Sequence[str] | None = None,
    policies: Sequence[str] | None = None,
) -> dict[int, dict[str, Any]]:
    """Position of every kept row, to what shaping says of it."""
    count = len(rewards)
    table = pa.Table.from_pylist(
        [
            {
                "response_id": f"{i:03}",
                "group_id": groups[i] if groups else "g",
                "policy": policies[i] if policies else None,
                "reward": rewards[i],
                "split": "train",
                "file": "f",
                "file_row": i,
            }
            for i in range(count)
        ],
        schema=pa.schema([field.with_nullable(True) for field in VIEW]),
    )
    with duckdb.connect() as con:
        con.register("rollouts", table)
        rows = shape(con, Shaping.parse(fields)).read_all().to_pylist()
    return {int(row["response_id"]): row for row in rows}
