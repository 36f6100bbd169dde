"""`DATASET@SELECTION`: which rows are one side of a comparison."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from data_tools.errors import ConfigError, DataError
from data_tools.store.guard import check_expression
from data_tools.store.storage import open_storage
from data_tools.store.views import literal

if TYPE_CHECKING:
    from data_tools.dataset import Dataset

SNAPSHOT = "snapshot.json"
"""The file of a run directory that lists the files that it learned from."""

SPLITS = ("train", "holdout")

WAYS = (
    "a selection is a split (train, holdout), a batch or the beginning of its name (20261130), a span of "
    "them (20261101..20261130, ..20261130), a run directory (the batches that it read), or a condition "
    "(policy_version = 3)"
)


@dataclass(frozen=True)
class Side:
    """A dataset and the condition over `rollouts` that selects rows of it; `named` as the user wrote it."""

    named: str
    dataset: "Dataset"
    condition: str


def side(named: str) -> Side:
    """The rows that `DATASET` or `DATASET@SELECTION` names.

    A path may hold an @ itself: the shortest beginning that is a dataset is it. ConfigError for a selection
    that is none, DataError where there is no dataset.
    """
    import data_tools

    cut = [i for i, character in enumerate(named) if character == "@" and i]
    for end in (*cut, len(named)):
        if open_storage(named[:end]).exists("rec.json"):
            ds = data_tools.open(named[:end])
            return Side(named, ds, _condition(ds, named[end + 1 :]) if end < len(named) else "true")
    path = named[: cut[0]] if cut else named
    data_tools.open(path).batches()  # says why it is no dataset
    raise DataError(f"{path} is not a dataset", "name one that rec collect made")


def _condition(ds: "Dataset", selection: str) -> str:
    text = selection.strip()
    if not text:
        raise ConfigError(f"nothing is selected behind the @ of {ds.path}@", WAYS)
    if text in SPLITS:
        return f"split = {literal(text)}"
    if (Path(text) / SNAPSHOT).is_file():
        return _in(_read_by(ds, Path(text)))
    batches = ds.batches()
    first, dots, last = text.partition("..")
    if dots and not set(text) & set(" '\"()=<>"):
        chosen = [
            b for b in batches if (not first or b >= first) and (not last or b <= last or b.startswith(last))
        ]
        if not chosen:
            raise ConfigError(f"{ds.path} has no batch in {text}", _known(batches))
        return _in(chosen)
    chosen = [batch for batch in batches if batch.startswith(text)]
    if chosen:
        return _in(chosen)
    if text.replace("-", "").replace("_", "").isalnum() and text[0].isdigit():
        raise ConfigError(f"{ds.path} has no batch {text!r}", _known(batches))
    check_expression(text, f"{ds.path}@", subqueries=True)
    return f"({text}\n)"


def _read_by(ds: "Dataset", run: Path) -> list[str]:
    """The batches of a run's snapshot, which must all be there still."""
    try:
        content: Any = orjson.loads((run / SNAPSHOT).read_bytes())
        names = [str(file["name"]) for file in content["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{run / SNAPSHOT} cannot be read: {error}", "name another run") from error
    wanted = [
        name.removeprefix("rollouts/").removesuffix(".parquet")
        for name in names
        if name.startswith("rollouts/")
    ]
    gone = sorted(set(wanted) - set(ds.batches()))
    if gone:
        raise DataError(
            f"{len(gone)} of the {len(wanted)} batches that {run} read are not in {ds.path}: {gone[0]}, ...",
            "it read another dataset, or this one was compacted or had rows erased since",
        )
    return wanted


def _in(batches: list[str]) -> str:
    return f"file IN ({', '.join(map(literal, batches))})" if batches else "false"


def _known(batches: list[str]) -> str:
    if not batches:
        return "it has no batch yet"
    return f"its {len(batches)} batches go from {batches[0]} to {batches[-1]}"
