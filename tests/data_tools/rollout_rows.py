"""Rows for datasets of tests: only what a test names is given, the rest is filled in."""

import hashlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from data_tools.schema import ROLLOUTS


def row(response_id: str, **values: Any) -> dict[str, Any]:
    """One rollout; the group is `g` and the prompt `1+1=` unless said otherwise."""
    prompt = values.get("prompt", "1+1=")
    filled: dict[str, Any] = {
        "response_id": response_id,
        "group_id": "g",
        "prompt": prompt,
        "prompt_hash": hashlib.md5(prompt.encode()).hexdigest(),
        "response": "2",
        "logprob_kind": "unknown",
        "flags": [],
    }
    return filled | values


def table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """The rows as a table of the schema of rollouts."""
    return pa.Table.from_pylist(
        [{name: r.get(name) for name in ROLLOUTS.names} for r in rows], schema=ROLLOUTS
    )


def many(n: int, *, start: int = 0, per_group: int = 4) -> pa.Table:
    """n rows with token ids, in groups of `per_group`, rewards 0 and 1 in turn."""
    rows = [
        row(
            f"r{i}",
            group_id=f"g{i // per_group}",
            prompt=f"{i // per_group}+1=",
            reward=float(i % 2),
            response_ids=[i, i + 1],
            behavior_logprobs=[-0.5, -0.25],
            n_tokens=2,
            behavior_logprob=-0.75,
        )
        for i in range(start, start + n)
    ]
    return table(rows)
