"""Small datasets on disk, written straight as Parquet, for tests that read rows."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_tools import schema

DEFAULTS: dict[str, Any] = {"prompt": "1+1=", "response": "2", "logprob_kind": "processed", "flags": []}


def rollouts(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Rollout rows with the given columns; ids and lengths are filled in."""
    full = []
    for i, row in enumerate(rows):
        row = DEFAULTS | {"response_id": f"r{i}", "group_id": "g"} | dict(row)
        row.setdefault("prompt_hash", hashlib.md5(str(row["prompt"]).encode()).hexdigest())
        for ids, count in (("prompt_ids", "n_prompt_tokens"), ("response_ids", "n_tokens")):
            row[count] = len(row[ids]) if row.get(ids) is not None else None
        full.append({name: row.get(name) for name in schema.ROLLOUTS.names})
    return pa.Table.from_pylist(full, schema=schema.ROLLOUTS)


@dataclass
class StubSidecar:
    folder: Path
    names: list[str]

    def path(self, batch: str) -> str:
        return str(self.folder / f"{batch}.parquet")

    def missing(self) -> list[str]:
        return [name for name in self.names if not Path(self.path(name)).exists()]


@dataclass
class StubDataset:
    """The part of a dataset that reads rows by position, without a catalogue."""

    root: Path

    def batches(self) -> list[str]:
        return sorted(path.stem for path in (self.root / "rollouts").glob("*.parquet"))

    def rollout_path(self, batch: str) -> str:
        return str(self.root / "rollouts" / f"{batch}.parquet")

    def sidecar(self, kind: str, key: str) -> StubSidecar:
        return StubSidecar(self.root / kind / key, self.batches())

    def write(self, path: str, table: pa.Table, row_group_size: int = 4) -> None:
        target = self.root / f"{path}.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, target, row_group_size=row_group_size)
