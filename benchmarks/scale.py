"""A fit on 10 thousand and on a million rows: time to the first step, rate of steps, and peak memory.

    python benchmarks/scale.py --output benchmarks/results/scale.json

The datasets are written straight in the format that `rec collect` writes: groups of eight, 20 tokens of
prompt and 200 of response with their log-probs, row groups of 4096. Every fit is a process of its own, its
children counted with it; sizes take turns. The model is as small as one can be, so that data weighs most.
Takes about eight minutes on two quiet cores, and 2 GB of disk; two minutes with `--steps 2`, which leaves the
rate of steps out.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
from collect import tiny_model
from logs import TOKENS
from measuring import machine, measure, median

import data_tools
from data_tools.schema import ROLLOUTS, ROW_GROUP_ROWS
from offline_rec.models.quiet import quiet

SIBLINGS, PROMPT = 8, 20
VOCABULARY = 512
ROWS_A_BATCH = 250_000
STEPS, GROUPS = 150, 32
"""More groups than a window of the shuffle has, so that row groups are read in between; as many a step as by
default."""

FIT = """
import json, resource, sys, time
began = time.perf_counter()
def used():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
import offline_rec
from offline_rec.config import FitConfig
dataset, model, out, steps, groups, told = sys.argv[1:]
marks = []
def progress(event):
    if event["event"] == "step" and event["step"]:
        marks.append((time.perf_counter() - began, used()))
if __name__ == "__main__":
    config = FitConfig(dataset=dataset, model=model, out=out, steps=int(steps), groups_per_step=int(groups))
    offline_rec.fit(config, progress=progress)
    with open(told, "w") as file:
        json.dump(marks, file)
"""
"""Fits, and tells when each step was done: seconds, and CPU seconds, since the process began to import."""


def write_dataset(folder: Path, rows: int, *, seed: int) -> None:
    """A dataset as collecting leaves it, its columns made of arrays."""
    ds = data_tools.open(folder, create=True)
    for start in range(0, rows, ROWS_A_BATCH):
        with ds.writer() as writer:
            for first in range(start, min(start + ROWS_A_BATCH, rows), ROW_GROUP_ROWS):
                stop = min(first + ROW_GROUP_ROWS, start + ROWS_A_BATCH, rows)
                writer.rollouts(_rows(np.arange(first, stop), rows, np.random.default_rng([seed, first])))
            writer.commit()


def _rows(number: Any, rows: int, draw: np.random.Generator) -> pa.Table:
    count = len(number)
    group = number // SIBLINGS
    prompt = 3 + (group[:, None] * 31 + np.arange(PROMPT)) % (VOCABULARY - 3)
    hashes = [f"{int(g) * 0x9E3779B97F4A7C15 % 2**64:016x}" for g in group]
    same = dict.fromkeys(("policy", "logprob_kind", "finish_reason"))
    same |= {"policy": "bench", "logprob_kind": "processed", "finish_reason": "stop"}
    logprobs = -draw.exponential(0.5, count * TOKENS)
    columns = {
        "response_id": [f"{int(n) * 0xD1342543DE82EF95 % 2**64:016x}{n:012x}" for n in number],
        "group_id": hashes,
        "prompt_hash": hashes,
        "prompt_cluster": hashes,
        "prompt": [f"Prompt number {g}: what comes next?" for g in group],
        "prompt_ids": _lists(prompt.ravel(), PROMPT, pa.int32()),
        "response_ids": _lists(draw.integers(3, VOCABULARY, count * TOKENS), TOKENS, pa.int32()),
        "behavior_logprobs": _lists(logprobs, TOKENS, pa.float32()),
        "reward": draw.integers(0, 2, count).astype(float),
        "policy_version": number * 8 // rows,
        "temperature": np.ones(count),
        "source_file": ["log.jsonl"] * count,
        "source_row": number,
        "flags": [[]] * count,
        "n_prompt_tokens": np.full(count, PROMPT),
        "n_tokens": np.full(count, TOKENS),
        "behavior_logprob": logprobs.reshape(count, TOKENS).sum(1),
        **{name: [value] * count for name, value in same.items()},
    }
    return pa.table({name: pa.array(values, ROLLOUTS.field(name).type) for name, values in columns.items()})


def _lists(values: Any, length: int, of: pa.DataType) -> pa.Array:
    offsets = np.arange(0, len(values) + 1, length, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values).cast(of, safe=False))


def fit(dataset: Path, model: Path, folder: Path, steps: int) -> dict[str, Any]:
    """One fit of a dataset, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        out, told = Path(work) / "run", Path(work) / "told.json"
        cost = measure(FIT, *map(str, (dataset, model, out, steps, GROUPS, told)))
        marks = np.array(json.loads(told.read_text()))
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    first, between = marks[0].tolist(), (marks[-1] - marks[0]).tolist()
    found = {
        "first_step_seconds": round(first[0], 2),
        "first_step_cpu_seconds": round(first[1], 2),
        "peak_mib": cost.peak_mib,
        "whole": asdict(cost),
    }
    if len(marks) > 2:
        rows = (len(marks) - 1) * GROUPS * SIBLINGS
        waited = sum(record["timing"]["seconds_waited"] for record in records if record["step"] > 1)
        found["rows_per_second"] = round(rows / between[0], 1)
        found["rows_per_cpu_second"] = round(rows / between[1], 1)
        found["share_of_time_waited_for_data"] = round(waited / between[0], 4)
    return found


def ratios(rounds: list[dict[int, dict[str, Any]]], small: int, large: int) -> dict[str, float]:
    """Large over small, the median of neighbours in time."""
    names = [name for name in rounds[0][small] if name not in ("whole", "share_of_time_waited_for_data")]
    return {name: round(median([one[large][name] / one[small][name] for one in rounds]), 3) for name in names}


@click.command()
@click.option("--rows", nargs=2, type=int, default=(10_000, 1_000_000), show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--steps", default=STEPS, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the result.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Where the files are made (default: temporary)."
)
def main(rows: tuple[int, int], rounds: int, steps: int, output: Path | None, folder: Path | None) -> None:
    """Fit on a small and on a large dataset, in turns."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    done: list[dict[int, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(dir=folder) as made:
        work = Path(made)
        with quiet():
            tiny_model(work / "model", VOCABULARY)
        for size in rows:
            write_dataset(work / f"rows-{size}", size, seed=1)
        for _ in range(rounds):
            done.append({size: fit(work / f"rows-{size}", work / "model", work, steps) for size in rows})
            for size in rows:
                click.echo(f"{size:>9} rows: {done[-1][size]}")
    found = ratios(done, *rows)
    click.echo(f"{rows[1]} rows over {rows[0]}: {found}")
    if output:
        versions = machine("duckdb", "pyarrow", "torch")
        content = {"machine": versions, "rows": rows, "ratios": found, "rounds": done}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
