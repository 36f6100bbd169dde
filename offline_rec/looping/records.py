"""Metrics and lineage of a loop: those of its fits together, with the policy version of every row."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

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


def add_lineage(run: Path, folder: Path, ds: "Dataset", *, where: str | None) -> None:
    """Add the lineage of a fit on the rows `where`, part by part, each whole or not at all."""
    target = folder / "lineage"
    target.mkdir(exist_ok=True)
    query = f"""SELECT p.* EXCLUDE (place), r.policy, r.policy_version
        FROM part p LEFT JOIN (
            SELECT response_id, policy, policy_version FROM rollouts WHERE {where or "true"}
        ) r USING (response_id) ORDER BY p.place"""
    with ds.connect() as con:
        for path in sorted((run / "lineage").glob("*.parquet")):
            part = pq.read_table(path)
            con.register("part", part.append_column("place", pa.array(range(part.num_rows), pa.int64())))
            joined = con.sql(query).to_arrow_table().select(SCHEMA.names).cast(SCHEMA)
            staged = target / f".{path.name}.tmp"
            pq.write_table(joined, staged, compression="zstd")
            os.replace(staged, target / path.name)
