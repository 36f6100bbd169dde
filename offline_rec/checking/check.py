"""`check`: what is wrong with a dataset, with a model or without."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from data_tools.checking import Findings, Report, check_rows
from data_tools.checking.check import SAMPLE, drawn

if TYPE_CHECKING:
    from data_tools.dataset import Dataset

Progress = Callable[[int, int], None]
"""Called with sampled rows done and sampled rows in all."""


def check(
    ds: "Dataset",
    model: str | Path | None = None,
    *,
    sample: int = SAMPLE,
    seed: int = 0,
    where: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check the rows where an SQL condition holds, a seeded sample of them token by token and with the model.

    Memory does not grow with the dataset. Raises DataError if the model does not load, ConfigError if the
    condition is none.
    """
    findings = Findings.about(ds.path, None if model is None else str(model))
    rows = drawn(ds, sample, seed=seed, where=where)
    report = check_rows(rows, findings, where=where)
    if model is not None:
        from offline_rec.checking.with_model import check_with_model  # torch loads here

        report.model = str(model)
        report.logprobs = check_with_model(rows, model, findings, where=where, progress=progress)
    report.findings = findings.sorted()
    return report
