"""Trackers: where a run's metrics also go, live, besides its own `metrics.jsonl`.

A tracker is a class with `log` and `close`, opened with the run's folder and configuration. It is a guest: it
is told everything that the run keeps anyway, and one that fails is dropped with a note. Only rank 0 has any.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from data_tools.errors import ConfigError, MissingExtra
from offline_rec.config import FitConfig

IDS_FILE = "trackers.json"
"""In the run directory: the names under which trackers know the run, so that a resume goes on with them."""

PROJECT = "offline-rec"
Progress = Callable[[dict[str, Any]], None]


class Tracker(Protocol):
    """Takes the numbers of a step, under names such as `loss` and `heldout/kl`."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the numbers of one step; steps rise."""

    def close(self) -> None:
        """Finish; called once."""


@dataclass(frozen=True)
class Opening:
    """What a tracker is opened with: the run, the step it goes on after, and the id it had before, if any."""

    folder: Path
    config: FitConfig
    step: int
    known: str | None

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved configuration."""
        return self.config.model_dump(mode="json")

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.folder.resolve().name


class TensorBoard:
    """Event files in `tensorboard/` of the run directory; a resume hides the steps that it makes again."""

    id: str | None = None

    def __init__(self, opening: Opening) -> None:
        module = "torch.utils.tensorboard" if find_spec("tensorboard") else "tensorboardX"
        writer = import_module(module).SummaryWriter
        again = opening.step + 1 if opening.step else 0  # the measurement before the first step counts as 0
        self._writer = writer(str(opening.folder / "tensorboard"), purge_step=again)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """A scalar each."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A W&B run; its project, entity and mode come from its own environment variables."""

    def __init__(self, opening: Opening) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=opening.name,
            dir=str(opening.folder),
            config=opening.settings,
            id=opening.known,
            resume="allow",
        )
        self.id: str | None = self._run.id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One row of history."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says."""

    def __init__(self, opening: Opening) -> None:
        import mlflow

        self._mlflow = mlflow
        if opening.known is None:
            mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
            self._run = mlflow.start_run(run_name=opening.name)
            mlflow.log_params(opening.settings)
        else:
            self._run = mlflow.start_run(run_id=opening.known)
        self.id: str | None = self._run.info.run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One call a step."""
        self._mlflow.log_metrics(dict(values), step=step, run_id=self.id)

    def close(self) -> None:
        """Mark the run as finished."""
        self._mlflow.end_run()


class Trackio:
    """A run of trackio, kept on this machine unless its environment says otherwise."""

    def __init__(self, opening: Opening) -> None:
        import trackio

        self.id: str | None = opening.known or f"{opening.name}-{os.urandom(4).hex()}"
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self.id,
            config=opening.settings,
            resume="allow",
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


TRACKERS: dict[str, tuple[Callable[[Opening], Any], tuple[str, ...]]] = {
    "tensorboard": (TensorBoard, ("tensorboard", "tensorboardX")),
    "wandb": (WeightsAndBiases, ("wandb",)),
    "mlflow": (MLflow, ("mlflow",)),
    "trackio": (Trackio, ("trackio",)),
}
"""What opens a tracker, and the packages one of which it needs."""


def chosen(config: FitConfig) -> list[str]:
    """The names of a run's trackers; `ConfigError` or `MissingExtra` for one that cannot be."""
    if config.trackers is None:
        return ["tensorboard"] if _installed("tensorboard") else []
    for name in config.trackers:
        if name not in TRACKERS:
            raise ConfigError(f"unknown tracker {name!r}", f"known: {', '.join(TRACKERS)}")
        if not _installed(name):
            raise MissingExtra(TRACKERS[name][1][0], "trackers")
    return list(dict.fromkeys(config.trackers))


@contextmanager
def tracking(config: FitConfig, folder: Path, step: int, tell: Progress) -> Iterator[Progress]:
    """A progress callback that also tells the trackers of a run, which goes on after `step`."""
    ids = _read_ids(folder)
    live: dict[str, Any] = {}
    for name in chosen(config):
        with _guest(name, live, tell):
            opening = Opening(folder, config, step, ids.get(name))
            live[name] = TRACKERS[name][0](opening)
    _write_ids(folder, ids | {name: each.id for name, each in live.items() if each.id})

    def told(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            for name in list(live):
                with _guest(name, live, tell):
                    live[name].log(numbers(event), event["step"])
        tell(event)

    try:
        yield told
    finally:
        for name in list(live):
            with _guest(name, live, tell):
                live[name].close()


def numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a record of `metrics.jsonl` by their path, such as `timing/seconds`."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[prefix + key] = value
    return {name: value for name, value in found.items() if name not in ("step", "total")}


@contextmanager
def _guest(name: str, live: dict[str, Any], tell: Progress) -> Iterator[None]:
    """Drop a tracker that fails, with one note: it must never end a run. What it prints is no result."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except Exception as error:
        live.pop(name, None)
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        text = f"tracker {name} failed and is left out: {said}; metrics.jsonl has everything"
        tell({"event": "note", "text": text})


def _installed(name: str) -> bool:
    return any(find_spec(package) is not None for package in TRACKERS[name][1])


def _read_ids(folder: Path) -> dict[str, str]:
    try:
        ids: dict[str, str] = json.loads((folder / IDS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return ids


def _write_ids(folder: Path, ids: Mapping[str, str]) -> None:
    if ids:
        staged = folder / f".{IDS_FILE}.tmp"
        staged.write_text(json.dumps(dict(ids)), encoding="utf-8")
        os.replace(staged, folder / IDS_FILE)
