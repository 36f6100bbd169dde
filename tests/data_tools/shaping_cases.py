"""Rollouts in memory to shape, and the reference that shaping is compared with, in plain Python."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from data_tools.schema import ROLLOUTS
from data_tools.shaping import Shaping, prepare, shape

VIEW = pa.schema(
    [
        *ROLLOUTS,
        pa.field("age_days", pa.float64()),
        pa.field("staleness", pa.int64()),
        pa.field("split", pa.string()),
        pa.field("file", pa.string()),
        pa.field("file_row", pa.int64()),
    ]
)
DEFAULTS = {
    "group_id": "g",
    "prompt_hash": "h",
    "logprob_kind": "raw",
    "flags": [],
    "split": "train",
    "file": "b",
}

Row = dict[str, Any]


def row(response_id: str, reward: float | None = None, **values: Any) -> Row:
    """One row of the view `rollouts`."""
    return {"response_id": response_id, "reward": reward} | values


def rewards(*values: float | None, group: str = "g") -> list[Row]:
    """A group with these rewards; its responses are called g0, g1, ..."""
    return [row(f"{group}{i}", value, group_id=group) for i, value in enumerate(values)]


def connect(rows: Sequence[Row], threads: int = 2) -> duckdb.DuckDBPyConnection:
    """A connection whose table `rollouts` stands for the view of a dataset."""
    con = duckdb.connect(config={"threads": threads})
    prepare(con)
    load(con, rows)
    return con


def load(con: duckdb.DuckDBPyConnection, rows: Sequence[Row]) -> None:
    """Make these rows the table `rollouts`."""
    filled = [DEFAULTS | {"file_row": i} | values for i, values in enumerate(rows)]
    con.register(
        "given", pa.Table.from_pylist([{n: r.get(n) for n in VIEW.names} for r in filled], schema=VIEW)
    )
    con.execute("CREATE OR REPLACE TABLE rollouts AS FROM given")


def shaped(rows: Sequence[Row], *, split: Any = "train", **fields: Any) -> dict[str, Row]:
    """The shaped rows by response_id, in the order of the result."""
    with connect(rows) as con:
        found = shape(con, Shaping(**fields), split=split).read_all().to_pylist()
    return {r["response_id"]: r for r in found}


def column(rows: dict[str, Row], name: str) -> dict[str, Any]:
    """One column of shaped rows."""
    return {response_id: values[name] for response_id, values in rows.items()}


def judged(rows: Sequence[Row]) -> list[Row]:
    """One row a trajectory: the last turn that has a reward."""
    last: dict[Any, Row] = {}
    for r in sorted(rows, key=lambda r: -1 if r.get("turn") is None else r["turn"]):
        if r["reward"] is not None:
            last[r["group_id"], r.get("trajectory_id") or ("alone", r["response_id"])] = r
    return list(last.values())


def by_group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each group."""
    groups = defaultdict(list)
    for r in rows:
        groups[r["group_id"]].append(r)
    return dict(groups)


def equal(x: float, y: float, largest: float) -> bool:
    """Whether two rewards differ by rounding only."""
    return abs(x - y) <= 1e-9 * max(1.0, abs(largest))


def balanced(group: list[Row], seed: int) -> list[Row]:
    """RED-Drop: as many of the negatives as there are positives, drawn by a hash of seed and id."""
    r = [x["reward"] for x in group]
    mean = math.fsum(r) / len(r)
    positive = [x for x in group if x["reward"] >= mean or equal(x["reward"], mean, max(r))]
    negative = [x for x in group if x not in positive]
    negative.sort(key=lambda x: hashlib.md5(f"{seed}:{x['response_id']}".encode()).hexdigest())
    return positive + negative[: len(positive)]


def _loo(r: np.ndarray, i: int) -> float:
    return r[i] if len(r) == 1 else np.delete(r, i).mean()


def _logavgexp(r: np.ndarray, tau: float) -> float:
    return tau * (np.logaddexp.reduce(r / tau) - math.log(len(r)))


BASELINES: dict[str, Callable[[np.ndarray, int, float, Shaping], float]] = {
    "mean": lambda r, i, overall, s: r.mean(),
    "loo": lambda r, i, overall, s: _loo(r, i),
    "global": lambda r, i, overall, s: overall,
    "shrunk": lambda r, i, overall, s: (r.sum() + s.shrink_k * overall) / (len(r) + s.shrink_k),
    "logavgexp": lambda r, i, overall, s: _logavgexp(r, s.tau),
    "none": lambda r, i, overall, s: 0.0,
}


def reference(rows: Sequence[Row], shaping: Shaping) -> dict[str, float]:
    """The advantage of every kept response, for the presets of baseline, scale and drop."""
    units = by_group(judged(rows))
    if shaping.drop == "balance":
        units = {key: balanced(group, shaping.seed) for key, group in units.items()}
    overall = float(np.mean([x["reward"] for group in units.values() for x in group] or [0.0]))
    found: dict[Any, float] = {}
    for key, group in units.items():
        r = np.array([x["reward"] for x in group])
        flat = r.max() - r.min() <= 1e-9 * max(1.0, abs(r.max()))
        if shaping.drop == "zero-variance" and flat:
            continue
        divisor = 1.0 if shaping.scale == "none" or flat else r.std() + shaping.eps
        for i, x in enumerate(group):
            baseline = BASELINES[shaping.baseline](r, i, overall, shaping)
            difference = 0.0 if equal(r[i], baseline, r.max()) else r[i] - baseline
            found[key, x.get("trajectory_id") or ("alone", x["response_id"])] = (
                difference - shaping.shift
            ) / divisor
    return {
        x["response_id"]: found[unit]
        for x in rows
        if (unit := (x["group_id"], x.get("trajectory_id") or ("alone", x["response_id"]))) in found
    }
