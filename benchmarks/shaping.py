"""Shaping at 100 thousand and a million rows: seconds and peak memory under a memory limit of DuckDB.

    python benchmarks/shaping.py --rows 100000 --rows 1000000 --output benchmarks/results/shaping.json

Every measurement is a process of its own, so that its peak memory is its own. The rows carry half a kilobyte
of text that no shaping needs, a tenth of them are turns of trajectories, and some have no reward.
"""

import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import duckdb

from data_tools.shaping import Shaping, shape

SHAPINGS = {
    "mean": Shaping(),
    "red-drop, red-weight, staleness": Shaping(
        drop="balance", weight="red_weight(1) * staleness_halflife(3)"
    ),
    "shrunk, std, zero-variance": Shaping(baseline="shrunk", scale="std", drop="zero-variance"),
    "mean per template of extra": Shaping(baseline="avg(reward) over (partition by extra->>'template')"),
}

ROWS = """SELECT md5(i::VARCHAR) AS response_id, md5('g' || i // 8) AS group_id,
    CASE WHEN i // 8 % 10 = 0 THEN 't' || i % 3 END AS trajectory_id, (i % 8)::INTEGER AS turn,
    CASE WHEN i % 50 <> 7 THEN hash(i) % 1000 / 1000 END AS reward,
    'policy' || i % 3 AS policy, i % 5 AS policy_version, i % 7 AS staleness, 1.0::FLOAT AS temperature,
    'raw' AS logprob_kind, 100 AS n_prompt_tokens, 200 AS n_tokens, -10.0::DOUBLE AS behavior_logprob,
    repeat('word ' || i, 50) AS response, json_object('template', 't' || i % 50)::VARCHAR AS extra,
    'train' AS split, 'batch' || i // 100000 AS file, i % 100000 AS file_row
FROM range({rows}) t(i)"""


def measure(file: Path, name: str, memory: str) -> dict[str, object]:
    """Shape the rows of a file in this process."""
    con = duckdb.connect()
    con.execute(f"SET memory_limit = '{memory}'; SET temp_directory = '{file.parent / 'spill'}'")
    con.execute(f"CREATE VIEW rollouts AS FROM read_parquet('{file}')")
    start = time.perf_counter()
    kept = sum(batch.num_rows for batch in shape(con, SHAPINGS[name]))
    return {
        "kept": kept,
        "seconds": round(time.perf_counter() - start, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


@click.command()
@click.option("--rows", multiple=True, type=int, default=[100_000, 1_000_000], show_default=True)
@click.option("--memory", default="1GB", show_default=True, help="DuckDB's memory limit.")
@click.option("--output", type=click.Path(dir_okay=False), help="JSON file to write.")
@click.option("--one", nargs=2, hidden=True)
def main(rows: tuple[int, ...], memory: str, output: str | None, one: tuple[str, str] | None) -> None:
    """Time the shapings."""
    if one:
        print(json.dumps(measure(Path(one[0]), one[1], memory)))
        return
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in rows:
            file = Path(folder) / f"{count}.parquet"
            duckdb.execute(f"COPY ({ROWS.format(rows=count)}) TO '{file}' (ROW_GROUP_SIZE 4096)")
            for name in SHAPINGS:
                command = [sys.executable, __file__, "--memory", memory, "--one", str(file), name]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found.append({"rows": count, "shaping": name, **json.loads(done.stdout)})
                print(found[-1])
    if output:
        facts = {"machine": platform.processor() or platform.machine(), "duckdb": duckdb.__version__}
        Path(output).write_text(json.dumps({**facts, "memory_limit": memory, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
