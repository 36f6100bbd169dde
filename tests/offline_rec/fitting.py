"""What the tests of `fit` share: a model, a log sampled from it, runs on them, and how runs are compared."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from offline_rec.config import FitConfig
from offline_rec.training.metrics import read_metrics
from tests import tiny
from tests.offline_rec import logged

STEPS = 6


def world(folder: Path, **options: Any) -> Path:
    """A folder with the model `m` and the dataset `ds` of answers that it sampled."""
    tiny.save(folder / "m")
    made = logged.rows(options.pop("groups", 12), **options.pop("columns", {}))
    logged.dataset(folder / "ds", made, **{"batches": 2} | options)
    return folder


def config(folder: Path, out: str = "run", **changes: Any) -> FitConfig:
    """Six updates of four groups, a checkpoint after every second one."""
    paths = {"dataset": str(folder / "ds"), "model": str(folder / "m"), "out": str(folder / out)}
    basis = {
        "steps": STEPS,
        "groups_per_step": 4,
        "lr": 3e-3,
        "save_every": 2,
        "eval_every": 3,
        "device": "cpu",
    }
    return FitConfig(**paths | basis | changes)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what differs from run to run."""
    return [{key: value for key, value in record.items() if key != "timing"} for record in read_metrics(run)]


def lineage(run: Path) -> list[tuple[Any, ...]]:
    """All rows of lineage/, in the order of steps."""
    parts = [pq.read_table(path) for path in sorted((run / "lineage").glob("*.parquet"))]
    return sorted(tuple(row.values()) for part in parts for row in part.to_pylist())


def numbers(record: dict[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record by their path."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{path}{key}.")
        elif not isinstance(value, bool | str | list):
            yield path + key, value


def assert_same_run(one: Path, other: Path) -> None:
    """The same but for rounding: weights, metrics, and who was trained on."""
    assert furthest(weights(one), weights(other)) < 1e-5
    for a, b in zip(records(one), records(other), strict=True):
        assert dict(numbers(a)) == pytest.approx(dict(numbers(b)), rel=1e-3, abs=1e-5)
    trained = [[row[:3] for row in lineage(run)] for run in (one, other)]
    assert trained[0] == trained[1]


class Killed(Exception):
    """Stands for a crash."""


def killer(at_step: int) -> Any:
    """A progress callback that crashes after a step."""

    def progress(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == at_step:
            raise Killed

    return progress
