"""Guards, metrics.jsonl and lineage: what is noted of a run, and what ends it early."""

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from data_tools.errors import DataError
from offline_rec.training.guards import DriftGuard, NonFiniteGuard
from offline_rec.training.lineage import LineageWriter, drop_after
from offline_rec.training.metrics import MetricsLog, read_metrics


def test_drift_beyond_a_bound_gives_a_reason():
    guard = DriftGuard(max_kl=0.1, min_ess=0.5)
    assert guard.reason({"kl": 0.1, "ess": 0.5}, "the step") is None
    assert "0.2 on the step exceeds max_kl 0.1" in guard.reason({"kl": 0.2, "ess": 0.9}, "the step")
    assert "0.4 on held-out rows is below min_ess 0.5" in guard.reason(
        {"kl": 0.0, "ess": 0.4}, "held-out rows"
    )


def test_no_bound_or_no_value_is_no_reason():
    assert DriftGuard().reason({"kl": 9.0, "ess": 0.0}, "the step") is None
    assert DriftGuard(max_kl=1, min_ess=0.5).reason({"kl": None}, "the step") is None


def test_updates_that_are_not_finite_stop_the_run_only_in_a_row():
    guard = NonFiniteGuard(3)
    outcomes = [
        guard.check(s, loss, 1.0, ["r"])
        for s, loss in enumerate([math.nan, math.inf, 0.0, math.nan, math.nan])
    ]
    assert outcomes == [True, True, False, True, True]
    with pytest.raises(DataError, match=r"step 9: .* 3 times in a row; rows of the last one: r7, r8"):
        guard.check(9, 0.0, math.inf, ["r7", "r8"])
    assert guard.total == 5


def test_metrics_hold_one_object_a_step_without_nan(tmp_path):
    log = MetricsLog(tmp_path)
    log.append(
        {"step": 1, "loss": float("nan"), "heldout": {"kl": math.inf, "ess": 0.5}, "rows": [1.0, math.nan]}
    )
    log.append({"step": 2, "loss": 0.1})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert json.loads(lines[0]) == {
        "step": 1,
        "loss": None,
        "heldout": {"kl": None, "ess": 0.5},
        "rows": [1.0, None],
    }


def test_a_resume_drops_later_and_torn_metrics(tmp_path):
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.append({"step": step})
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    log.drop_after(2)
    log.append({"step": 3, "again": True})
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_a_run_without_metrics_has_none(tmp_path):
    MetricsLog(tmp_path).drop_after(5)
    assert read_metrics(tmp_path) == []


def add(writer, step, ids):
    n = len(ids)
    ratio = np.array([np.nan, 1.5][:n], np.float32)
    writer.add(step, ids, weight=np.ones(n), mean_ratio=ratio, kept_share=np.ones(n, np.float32))


def test_lineage_parts_are_named_after_their_last_step_and_rank(tmp_path):
    writer = LineageWriter(tmp_path / "lineage", rank=1)
    add(writer, 1, ["a", "b"])
    add(writer, 2, ["c"])
    writer.flush()
    writer.flush()
    (part,) = (tmp_path / "lineage").iterdir()
    assert part.name == "2-1.parquet"
    table = pq.read_table(part)
    assert table["step"].to_pylist() == [1, 1, 2]
    assert table["response_id"].to_pylist() == ["a", "b", "c"]
    assert table["mean_ratio"].to_pylist() == [None, 1.5, None]


def test_a_long_stretch_is_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("offline_rec.training.lineage.FLUSH_ROWS", 2)
    writer = LineageWriter(tmp_path, rank=0)
    for step in (1, 2, 3):
        add(writer, step, ["a"])
    writer.flush()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2-0.parquet", "3-0.parquet"]


def test_a_resume_drops_later_parts_of_every_rank(tmp_path):
    for rank in (0, 1):
        writer = LineageWriter(tmp_path, rank)
        for step in (5, 10, 11):
            add(writer, step, ["a"])
            writer.flush()
    (tmp_path / ".12-0.parquet.tmp").write_bytes(b"half")
    drop_after(tmp_path, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "10-0.parquet",
        "10-1.parquet",
        "5-0.parquet",
        "5-1.parquet",
    ]
