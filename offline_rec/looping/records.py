"""Metrics and lineage of a loop: those of its fits together, with the policy version of every row."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from offline_rec.training import lineage
from offline_rec.training.metrics import MetricsLog, read_metrics

if TYPE_CHECKING:
    from data_tools.dataset import Dataset

SCHEMA = lineage.SCHEMA.append(pa.field("policy", pa.string())).append(pa.field("policy_version", pa.int64()))
"""That of a fit's lineage, and who sampled the row."""


def add_metrics(run: Path, folder: Path, *, first: int) -> None:
    """Append the records of a fit whose first update is `first`; what was appended of it before goes."""
    log = MetricsLog(folder)
    log.drop_after(first - 1 if first > 1 else -1)
    for record in read_metrics(run):
        if record["step"] >= first or first == 1:
            log.append(record)
    log.sync()


def add_lineage(
    run: Path, folder: Path, ds: "Dataset", *, where: str | None, sampled: tuple[str, int] | None = None
) -> None:
    """Add the lineage of a fit on the rows `where`, part by part, each whole or not at all.

    `sampled`: the policy and version of all these rows, where they are of one, so that none is looked up.
    """
    target = folder / "lineage"
    target.mkdir(exist_ok=True)
    with nullcontext() if sampled else ds.connect() as con:
        for path in sorted((run / "lineage").glob("*.parquet")):
            part = pq.read_table(path)
            joined = _of_one(part, *sampled) if sampled else _joined(con, part, where)
            staged = target / f".{path.name}.tmp"
            pq.write_table(joined.select(SCHEMA.names).cast(SCHEMA), staged, compression="zstd")
            os.replace(staged, target / path.name)


def _joined(con: Any, part: pa.Table, where: str | None) -> pa.Table:
    """A part with who sampled each row, as the dataset tells."""
    con.register("part", part.append_column("place", pa.array(range(part.num_rows), pa.int64())))
    query = f"""SELECT p.* EXCLUDE (place), r.policy, r.policy_version
        FROM part p LEFT JOIN (
            SELECT response_id, policy, policy_version FROM rollouts WHERE {where or "true"}
        ) r USING (response_id) ORDER BY p.place"""
    return con.sql(query).to_arrow_table()


def _of_one(part: pa.Table, policy: str, version: int) -> pa.Table:
    """A part whose rows all are of one version."""
    count = part.num_rows
    named = part.append_column("policy", pa.array([policy] * count, pa.string()))
    return named.append_column("policy_version", pa.array([version] * count, pa.int64()))
