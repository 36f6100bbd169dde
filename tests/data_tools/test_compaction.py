import pyarrow as pa
import pytest

import data_tools
from data_tools.store.compaction import CompactReport, compact
from data_tools.store.storage import LocalStorage
from tests.data_tools.rollout_rows import many, row, table
from tests.data_tools.test_deletion import assert_aligned, score


@pytest.fixture
def ds(tmp_path):
    return data_tools.open(str(tmp_path / "ds"), create=True)


def commit(ds, rows, *, scored=False):
    with ds.writer() as writer:
        writer.rollouts(rows)
        name = writer.commit()
    if scored:
        score(ds, name)
    return name


def everything(ds):
    """All rows by id, without their place."""
    return ds.sql("SELECT * EXCLUDE (file, file_row, age_days) FROM rollouts ORDER BY response_id")


def places(ds):
    return ds.sql("SELECT response_id, group_id FROM rollouts ORDER BY file, file_row").to_pylist()


def test_small_batches_become_one_and_no_row_changes(ds):
    for start in range(0, 100, 10):
        commit(ds, many(10, start=start), scored=True)
    before = everything(ds)
    assert ds.compact() == CompactReport(files_before=10, files_after=1, rows_rewritten=100)
    assert everything(ds) == before
    assert len(ds.batches()) == 1
    assert ds.sidecar("logprobs", "w").missing() == []
    assert_aligned(ds)


def test_the_rows_of_a_group_come_to_stand_side_by_side_in_order_of_first_sight(ds):
    commit(ds, table([row("a0", group_id="a"), row("b0", group_id="b")]))
    commit(ds, table([row("c0", group_id="c"), row("a1", group_id="a"), row("b1", group_id="b")]))
    ds.compact()
    assert [r["response_id"] for r in places(ds)] == ["a0", "a1", "b0", "b1", "c0"]


def test_a_single_batch_with_scattered_groups_is_sorted(ds):
    commit(ds, table([row("a0", group_id="a"), row("b0", group_id="b"), row("a1", group_id="a")]))
    assert ds.compact().rows_rewritten == 3
    assert [r["response_id"] for r in places(ds)] == ["a0", "a1", "b0"]


def test_what_is_compact_is_left_alone(ds):
    commit(ds, many(20))
    before = ds.batches()
    assert ds.compact() == CompactReport(files_before=1, files_after=1, rows_rewritten=0)
    commit(ds, many(20, start=20))
    ds.compact()
    once = ds.batches()
    ds.compact()
    assert ds.batches() == once
    assert before != once


def test_a_large_dataset_becomes_several_files_that_never_cut_a_group(ds):
    for start in range(0, 4000, 1000):
        commit(ds, many(1000, start=start, per_group=7), scored=True)
    before = everything(ds)
    size = sum(ds.storage.size(f"rollouts/{batch}.parquet") for batch in ds.batches())
    report = compact(ds, target_bytes=size // 3 + 1)
    assert report.files_after == 3
    assert everything(ds) == before
    assert_aligned(ds)
    cut = ds.sql("SELECT group_id FROM rollouts GROUP BY group_id HAVING count(DISTINCT file) > 1")
    assert cut.num_rows == 0


def test_batches_with_other_sidecars_are_not_mixed_so_that_none_is_lost(ds):
    commit(ds, many(10), scored=True)
    commit(ds, many(10, start=10))
    commit(ds, many(10, start=20), scored=True)
    commit(ds, many(10, start=30))
    assert ds.compact().files_after == 2
    assert len(ds.sidecar("logprobs", "w").missing()) == 1
    assert_aligned(ds)
    assert ds.sql("SELECT count(DISTINCT response_id) AS n FROM rollouts").to_pylist() == [{"n": 40}]


def test_rejects_of_merged_batches_are_kept(ds):
    for start in (0, 10):
        with ds.writer() as writer:
            writer.rollouts(many(10, start=start))
            writer.rejects(pa.table({"source_row": [start], "reason": ["torn_line"]}))
            writer.commit()
    with ds.writer() as writer:
        writer.rejects(pa.table({"source_row": [99], "reason": ["not_json"]}))
        writer.commit()
    ds.compact()
    assert ds.sql("SELECT source_row FROM rejects ORDER BY 1").column(0).to_pylist() == [0, 10, 99]


def test_batches_without_rows_are_merged_away(ds):
    for _ in range(3):
        with ds.writer() as writer:
            writer.commit()
    assert ds.compact().files_after == 1
    assert ds.sql("FROM rollouts").num_rows == 0


def test_an_empty_dataset_is_compact(ds):
    assert ds.compact() == CompactReport(files_before=0, files_after=0, rows_rewritten=0)


def test_later_rewards_and_splits_survive(ds):
    commit(ds, many(10))
    commit(ds, many(10, start=10))
    with ds.rewards_writer("judge") as writer:
        writer.write(pa.table({"response_id": ["r3"], "reward": [42.0]}))
        writer.commit()
    before = everything(ds)
    ds.compact()
    assert everything(ds) == before


def test_a_batch_collected_afterwards_sorts_behind_the_compacted_ones(ds):
    commit(ds, many(10))
    commit(ds, many(10, start=10))
    ds.compact()
    last = commit(ds, many(10, start=20))
    assert ds.batches()[-1] == last


def test_a_listing_that_a_whole_swap_overtakes_is_made_again(ds, monkeypatch):
    commit(ds, many(10))
    commit(ds, many(10, start=10))
    listed, overtaken = LocalStorage.stems, []

    def slow_listing(storage, folder, suffix):
        names = listed(storage, folder, suffix)
        if folder == "rollouts" and not overtaken:
            overtaken.append(names)
            ds.compact()
        return names

    monkeypatch.setattr(LocalStorage, "stems", slow_listing)
    found = ds.batches()
    assert len(found) == 1
    assert found != overtaken[0]
    assert ds.batches() == found
