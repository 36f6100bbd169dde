"""A run as lineage sees it: what it recorded, the weights that it kept, and where it began."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import data_tools
from data_tools.errors import DataError, RecError
from data_tools.run_directory import MARKS
from data_tools.store.connection import open_duckdb
from data_tools.store.views import literal
from offline_rec.cards.markdown import front_matter_of
from offline_rec.config import CONFIG_FILE
from offline_rec.training import checkpoint

if TYPE_CHECKING:
    import duckdb
    import pyarrow.dataset as pads

    from data_tools.dataset import Dataset

CHECKPOINTS = "checkpoints"
ROUNDS = "rounds"
"""Folder of a loop with its fits, each a run directory."""

MADE = (checkpoint.MODEL_FOLDER, checkpoint.ADAPTER_FOLDER)
"""Folders of a run with the weights that it ends with."""

INDEX = "index/train/rows.arrow"
DEPTH = 4
"""Folders from a model's upwards among which its run is looked for: RUN/checkpoints/step-N/model is deep."""

USED = """CREATE VIEW used AS SELECT *, parse_filename(filename) AS part FROM (
    SELECT NULL::BIGINT AS step, NULL::VARCHAR AS response_id, NULL::DOUBLE AS weight,
        NULL::FLOAT AS mean_ratio, NULL::FLOAT AS kept_share, NULL::VARCHAR AS policy,
        NULL::BIGINT AS policy_version, NULL::VARCHAR AS filename WHERE false
    {lineage})"""


@dataclass(frozen=True)
class Weights:
    """A folder with weights, as they were after update `step`; None where nothing tells which."""

    path: Path
    step: int | None

    def hold(self, first: int) -> bool:
        """Whether they may hold what update `first` learned; where the update is unknown, they may."""
        return self.step is None or self.step >= first


class TracedRun:
    """The run directory of a fit or of a loop, whose rounds are fits with one count of updates."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise DataError(f"{path} does not exist", "name the run directory of a fit or a loop")
        if not is_run(self.path):
            raise DataError(
                f"{path} is no run directory: it has none of {', '.join(MARKS)}",
                "name what `rec fit --out` or the `out` of a loop named",
            )
        rounds = sorted((self.path / ROUNDS).glob("*")) if (self.path / ROUNDS).is_dir() else []
        self.fits = [path for path in rounds if is_run(path)] or [self.path]
        # A loop's own lineage joins that of its rounds, part by part under the same names.
        found = [path for fit in self.fits for path in _parts(fit)]
        self.fit_of = {path.name: path.parent.parent for path in found}
        self._parts = {path.name: path for path in (*found, *_parts(self.path))}
        self.config = _config(self.path)

    def connect(self) -> "duckdb.DuckDBPyConnection":
        """A fresh connection with the view `used`: a row a response and update, `part` its file."""
        con = open_duckdb()
        files = ", ".join(literal(str(path.absolute())) for path in self._parts.values())
        scan = f"UNION ALL BY NAME FROM read_parquet([{files}], union_by_name = true, filename = true)"
        con.execute(USED.format(lineage=scan if files else ""))
        return con

    def weights(self) -> list[Weights]:
        """All weights that were kept: checkpoints by their update, then what the run ended with."""
        return [one for folder in dict.fromkeys([*self.fits, self.path]) for one in _weights(folder)]

    def dataset(self) -> "Dataset | None":
        """The dataset that was learned from, where it still is."""
        try:
            return data_tools.open(self.config["dataset"]) if self.config.get("dataset") else None
        except RecError:
            return None

    def start(self) -> Path | None:
        """The weights that the run began with."""
        named = self.config.get("continue_from") or self.config.get("model")
        return Path(named) if named else None


def is_run(folder: Path) -> bool:
    """Whether a folder is the run directory of a fit or a loop."""
    return any((folder / mark).exists() for mark in MARKS)


def owner(weights: Path) -> tuple[Path, int | None] | None:
    """The run directory that weights are from, and after which of its updates; None if from no run."""
    whole = weights.absolute()
    above = [whole, *whole.parents][: DEPTH + 1]
    run = next((folder for folder in above if is_run(folder) and not _is_checkpoint(folder)), None)
    if run is None:
        return None
    steps = (folder.name.removeprefix("step-") for folder in above if _is_checkpoint(folder))
    step = next((int(name) for name in steps if name.isdecimal()), None)
    return run, updates_of(whole) if step is None else step


def updates_of(folder: Path) -> int | None:
    """After which update the weights in a folder are, as their card says; None if it does not."""
    facts = front_matter_of(folder / "README.md").get("rec")
    updates = facts.get("updates") if isinstance(facts, dict) else None
    return updates if isinstance(updates, int) else None


def advantages(fit: Path) -> "pads.Dataset | None":
    """The index of a fit, to be scanned for its columns `response_id` and `advantage`; None if removed."""
    import pyarrow.dataset as pads

    path = fit / INDEX
    return pads.dataset(str(path), format="arrow") if path.exists() else None


def _is_checkpoint(folder: Path) -> bool:
    return folder.parent.name == CHECKPOINTS


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / "lineage").glob("*.parquet"))


def _weights(folder: Path) -> Iterator[Weights]:
    root = folder / CHECKPOINTS
    for step in checkpoint.steps(root):
        yield Weights(root / f"step-{step}", step)
    for name in MADE:
        if (folder / name).is_dir():
            yield Weights(folder / name, updates_of(folder / name))


def _config(folder: Path) -> dict[str, Any]:
    """The configuration of a fit or a loop as plain values; {} where there is none."""
    try:
        found = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
