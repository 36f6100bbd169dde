"""Datasets of logged responses: collecting, SQL, shaping. Importing it loads neither Arrow nor DuckDB nor
torch.
"""

from typing import TYPE_CHECKING, Any, cast

from data_tools.errors import ConfigError, DataError, MissingExtra, RecError

if TYPE_CHECKING:
    from os import PathLike

    from data_tools.collecting.collect import CollectReport, collect
    from data_tools.dataset import Dataset
    from data_tools.drift.diff import diff
    from data_tools.shaping import Shaping
    from data_tools.store.dataset import DatasetInfo, PolicyCard

__all__ = [
    "CollectReport",
    "ConfigError",
    "DataError",
    "Dataset",
    "DatasetInfo",
    "MissingExtra",
    "PolicyCard",
    "RecError",
    "Shaping",
    "collect",
    "diff",
    "open",
]

_HOME = {
    "CollectReport": "data_tools.collecting.collect",
    "Dataset": "data_tools.dataset",
    "DatasetInfo": "data_tools.store.dataset",
    "PolicyCard": "data_tools.store.dataset",
    "Shaping": "data_tools.shaping",
    "collect": "data_tools.collecting.collect",
    "diff": "data_tools.drift.diff",
}


def open(path: "str | PathLike[str]", create: bool = False, holdout: float | None = None) -> "Dataset":
    """Open a dataset (or the run directory of a fit) at a local path or an fsspec URL.

    With `create` an empty dataset is made where there is none; `holdout` is then the share of prompts that
    training never sees (0.1). Raises DataError if there is no dataset, or one of a newer format version.
    """
    from data_tools.dataset import Dataset
    from data_tools.run_directory import RunDirectory, is_run
    from data_tools.store.dataset import open_stored
    from data_tools.store.storage import open_storage

    storage = open_storage(path)
    if not create and is_run(storage):
        return cast("Dataset", RunDirectory(storage))  # answers SQL alike, refuses the rest with a DataError
    stored = open_stored(storage, create=create, holdout=holdout)
    return Dataset(stored.storage, stored.info)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'data_tools' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
