import os
from pathlib import Path

import pyarrow as pa
import pytest

import data_tools
from data_tools.errors import ConfigError, DataError
from data_tools.store import deletion, rewriting
from tests.data_tools.rollout_rows import many, row, table


@pytest.fixture
def ds(tmp_path):
    """Three batches of 10 rows; the first two have log-probs that name their row."""
    ds = data_tools.open(str(tmp_path / "ds"), create=True)
    for start in (0, 10, 20):
        with ds.writer() as writer:
            writer.rollouts(many(10, start=start))
            writer.rejects(pa.table({"source_row": [start], "reason": ["torn_line"]}))
            name = writer.commit()
        if start < 20:
            score(ds, name)
    return ds


def score(ds, name):
    ids = ds.parquet(name).read(["response_id"]).column(0)
    with ds.sidecar("logprobs", "w").writer(name) as writer:
        values = pa.array([float(i[1:]) for i in ids.to_pylist()])
        writer.write(pa.table({"response_id": ids, "logprob": values}))
        writer.commit()


def ids(ds):
    return [
        r["response_id"]
        for r in ds.sql("SELECT response_id FROM rollouts ORDER BY file, file_row").to_pylist()
    ]


def assert_aligned(ds):
    for batch in ds.batches():
        sidecar = ds.sidecar("logprobs", "w")
        if sidecar.exists(batch):
            found = sidecar.parquet(batch).read()
            assert found.column("response_id") == ds.parquet(batch).read(["response_id"]).column(0)
            assert found.column("logprob").to_pylist() == [float(i[1:]) for i in found.column(0).to_pylist()]


def bytes_of(ds):
    return b"".join(path.read_bytes() for path in sorted(Path(ds.path).rglob("*")) if path.is_file())


def test_matching_rows_go_from_every_file_and_the_rest_keeps_its_order(ds):
    report = ds.delete("response_id IN ('r3', 'r4', 'r12')")
    assert report == deletion.DeleteReport(rows=3, batches=2)
    assert ids(ds) == [f"r{i}" for i in range(30) if i not in (3, 4, 12)]
    assert_aligned(ds)
    assert ds.sidecar("logprobs", "w").missing() == [ds.batches()[2]]


def test_nothing_that_identifies_the_row_stays_on_disk(tmp_path):
    ds = data_tools.open(str(tmp_path / "ds"), create=True)
    with ds.writer() as writer:
        writer.rollouts(table([row("private-id", prompt="private-prompt"), row("kept")]))
        writer.commit()
    with ds.rewards_writer("judge") as writer:
        writer.write(pa.table({"response_id": ["private-id", "kept"], "reward": [1.0, 2.0]}))
        writer.commit()
    ds.delete("response_id = 'private-id'")
    assert b"private" not in bytes_of(ds)
    assert ds.sql("SELECT response_id, reward FROM rollouts").to_pylist() == [
        {"response_id": "kept", "reward": 2.0}
    ]


def test_rejects_stay_with_their_batch(ds):
    ds.delete("true")
    assert ids(ds) == []
    assert ds.sql("SELECT source_row FROM rejects ORDER BY 1").column(0).to_pylist() == [0, 10, 20]
    assert len(ds.batches()) == 3


def test_erased_ids_are_known_and_others_are_not(ds):
    ds.delete("response_id IN ('r1', 'r2')")
    erased = ds.erased()
    assert erased
    assert "r1" in erased
    assert "r0" not in erased
    assert erased.among(pa.array(["r2", "r9", "r1", None])).to_pylist() == [True, False, True, None]
    assert erased.among([]).to_pylist() == []


def test_without_a_delete_nothing_is_erased(ds):
    assert not ds.erased()
    assert ds.erased().among(["r1"]).to_pylist() == [False]


def test_a_dry_run_counts_and_changes_no_byte(ds):
    before = bytes_of(ds)
    assert ds.delete("reward = 1", dry_run=True) == deletion.DeleteReport(rows=15, batches=3)
    assert bytes_of(ds) == before


def test_no_match_rewrites_nothing(ds):
    before = ds.batches()
    assert ds.delete("reward = 77") == deletion.DeleteReport(rows=0, batches=0)
    assert ds.batches() == before
    assert not ds.erased()


def test_the_condition_sees_later_rewards_and_may_hold_a_subquery(ds):
    with ds.rewards_writer("judge") as writer:
        writer.write(pa.table({"response_id": ["r5"], "reward": [-9.0]}))
        writer.commit()
    assert ds.delete("reward < 0 OR group_id IN (SELECT group_id FROM groups WHERE n < 3)").rows == 1 + 2
    assert_aligned(ds)


@pytest.mark.parametrize(
    "where",
    [
        "",
        "1 = 1; DROP VIEW rollouts",
        "true) UNION SELECT (1",
        "no_such_column = 1",
        "reward",
        "'true'",
        "NULL",
    ],
)
def test_what_is_no_condition_is_refused_and_erases_nothing(ds, where):
    with pytest.raises(ConfigError):
        ds.delete(where)
    assert len(ids(ds)) == 30


def test_deleting_twice_goes_on_from_the_first(ds):
    ds.delete("response_id = 'r0'")
    ds.delete("response_id = 'r1'")
    assert ids(ds) == [f"r{i}" for i in range(2, 30)]
    assert_aligned(ds)
    assert ds.erased().among(["r0", "r1", "r2"]).to_pylist() == [True, True, False]


@pytest.mark.parametrize("step", ["copy_rows", "clear", "_purge_rewards"])
def test_an_interrupted_delete_is_all_or_nothing_and_the_next_one_tidies_up(ds, monkeypatch, step):
    with ds.rewards_writer("judge") as writer:
        writer.write(pa.table({"response_id": ["r3", "r13", "r25"], "reward": [5.0, 5.0, 5.0]}))
        writer.commit()
    calls = []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == (3 if step == "copy_rows" else 1 if step == "_purge_rewards" else 2):
            raise KeyboardInterrupt
        return original(*arguments, **options)

    module = deletion if step == "copy_rows" else rewriting
    original = getattr(module, step)
    monkeypatch.setattr(module, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        ds.delete("response_id IN ('r3', 'r13', 'r25')")
    monkeypatch.undo()
    assert len(ids(ds)) == (30 if step == "copy_rows" else 27)
    assert_aligned(ds)
    ds.delete("response_id IN ('r3', 'r13', 'r25')")
    assert len(ids(ds)) == 27
    assert_aligned(ds)
    assert all(name.endswith(".done") for name in os.listdir(Path(ds.path, "swaps")))
    assert (
        ds.storage.parquet(f"rewards/{ds.storage.stems('rewards', '.parquet')[0]}.parquet").metadata.num_rows
        == 0
    )


def test_a_sidecar_of_another_length_stops_the_delete_by_name(ds):
    first = ds.batches()[0]
    with ds.writer("short") as writer:
        writer.rollouts(many(3, start=90))
        writer.commit()
    score(ds, "short")
    os.replace(ds.sidecar("logprobs", "w").path("short"), ds.sidecar("logprobs", "w").path(first))
    with pytest.raises(DataError, match="has 3 rows, its batch has 10"):
        ds.delete("response_id = 'r0'")
    assert len(ids(ds)) == 33


def test_orphaned_sidecars_go_with_the_next_rewrite(ds):
    orphan = Path(ds.sidecar("logprobs", "w").path("20200101T000000000000Z-00000000"))
    orphan.write_bytes(b"left behind")
    ds.delete("response_id = 'r0'")
    assert not orphan.exists()
