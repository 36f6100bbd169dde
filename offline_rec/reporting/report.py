"""`report`: a dataset or a run as one HTML page."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import data_tools
from data_tools.errors import ConfigError
from data_tools.run_directory import RunDirectory
from data_tools.store.storage import discard, open_storage, write_error

if TYPE_CHECKING:
    from data_tools.dataset import Dataset

Progress = Callable[[str, int, int], None]
"""Called with what is being done, parts done and parts in all."""

Subject = Union[str, "os.PathLike[str]", "Dataset"]


def _silent(phase: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class ReportFile:
    """The page that was written: its `path`, what it is about, its `bytes` and the `seconds` it took."""

    path: str
    about: str
    bytes: int
    seconds: float

    def facts(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def report(
    subject: Subject,
    out: str | Path,
    *,
    groups: int = 20,
    seed: int = 0,
    score: str | None = None,
    progress: Progress = _silent,
) -> ReportFile:
    """Write the page of a dataset or of a run directory to the file `out`, whole or not at all.

    `groups`: how many groups are shown, a seeded choice. `score`: whose log-ratios colour the tokens of a
    dataset, the beginning of a name below `logprobs/`; by default the scores of most rows. Raises ConfigError
    if there are no such scores.
    """
    from offline_rec.reporting.dataset_page import dataset_page
    from offline_rec.reporting.page import render
    from offline_rec.reporting.run_page import run_page

    if groups < 0:
        raise ConfigError(f"groups must be at least 0, got {groups}", "20 is the default")
    began = time.perf_counter()
    opened: Any = data_tools.open(subject) if isinstance(subject, str | os.PathLike) else subject
    if isinstance(opened, RunDirectory):
        if score is not None:
            raise ConfigError("a run has the scores of its own policy", "leave --score out")
        about, page = "run", run_page(opened, count=groups, seed=seed, progress=progress)
    else:
        about = "dataset"
        page = dataset_page(opened, count=groups, seed=seed, score=score, progress=progress)
    html = render(page)
    _write(str(out), html)
    return ReportFile(str(out), about, len(html), round(time.perf_counter() - began, 2))


def _write(target: str, content: bytes) -> None:
    folder, slash, name = target.rpartition("/")
    storage = open_storage(folder + slash or ".")
    staged = storage.staging_path(name)
    try:
        Path(staged).write_bytes(content)
        storage.publish(staged, name)
    except OSError as error:
        raise write_error(target, error) from error
    finally:
        discard(staged)
