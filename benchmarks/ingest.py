"""A log into Parquet: `rec collect` against pandas, Hugging Face datasets and bare DuckDB, in one run.

    pip install pandas datasets
    python benchmarks/ingest.py --gib 2 --output benchmarks/results/ingest.json

Each side is a process of its own and reads the same file: rows with token ids and log-probs, and calls of a
chat server with a log-prob each token. The others parse and write; they check, hash, join and count nothing.
DuckDB is measured three ways: with the schema given, with the schema found by itself, and so with its default
compression. Sides take turns, so that a busy machine is busy for all of them.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
from logs import COLUMNS, write_calls, write_rows
from measuring import Measured, machine, measure, median, rec

SAMPLE_ROWS = 200

PANDAS = "import sys, pandas; pandas.read_json(sys.argv[1], lines=True).to_parquet(sys.argv[2])"
DATASETS = """
import sys, tempfile
from datasets import disable_progress_bars, load_dataset
disable_progress_bars()
with tempfile.TemporaryDirectory(dir=sys.argv[3]) as cache:
    load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=cache).to_parquet(sys.argv[2])
"""
DUCKDB = """
import sys, duckdb
given = f", columns={sys.argv[4]}" if sys.argv[4] else ""
duckdb.sql(
    f"COPY (SELECT * FROM read_json('{sys.argv[1]}', format='newline_delimited'{given}))"
    f" TO '{sys.argv[2]}' (FORMAT parquet, COMPRESSION {sys.argv[3]})"
)
"""

Side = Callable[[Path, Path], Measured]


def sides(*, flat: bool) -> dict[str, Side]:
    """Name -> a run from a log to a target."""

    def duckdb(compression: str, columns: str) -> Side:
        return lambda log, to: measure(DUCKDB, str(log), str(to), compression, columns)

    found: dict[str, Side] = {
        "rec": lambda log, to: rec("collect", str(log), "--into", str(to)),
        "datasets": lambda log, to: measure(DATASETS, str(log), str(to), str(log.parent)),
        "duckdb": duckdb("zstd", ""),
        "duckdb, snappy": duckdb("snappy", ""),
    }
    if flat:
        found["duckdb, schema given"] = duckdb("zstd", str(COLUMNS))
        found["pandas"] = lambda log, to: measure(PANDAS, str(log), str(to))
    return found


def compare(folder: Path, gib: float, rounds: int, *, flat: bool) -> dict[str, object]:
    """Every side on one log, in turns."""
    log, write = folder / "log.jsonl", write_rows if flat else write_calls
    write(log, SAMPLE_ROWS, seed=0)
    rows = int(gib * 2**30 / log.stat().st_size * SAMPLE_ROWS)
    write(log, rows, seed=1)
    found: dict[str, list[Measured]] = {}
    for number in range(rounds):
        for name, run in sides(flat=flat).items():
            target = folder / f"{number}-{len(found)}-{name.split(',')[0]}"
            found.setdefault(name, []).append(run(log, target))
            click.echo(f"  {name:<22} {found[name][-1]}", err=True)
            _remove(target)
    size = log.stat().st_size
    log.unlink()
    seconds = {name: median([run.seconds for run in runs]) for name, runs in found.items()}
    return {
        "rows": rows,
        "log_mib": round(size / 2**20),
        "rows_per_second": {name: round(rows / took) for name, took in seconds.items()},
        "peak_mib": {name: max(run.peak_mib for run in runs) for name, runs in found.items()},
        "rec_is_faster_by": {
            name: round(took / seconds["rec"], 2) for name, took in seconds.items() if name != "rec"
        },
        "runs": {name: [asdict(run) for run in runs] for name, runs in found.items()},
    }


def _remove(target: Path) -> None:
    if target.is_dir():
        for path in sorted(target.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        target.rmdir()
    else:
        target.unlink()


@click.command()
@click.option("--gib", default=2.0, show_default=True, help="Size of the log of rows.")
@click.option("--nested-gib", default=0.5, show_default=True, help="Size of the log of calls.")
@click.option("--rounds", default=1, show_default=True, help="Turns of each side; the median counts.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the result.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the files are made.")
def main(gib: float, nested_gib: float, rounds: int, output: Path | None, folder: Path | None) -> None:
    """Measure every side, and print how much faster `rec` is."""
    result: dict[str, object] = {"machine": machine("duckdb", "pandas", "datasets", "pyarrow", "pysimdjson")}
    with tempfile.TemporaryDirectory(dir=folder) as work:
        for name, size, flat in (("rows", gib, True), ("chat with log-probs", nested_gib, False)):
            if size:
                result[name] = found = compare(Path(work), size, rounds, flat=flat)
                click.echo(f"{name}: {found['rows']} in {found['log_mib']} MiB")
                for side, rate in found["rows_per_second"].items():
                    faster = found["rec_is_faster_by"].get(side, 1)
                    peak = found["peak_mib"][side]
                    click.echo(f"  {side:<22} {rate:>8} rows/s  peak {peak:>8.0f} MiB  rec is {faster}x")
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
