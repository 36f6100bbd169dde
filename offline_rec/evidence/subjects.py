"""The policies that are judged, and what each of them was trained on, as far as its run directories tell."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import data_tools
from data_tools.errors import DataError, RecError
from offline_rec.config import CONFIG_FILE, FitConfig, fit_config
from offline_rec.data.snapshot import FILE as SNAPSHOT_FILE

if TYPE_CHECKING:
    import duckdb

    from data_tools.dataset import Dataset

Keys = NDArray[np.uint64]

NONE: Keys = np.empty(0, np.uint64)
MODEL = "model"
DEPTH = 4
"""Folders from a model's upwards among which its run is looked for: RUN/checkpoints/step-N/model is deep."""


@dataclass(frozen=True)
class Subject:
    """A policy under judgement: how it is called, its model directory, and its run where it is that run's."""

    name: str
    model: Path
    run: Path | None

    @classmethod
    def of(cls, path: str | Path) -> "Subject":
        """The policy of a run directory, or of a model directory.

        Raises DataError if there is no such directory, or a run has no model yet.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise DataError(f"{folder} does not exist", "name a run directory or a model directory")
        if not (folder / SNAPSHOT_FILE).exists():
            return cls(str(path), folder, None)
        if not (folder / MODEL).is_dir():
            raise DataError(
                f"{folder} has no model yet",
                f"end the run: rec fit --out {folder} --resume, or give a checkpoint",
            )
        return cls(str(path), folder / MODEL, folder)


@dataclass
class TrainedOn:
    """Hashes of what a policy was trained on, 8 bytes each.

    `prompts` are of prompts and of what near-identical ones share; `responses` of ids, which tell where the
    training data is gone. `notes`: what could not be told.
    """

    prompts: Keys
    responses: Keys
    notes: list[str]

    def count(self, con: "duckdb.DuckDBPyConnection", table: str) -> int:
        """Rows of a table with columns `prompt_key`, `cluster_key`, `response_key` that it was trained on."""
        for name in ("prompts", "responses"):
            con.register(f"_{name}", pa.table({"key": getattr(self, name)}))
        found = con.execute(
            f"SELECT count(*) FROM {table} WHERE prompt_key IN (FROM _prompts) "
            "OR cluster_key IN (FROM _prompts) OR response_key IN (FROM _responses)"
        ).fetchall()
        return int(found[0][0])


def trained_on(subject: Subject, ds: "Dataset") -> TrainedOn:
    """What the run of a policy was trained on, and the runs that it started from; `ds` is open already."""
    prompts, responses, notes = [NONE], [NONE], list[str]()
    runs = list(_runs(subject))
    for folder in runs:
        seen = _trained_responses(folder)
        if not len(seen):
            notes.append(f"{folder} has no lineage: which rows it was trained on is unknown")
        source = _dataset_of(folder, ds)
        if source is None:
            responses.append(seen)
            notes.append(
                f"the dataset that {folder} was trained on is not there: rows are compared by their ids alone"
            )
        else:
            prompts.append(_prompts_of(source, seen))
    if not runs:
        notes.append(f"{subject.name} is no run: what it was trained on is unknown")
    return TrainedOn(np.concatenate(prompts), np.concatenate(responses), notes)


def _runs(subject: Subject) -> Iterator[Path]:
    """The run that a policy came from, then the one which that began with, and so on."""
    model: Path | None = subject.model
    known: set[Path] = set()
    while model is not None:
        above = [model.absolute(), *model.absolute().parents][: DEPTH + 1]
        run = next((folder for folder in above if (folder / SNAPSHOT_FILE).exists()), None)
        if run is None or run in known:
            return
        known.add(run)
        yield run
        config = _config_of(run)
        model = None if config is None else Path(config.model)


def _config_of(run: Path) -> FitConfig | None:
    try:
        return fit_config(run / CONFIG_FILE)
    except RecError:
        return None


def _dataset_of(run: Path, ds: "Dataset") -> "Dataset | None":
    """The dataset that a run was trained on, where it still is."""
    config = _config_of(run)
    try:
        source = None if config is None else data_tools.open(config.dataset)
    except RecError:
        return None
    return ds if source is not None and source.path == ds.path else source


def _trained_responses(run: Path) -> Keys:
    with data_tools.open(run).connect() as con:
        found = con.sql("SELECT DISTINCT hash(response_id) AS key FROM lineage").to_arrow_table()
    return _keys(found)


def _prompts_of(source: "Dataset", responses: Keys) -> Keys:
    with source.connect() as con:
        con.register("_trained", pa.table({"key": responses}))
        found = con.sql(
            "SELECT DISTINCT unnest([hash(prompt_hash), hash(prompt_cluster)]) AS key FROM rollouts "
            "WHERE hash(response_id) IN (FROM _trained)"
        ).to_arrow_table()
    return _keys(found)


def _keys(table: pa.Table) -> Keys:
    keys: Keys = table["key"].to_numpy()
    return keys
