"""A dataset and a run whose every text field would run a script, break a page, or turn it around."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import data_tools
from data_tools.dataset import Dataset
from data_tools.schema import LOGPROBS, REJECTS
from data_tools.store.dataset import PolicyCard
from offline_rec.data.snapshot import Snapshot
from tests.offline_rec.datasets import rollouts

SCRIPT = "<script>window.hacked = 1</script>"
BREAKOUT = "</script></style></title></textarea>--><img src=x onerror='window.hacked = 2'>"
TURNED = "safe\u202egnp.exe\u2066 \u200f\x00\x07\x1b[31m\u0085\ufeff"
TEMPLATE = "{{ 7 * 7 }}{% include 'page.css' %}${alert(1)}"
QUOTES = '\'; DROP TABLE rollouts; -- " onmouseover="window.hacked = 3" \''
LONG = "w" * 100_000
EVIL = " ".join((SCRIPT, BREAKOUT, TURNED, TEMPLATE, QUOTES))
KEY = "0123456789abcdef0123456789abcdef"
LINES = "\n".join(f"line {i} {SCRIPT}" for i in range(2000))


def rows() -> list[dict[str, Any]]:
    """Groups of four responses by policies of evil names; some texts are 100 kB on one line."""
    parts = [{"type": "text", "text": EVIL}, 7]
    chat = json.dumps([{"role": SCRIPT, "content": EVIL}, {"role": "user", "content": parts}])
    prompts = [
        EVIL,
        chat,
        LONG,
        LINES,
        '[{"role": "user"}',
        "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    ]
    responses = [EVIL, LONG + EVIL, LINES, ""]
    made = []
    for g in range(24):
        for k in range(4):
            n = 3 + 5 * k
            made.append(
                {
                    "response_id": f"{g}-{k} {EVIL}",
                    "group_id": f"{g} {EVIL}",
                    "prompt": prompts[g % len(prompts)],
                    "response": responses[(g + k) % 4],
                    "prompt_ids": [1, 2],
                    "response_ids": list(range(n)),
                    "behavior_logprobs": [-0.1 * (i + 1) for i in range(n)],
                    "behavior_logprob": sum(-0.1 * (i + 1) for i in range(n)),
                    "reward": None if g == 23 else float(k % 2) if g % 5 else 1.0,
                    "policy": f"{EVIL} {g % 7}" if g % 8 else f"{LONG}{SCRIPT}",
                    "policy_version": g // 2,
                    "sampled_at": datetime(2026, 3, 1, tzinfo=UTC) + timedelta(hours=7 * g),
                    "logprob_kind": "raw" if g % 2 else "processed",
                    "finish_reason": EVIL if k == 1 else "stop",
                    "flags": [EVIL, LONG] if k == 2 else [],
                    "source_file": EVIL,
                    "source_row": g,
                    "extra": json.dumps({EVIL: EVIL}),
                }
            )
    return made


def dataset(path: Path) -> Dataset:
    """The dataset, with rejects, a policy's card, and scores of another policy."""
    data_tools.open(str(path), create=True)
    ds = data_tools.open(str(path))
    rejects = [
        {
            "source_file": EVIL,
            "source_row": i,
            "reason": [EVIL, "not_json", LONG][i % 3],
            "detail": EVIL,
            "raw": LONG,
        }
        for i in range(9)
    ]
    made = rows()
    with ds.writer() as writer:
        writer.rollouts(rollouts(made))
        writer.rejects(pa.Table.from_pylist(rejects, schema=REJECTS))
        batch = writer.commit()
    ds.write_policy(PolicyCard(name=SCRIPT, model=f"/nowhere/{EVIL}".replace("\x00", "")))
    scored = [
        {
            "response_id": row["response_id"],
            "logprobs": [x + 0.4 * (-1) ** i for i, x in enumerate(row["behavior_logprobs"])],
            "logprob": row["behavior_logprob"] + (0.4 if row["reward"] else -1.3),
            "temperature": 1.0,
        }
        for row in made
    ]
    with ds.sidecar("logprobs", KEY).writer(batch) as writer:
        writer.write(pa.Table.from_pylist(scored, schema=LOGPROBS))
        writer.commit()
    return ds


def run(path: Path, ds: Dataset) -> Path:
    """A run directory on that dataset, as fit, ope and eval would have left it after a hostile night."""
    path.mkdir(parents=True)
    settings = {
        "dataset": ds.path,
        "model": f"models/{SCRIPT}",
        "out": str(path),
        "algorithm": "rec-oneside-nois",
    }
    (path / "config.yaml").write_text(json.dumps(settings | {"where": "reward IS NOT NULL -- " + SCRIPT}))
    Snapshot(
        files=[], now="2026-03-01T00:00:00+00:00", split="train", sql=f"SELECT 1 -- {EVIL}", rows=80,
        groups=20, n_tokens=900,
        left_out={SCRIPT: 3}, model=f"{SCRIPT}", notes=[EVIL, f"broken \\ud800 {BREAKOUT}"],
    ).write(path)  # fmt: skip
    records = [
        {
            "step": i,
            "loss": 1 / (i + 1),
            "kl_k3": 0.01 * i,
            "kept_share": 0.9,
            "kept_share_positive": 0.95,
            "kept_share_negative": 0.85,
            "stopped": f"{EVIL} \ud800" if i == 9 else None,
            SCRIPT: EVIL,
            "heldout": {"value": 0.5 + i / 100, "value_logged": 0.5, EVIL: 1.0},
        }
        for i in range(10)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "lineage").mkdir()
    ids = [row["response_id"] for row in rows()[:80]]
    part = {
        "step": [1 + i // 8 for i in range(80)],
        "response_id": ids,
        "weight": [1.0 + i % 3 for i in range(80)],
        "mean_ratio": pa.array([0.8 + i % 5 / 10 for i in range(80)], pa.float32()),
        "kept_share": pa.array([1.0] * 80, pa.float32()),
    }
    pq.write_table(pa.table(part), path / "lineage" / "10-0.parquet")
    (path / "ope.json").write_text(json.dumps(_ope(ds)))
    (path / "eval" / "1").mkdir(parents=True)
    summary = [
        {
            "policy": EVIL,
            "compared_with": other,
            "measure": SCRIPT,
            "k": 1,
            "value": 0.5,
            "low": 0.4,
            "high": 0.6,
        }
        for other in (None, LONG)
    ]
    pq.write_table(pa.Table.from_pylist(summary), path / "eval" / "1" / "summary.parquet")
    return path


def _ope(ds: Dataset) -> dict[str, Any]:
    interval = {"value": 0.5, "low": 0.4, "high": 0.6}
    estimate = {"name": SCRIPT, "value": interval, "gain": interval, "bias": EVIL}
    judged = {
        "weights": KEY,
        "verdict": {"word": EVIL, "reason": f"{LONG} \ud800 {SCRIPT}"},
        "value": interval,
        "gain": interval,
        "estimates": [estimate, estimate | {"name": "is", "bias": None}],
        "diagnostics": {"ess": 30.0, "ess_share": 0.5, "kl_k3": 0.1},
        "trained_rows": 7,
    }
    return {
        "dataset": ds.path, "policies": [judged], "logged": interval, "episodes": 60, "left_out": {SCRIPT: 2},
        "notes": [EVIL],
    }  # fmt: skip
