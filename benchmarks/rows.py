"""Rows of a dataset to arrays for training: `RowStore` beside `datasets` in torch format.

    python benchmarks/rows.py --output benchmarks/results/rows.json

All sides give prompt ids, response ids and log-probs of every row once, as tensors, in turns in one process.

- `streamed`, the comparison of like with like: both read the same Parquet files, prepare nothing and shuffle
  within a bounded window. `datasets` as its guide has it: `load_dataset(..., streaming=True)`, `shuffle` with
  a buffer of 10,000, torch format, and a `DataLoader` of padded batches of 8 (the default of the Hugging Face
  trainer). Ours as a fit has it: row groups shuffled by windows of 8, steps of 256 rows, flat arrays.
- `row by row`: in order, `for row in table`; from here on `datasets` reads its own uncompressed Arrow copy of
  the files, which is made before and not counted, while ours still decodes Parquet.
- `loader of 8`: as `streamed`, from the copy, in a random order over all rows; ours in the same order.
- `batches of 256`: 256 rows of the copy at a time, as ours; padded or joined, as ours.
- `decoded`: as `loader of 8`, with the row groups of ours decoded before, as a window's are for most steps.

Needs `datasets` (`pip install datasets==5.2.0`). Takes about five minutes.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from measuring import machine, median
from scale import write_dataset
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import data_tools
from data_tools.schema import ROW_GROUP_ROWS
from offline_rec.data.ragged import Ragged
from offline_rec.data.rows import RowStore

COLUMNS = ("prompt_ids", "response_ids", "behavior_logprobs")
ROWS = 65_536
STEP, BATCH = 256, 8
WINDOW, BUFFER = 8, 10_000
Batch = tuple[torch.Tensor, ...]
Batches = Iterator[Batch]


def steps(order: Any) -> list[Any]:
    """The rows of each step."""
    return np.split(order, range(STEP, len(order), STEP))


def windowed(rows: int, draw: np.random.Generator) -> Any:
    """All rows as a fit visits them: row groups in a random order, rows mixed within a window of them."""
    groups = draw.permutation(-(-rows // ROW_GROUP_ROWS))
    parts = [
        np.concatenate([np.arange(rows)[g * ROW_GROUP_ROWS : (g + 1) * ROW_GROUP_ROWS] for g in window])
        for window in np.split(groups, range(WINDOW, len(groups), WINDOW))
    ]
    return np.concatenate([draw.permutation(part) for part in parts])


def rec(store: RowStore, order: Any, *, padded: bool = False) -> Batches:
    """Steps of rows, each column flat or as one rectangle."""
    for part in steps(order):
        rows = store.take(np.zeros(len(part), np.int64), part)
        ragged: list[Ragged] = [rows.prompt_ids, rows.response_ids, rows.behavior]
        arrays = [r.pad(int(r.lengths.max())) if padded else r.values for r in ragged]
        # A view of a row group is not writable, which torch warns of and training never does.
        yield tuple(torch.from_numpy(a if a.flags.writeable else a.copy()) for a in arrays)


def collate(rows: list[dict[str, torch.Tensor]]) -> Batch:
    return tuple(pad_sequence([row[name] for row in rows], batch_first=True) for name in COLUMNS)


def loader(source: Any, order: Any = None) -> Batches:
    """Padded batches through a `DataLoader`."""
    chosen = None if order is None else order.tolist()
    yield from DataLoader(source, batch_size=BATCH, sampler=chosen, collate_fn=collate)


def streamed(files: list[str], cache: str) -> Batches:
    """The Parquet files themselves, shuffled in a buffer."""
    from datasets import load_dataset

    source = load_dataset(
        "parquet", data_files=files, split="train", streaming=True, columns=list(COLUMNS), cache_dir=cache
    )
    return loader(source.shuffle(seed=0, buffer_size=BUFFER).with_format("torch"))


def row_by_row(table: Iterable[dict[str, torch.Tensor]]) -> Batches:
    """Rows one at a time, as they are."""
    return (tuple(row[name] for name in COLUMNS) for row in table)


def batches_of(table: Any, order: Any, *, padded: bool) -> Batches:
    """Batches as large as a step of ours."""
    for part in steps(order):
        rows = table[part.tolist()]
        lists = [list(rows[name]) for name in COLUMNS]
        yield tuple(pad_sequence(one, batch_first=True) if padded else torch.cat(one) for one in lists)


def timed(batches: Batches) -> tuple[float, float]:
    """Seconds on the clock, and of CPU."""
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in batches:
        pass
    return time.perf_counter() - clock, time.process_time() - cpu


def sums(batches: Batches) -> Any:
    """The sum of each column, which no order and no padding changes."""
    return sum(np.array([float(column.double().sum()) for column in batch]) for batch in batches)


def measure(dataset: Path, rows: int, rounds: int) -> dict[str, Any]:
    """All comparisons, both sides in turns."""
    from datasets import Dataset

    files = [str(path) for path in sorted(dataset.glob("rollouts/*.parquet"))]
    ds = data_tools.open(dataset)
    draw = np.random.default_rng(0)
    order, mixed, anywhere = np.arange(rows), windowed(rows, draw), draw.permutation(rows)
    warm = RowStore(ds, cache_bytes=4 << 30)
    for _ in rec(warm, order):
        pass
    with tempfile.TemporaryDirectory() as cache:
        table = Dataset.from_parquet(files, cache_dir=cache, columns=list(COLUMNS)).with_format("torch")
        # Each way has a store of its own, so that nothing is read before.
        ways: dict[str, tuple[Callable[[], Batches], Callable[[], Batches]]] = {
            "streamed": (
                lambda: rec(RowStore(ds, cache_blocks=WINDOW + 1), mixed),
                lambda: streamed(files, cache),
            ),
            "row by row": (lambda: rec(RowStore(ds), order), lambda: row_by_row(table)),
            "loader of 8": (lambda: rec(RowStore(ds), anywhere), lambda: loader(table, anywhere)),
            "batches of 256": (
                lambda: rec(RowStore(ds), anywhere),
                lambda: batches_of(table, anywhere, padded=False),
            ),
            "batches of 256, padded": (
                lambda: rec(RowStore(ds), anywhere, padded=True),
                lambda: batches_of(table, anywhere, padded=True),
            ),
            "decoded": (lambda: rec(warm, anywhere), lambda: loader(table, anywhere)),
        }
        found = {}
        for name, (ours, theirs) in ways.items():
            np.testing.assert_allclose(sums(ours()), sums(theirs()), rtol=1e-9)
            turns = [(timed(ours()), timed(theirs())) for _ in range(rounds)]
            found[name] = _compared(turns, rows)
            click.echo(f"{name}: {found[name]}")
    return found


def _compared(turns: list[tuple[tuple[float, float], tuple[float, float]]], rows: int) -> dict[str, Any]:
    ratios = sorted(theirs[0] / ours[0] for ours, theirs in turns)
    return {
        "rows_per_second": round(rows / median([ours[0] for ours, _ in turns])),
        "datasets_rows_per_second": round(rows / median([theirs[0] for _, theirs in turns])),
        "times_datasets": round(median(ratios), 1),
        "least": round(ratios[0], 1),
        "most": round(ratios[-1], 1),
        "times_datasets_cpu": round(median([theirs[1] / ours[1] for ours, theirs in turns]), 1),
    }


@click.command()
@click.option("--rows", default=ROWS, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the result.")
def main(rows: int, rounds: int, output: Path | None) -> None:
    """Read the same rows both ways."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder) / "ds", rows, seed=1)
        found = measure(Path(folder) / "ds", rows, rounds)
    if output:
        content = {"machine": machine("torch", "datasets", "pyarrow"), "rows": rows, "ways": found}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
