"""Rows of a dataset to padded and to packed tensors: `RowStore` beside `datasets` in torch format.

    python benchmarks/rows.py --output benchmarks/results/rows.json

Both sides read prompt ids, response ids and log-probs of the same batches of the same rows, in turns in one
process: `rec` from the Parquet files of the dataset, `datasets` by batches and row by row from its own
uncompressed Arrow copy of them, which is made before and not counted. Needs `datasets`
(`pip install datasets==5.2.0`). Takes about three minutes.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from measuring import machine, median
from scale import write_dataset
from torch.nn.utils.rnn import pad_sequence

import data_tools
from offline_rec.data.ragged import Ragged
from offline_rec.data.rows import RowStore

COLUMNS = ("prompt_ids", "response_ids", "behavior_logprobs")
ROWS = 16_384
BATCH = 256
Batches = Iterator[tuple[torch.Tensor, ...]]


def rec(dataset: Path, order: Any, *, packed: bool) -> Batches:
    """Batches through a store of their own, so that nothing is read before."""
    store = RowStore(data_tools.open(dataset))
    for part in np.split(order, range(BATCH, len(order), BATCH)):
        rows = store.take(np.zeros(len(part), np.int64), part)
        ragged: list[Ragged] = [rows.prompt_ids, rows.response_ids, rows.behavior]
        arrays = [r.values if packed else r.pad(int(r.lengths.max())) for r in ragged]
        # A view of a row group is not writable, which torch warns of and training never does.
        yield tuple(torch.from_numpy(a if a.flags.writeable else a.copy()) for a in arrays)


def hugging_face(table: Any, order: Any, *, packed: bool) -> Batches:
    """Batches of a `datasets.Dataset`, whose rows are tensors already."""
    for part in np.split(order, range(BATCH, len(order), BATCH)):
        rows = table[part.tolist()]
        lists = [list(rows[name]) for name in COLUMNS]
        yield tuple(torch.cat(one) if packed else pad_sequence(one, batch_first=True) for one in lists)


def row_by_row(table: Any, order: Any, *, packed: bool) -> Batches:
    """The same batches from rows that are taken one at a time, as a loop over the dataset does."""
    for part in np.split(order, range(BATCH, len(order), BATCH)):
        rows = [table[row] for row in part.tolist()]
        lists = [[row[name] for row in rows] for name in COLUMNS]
        yield tuple(torch.cat(one) if packed else pad_sequence(one, batch_first=True) for one in lists)


def timed(batches: Batches) -> tuple[float, float]:
    """Seconds on the clock, and of CPU."""
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in batches:
        pass
    return time.perf_counter() - clock, time.process_time() - cpu


def measure(dataset: Path, rows: int, rounds: int) -> dict[str, Any]:
    """All kinds of batches, both sides in turns."""
    from datasets import Dataset

    files = [str(path) for path in dataset.glob("rollouts/*.parquet")]
    with tempfile.TemporaryDirectory() as cache:
        table = Dataset.from_parquet(files, cache_dir=cache, columns=list(COLUMNS)).with_format("torch")
        orders = {"in order": np.arange(rows), "shuffled": np.random.default_rng(0).permutation(rows)}
        found = {}
        for name, order in orders.items():
            for packed in (False, True):
                kind = f"{'packed' if packed else 'padded'}, {name}"
                found[kind] = _in_turns(
                    lambda: rec(dataset, order, packed=packed),  # noqa: B023 - called at once
                    lambda: hugging_face(table, order, packed=packed),  # noqa: B023
                    lambda: row_by_row(table, order, packed=packed),  # noqa: B023
                    rows=rows,
                    rounds=rounds,
                )
                click.echo(f"{kind}: {found[kind]}")
    return found


def _in_turns(*sides: Callable[[], Batches], rows: int, rounds: int) -> dict[str, Any]:
    """Ours, then theirs by batches and by rows."""
    for batches in zip(*(side() for side in sides), strict=True):
        for other in batches[1:]:
            assert all(torch.equal(a, b) for a, b in zip(batches[0], other, strict=True))
    turns = [[timed(side()) for side in sides] for _ in range(rounds)]
    found: dict[str, Any] = {"rows_per_second": round(rows / median([turn[0][0] for turn in turns]))}
    for at, name in enumerate(("datasets", "datasets_row_by_row"), start=1):
        found[f"{name}_rows_per_second"] = round(rows / median([turn[at][0] for turn in turns]))
        found[f"times_{name}"] = round(median([turn[at][0] / turn[0][0] for turn in turns]), 1)
        found[f"times_{name}_cpu"] = round(median([turn[at][1] / turn[0][1] for turn in turns]), 1)
    return found


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
        output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
