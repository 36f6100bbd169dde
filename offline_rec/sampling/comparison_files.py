"""Where a comparison of models is kept: Parquet beside the runs, and rows of a dataset."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_tools.errors import ConfigError
from data_tools.store.dataset import PolicyCard
from offline_rec.sampling.evaluate import Interval
from offline_rec.sampling.sampled_rows import write_jsonl
from offline_rec.sampling.sampler import SamplingParams

if TYPE_CHECKING:
    from data_tools.store.dataset import StoredDataset
    from offline_rec.sampling.comparison import Candidate, Comparison

SAMPLES, SUMMARY, FACTS = "samples.parquet", "summary.parquet", "eval.json"
RUN_FOLDER = "eval"
"""Folder of a run directory whose folders 1, 2, ... hold an evaluation each."""

_SUMMARY = pa.schema(
    [
        ("policy", pa.string()),
        ("compared_with", pa.string()),
        ("measure", pa.string()),
        ("k", pa.int32()),
        ("value", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
    ]
)


def check_free(
    candidates: Sequence["Candidate"], out: str | Path | None, log: "StoredDataset | None"
) -> None:
    """Refuse, before anything is sampled, what could not be kept in the end."""
    if out is not None and Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise ConfigError(f"{out} is there already", "name a new folder with --out")
    cards = {} if log is None else log.policies()
    for one in candidates:
        card = cards.get(one.name)
        if card is not None and card.tokenizer not in (None, _tokenizer(one)):
            raise ConfigError(
                f"the dataset has a policy {one.name!r} with another tokenizer",
                "log into another dataset, or give the model's directory another name",
            )


def keep(report: "Comparison", candidates: Sequence["Candidate"], out: str | Path | None) -> list[str]:
    """Write the report to `out`, or else to every run with that run's samples; the folders written."""
    if out is not None:
        return [_written(report, report.rows, Path(out).absolute())]
    written = []
    for run in dict.fromkeys(one.run for one in candidates if one.run is not None):
        names = [one.name for one in candidates if one.run == run]
        rows = report.rows.filter(pc.is_in(report.rows["policy"], pa.array(names)))
        written.append(_written(report, rows, run.absolute() / RUN_FOLDER, numbered=True))
    return written


def _written(report: "Comparison", rows: pa.Table, folder: Path, *, numbered: bool = False) -> str:
    """Write the files beside their place and move them there at once."""
    home = folder if numbered else folder.parent
    home.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=".eval-", dir=home))
    try:
        pq.write_table(rows, staged / SAMPLES, compression="zstd")
        pq.write_table(summary_table(report), staged / SUMMARY)
        facts = {name: value for name, value in report.facts().items() if name not in ("kept", "collected")}
        option = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
        (staged / FACTS).write_bytes(orjson.dumps(facts, option=option))
        staged.chmod(0o755)  # mkdtemp keeps a folder to its owner
        if not numbered:
            os.rename(staged, folder)
            return str(folder)
        return str(_numbered(staged, folder))
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _numbered(staged: Path, folder: Path) -> Path:
    """Move a folder to the next number; another evaluation may take that at the same time."""
    number = 1 + max((int(p.name) for p in folder.iterdir() if p.name.isdecimal()), default=0)
    while True:
        try:
            os.rename(staged, folder / str(number))
        except OSError:
            if not (folder / str(number)).exists():
                raise
            number += 1
        else:
            return folder / str(number)


def summary_table(report: "Comparison") -> pa.Table:
    """A row for each number of the report: of a policy, or of its difference to another."""
    rows: list[dict[str, Any]] = []

    def add(interval: Interval, **names: Any) -> None:
        rows.append(asdict(interval) | names)

    for summary in report.summaries:
        add(summary.accuracy, policy=summary.policy, measure="accuracy")
        add(summary.mean_reward, policy=summary.policy, measure="mean_reward")
        for k, interval in summary.pass_at.items():
            add(interval, policy=summary.policy, measure="pass_at", k=k)
    for one in report.differences:
        add(one.interval, policy=one.second, compared_with=one.first, measure=one.measure)
    return pa.Table.from_pylist(rows, schema=_SUMMARY)


def log_samples(
    log: "StoredDataset", rows: pa.Table, candidates: Sequence["Candidate"], params: SamplingParams
) -> int:
    """Collect the samples into a dataset, with a card of each policy; the rows that it gained."""
    from data_tools.collecting.collect import collect

    for one in candidates:
        known = log.policies().get(one.name, PolicyCard(name=one.name)).model_dump()
        facts = {"model": str(one.model), "tokenizer": _tokenizer(one), "sampling": asdict(params)}
        log.write_policy(PolicyCard(**(known | facts)))
    with tempfile.TemporaryDirectory(prefix="rec-eval-") as folder:
        path = Path(folder) / "eval.jsonl"
        write_jsonl(rows, path)
        return collect([str(path)], log, format="rows").total.kept


def _tokenizer(one: "Candidate") -> str:
    from offline_rec.data.fingerprint import fingerprint
    from offline_rec.models.loading import load_tokenizer

    return fingerprint(load_tokenizer(one.model))
