"""What the demo leaves to look at: its exam in every run, a page of the log and one of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from offline_rec.demo.contest import Exam
from offline_rec.reporting.report import report
from offline_rec.reporting.run_evidence import read_ope
from offline_rec.sampling.comparison import Candidate, Comparison, Difference
from offline_rec.sampling.comparison_files import keep
from offline_rec.sampling.evaluate import compare, summarise

if TYPE_CHECKING:
    from data_tools.dataset import Dataset

DATASET_PAGE, RUN_PAGE = "dataset.html", "run.html"


def keep_evaluation(samples: Mapping[str, pa.Table], models: Mapping[str, Path], exam: Exam) -> None:
    """Keep the exam of all policies in each run, as `rec eval` does; the first of `samples` is the base."""
    base, *others = samples
    candidates = [
        Candidate(name, model, None if name == base else model.parent) for name, model in models.items()
    ]
    found = Comparison(
        rows=pa.concat_tables(samples.values()),
        asked={"prompts": len(exam.prompts), "samples": exam.samples, "reward": "exact"},
        summaries=[summarise(table) for table in samples.values()],
        differences=[
            Difference(base, name, "accuracy", compare(samples[base], samples[name])) for name in others
        ],
        reasons={},
    )
    keep(found, candidates, None)


def write_pages(out: Path, ds: "Dataset", run: Path, seed: int) -> None:
    """The page of the log, with the log-ratios of one run's policy, and the page of that run."""
    import data_tools

    ope = read_ope(data_tools.open(run))  # type: ignore[arg-type]  # a run directory, as `open` says
    score = None if ope is None else ope["policies"][0]["weights"]
    report(ds, out / DATASET_PAGE, seed=seed, score=score)
    report(run, out / RUN_PAGE, seed=seed)
