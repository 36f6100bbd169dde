import hashlib
import json
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

import data_tools
from data_tools.rewards.later import RewardWriter
from data_tools.schema import TOKEN_COLUMNS
from data_tools.store.views import MAX_POLICIES_INLINE
from tests.data_tools.rollout_rows import row, table

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


@pytest.fixture
def ds(tmp_path):
    return data_tools.open(str(tmp_path / "ds"), create=True)


def commit(ds, *rows):
    with ds.writer() as writer:
        writer.rollouts(table(rows))
        return writer.commit()


def reward(ds, at, **rewards):
    with RewardWriter(ds.storage, "test", at) as writer:
        writer.write(
            pa.table({"response_id": list(rewards), "reward": pa.array(rewards.values(), pa.float64())})
        )
        writer.commit()


def plan(ds, query):
    """The operators of a query's physical plan."""
    (text,) = ds.sql(f"EXPLAIN (FORMAT json) {query}").column("explain_value").to_pylist()
    found, waiting = [], json.loads(text)
    while waiting:
        operator = waiting.pop()
        found.append(operator)
        waiting += operator["children"]
    return found


def columns_read(ds, query):
    """The columns that leave the scans of a query; those of pushed-down filters are not among them."""
    scans = [operator["extra_info"] for operator in plan(ds, query) if "PARQUET" in operator["name"]]
    assert scans
    named = [scan.get("Projections", []) for scan in scans]
    return {name for names in named for name in (names if isinstance(names, list) else [names])}


def joins(ds, query):
    return sum("JOIN" in operator["name"] for operator in plan(ds, query))


def test_staleness_counts_back_from_the_newest_version_of_the_same_policy(ds):
    commit(ds, row("a", policy="p", policy_version=3), row("b", policy="p", policy_version=7))
    commit(ds, row("c", policy="q", policy_version=100), row("d", policy="p"))
    found = ds.sql("SELECT response_id, staleness FROM rollouts ORDER BY response_id").to_pylist()
    assert [r["staleness"] for r in found] == [4, 0, 0, None]


def test_rows_that_name_no_policy_are_one_unnamed_policy_whose_versions_count(ds):
    commit(ds, row("a", policy="p", policy_version=9), row("b", policy_version=3), row("c", policy_version=5))
    found = ds.sql("SELECT response_id, staleness FROM rollouts ORDER BY response_id").to_pylist()
    assert [r["staleness"] for r in found] == [0, 2, 0]


def test_age_counts_from_the_moment_given(ds):
    commit(ds, row("a", sampled_at=NOON - timedelta(days=1, hours=12)), row("b"))
    with ds.connect(now=NOON) as con:
        assert con.sql("SELECT age_days FROM rollouts ORDER BY response_id").fetchall() == [(1.5,), (None,)]


def test_times_are_shown_in_utc_wherever_the_machine_stands(ds, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    commit(ds, row("a", sampled_at=NOON))
    assert ds.sql("SELECT sampled_at::VARCHAR AS t FROM rollouts").to_pylist() == [
        {"t": "2026-01-02 12:00:00+00"}
    ]


def test_the_latest_reward_wins_and_earlier_ones_stay_on_disk(ds):
    commit(ds, row("a", reward=0.25), row("b", reward=0.5), row("c"))
    reward(ds, NOON, a=1.0, c=2.0)
    reward(ds, NOON - timedelta(days=1), a=9.0)  # written later, but judged earlier
    found = ds.sql("SELECT response_id, reward FROM rollouts ORDER BY response_id").to_pylist()
    assert [r["reward"] for r in found] == [1.0, 0.5, 2.0]
    assert len(ds.storage.stems("rewards", ".parquet")) == 2


def test_of_two_rewards_at_one_moment_the_one_written_last_wins(ds):
    commit(ds, row("a"))
    reward(ds, NOON, a=1.0)
    reward(ds, NOON, a=2.0)
    assert ds.sql("SELECT reward FROM rollouts").to_pylist() == [{"reward": 2.0}]


def test_a_later_null_takes_a_reward_back(ds):
    commit(ds, row("a", reward=0.25))
    reward(ds, NOON, a=None)
    assert ds.sql("SELECT reward FROM rollouts").to_pylist() == [{"reward": None}]


def test_groups_follow_later_rewards(ds):
    commit(ds, row("a", reward=0.0), row("b"))
    reward(ds, NOON, b=1.0)
    (group,) = ds.sql("SELECT n, n_rewarded, reward_mean, reward_std, zero_variance FROM groups").to_pylist()
    assert group == {"n": 2, "n_rewarded": 2, "reward_mean": 0.5, "reward_std": 0.5, "zero_variance": False}


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 1.0), True),
        ((1.0, 1.0 + 1e-10), True),
        ((1.0, 1.0 + 1e-6), False),
        ((1e12, 1e12 + 1), True),
        ((0.5,), True),
        ((None, 0.5), True),
        ((None, None), None),
    ],
)
def test_zero_variance_has_a_tolerance_and_is_null_without_rewards(ds, rewards, expected):
    commit(ds, *(row(f"r{i}", reward=value) for i, value in enumerate(rewards)))
    assert ds.sql("SELECT zero_variance FROM groups").to_pylist() == [{"zero_variance": expected}]


def test_groups_span_batches_and_name_their_policies(ds):
    commit(ds, row("a", policy="p", policy_version=1, prompt="first"))
    commit(ds, row("b", policy="q", policy_version=4, prompt="first"))
    (group,) = ds.sql(
        "SELECT n, n_policies, min_policy_version, max_policy_version, prompt FROM groups"
    ).to_pylist()
    assert group == {
        "n": 2, "n_policies": 2, "min_policy_version": 1, "max_policy_version": 4, "prompt": "first",
    }  # fmt: skip


def test_the_split_of_a_prompt_never_changes(tmp_path):
    ds = data_tools.open(str(tmp_path / "ds"), create=True, holdout=0.3)
    commit(ds, *(row(f"a{i}", prompt=f"{i}") for i in range(200)))
    first = {r["prompt"]: r["split"] for r in ds.sql("SELECT prompt, split FROM rollouts").to_pylist()}
    commit(ds, *(row(f"b{i}", prompt=f"{i}", group_id=f"other{i}") for i in range(100, 300)))
    ds.compact()
    for found in data_tools.open(ds.path).sql("SELECT prompt, split FROM rollouts").to_pylist():
        assert first.setdefault(found["prompt"], found["split"]) == found["split"]
    assert 0.2 < sum(split == "holdout" for split in first.values()) / len(first) < 0.4


@pytest.mark.parametrize("holdout", [0.5, 0.125, 0.999])
def test_the_split_can_be_recomputed_from_salt_and_prompt_hash(tmp_path, holdout):
    ds = data_tools.open(str(tmp_path / "ds"), create=True, holdout=holdout)
    commit(ds, *(row(f"a{i}", prompt=f"{i}") for i in range(50)))
    for found in ds.sql("SELECT prompt_hash, split FROM rollouts").to_pylist():
        digest = hashlib.md5((ds.info.salt + found["prompt_hash"]).encode()).hexdigest()
        share = int(digest, 16) / 16**32
        assert found["split"] == ("holdout" if share < holdout else "train")


def test_without_holdout_everything_is_train(tmp_path):
    ds = data_tools.open(str(tmp_path / "ds"), create=True, holdout=0.0)
    commit(ds, *(row(f"a{i}", prompt=f"{i}") for i in range(50)))
    assert ds.sql("SELECT DISTINCT split FROM rollouts").to_pylist() == [{"split": "train"}]


def test_a_query_reads_only_the_columns_it_names(ds):
    commit(ds, row("a", reward=1.0, policy="p", policy_version=1, sampled_at=NOON), row("b", reward=-1.0))
    everything = "max(reward), max(staleness), min(split), min(age_days), min(file)"
    assert columns_read(ds, f"SELECT {everything} FROM rollouts") <= {
        "reward", "policy", "policy_version", "prompt_cluster", "prompt_hash", "sampled_at", "filename",
    }  # fmt: skip
    assert columns_read(ds, "SELECT response_ids FROM rollouts WHERE reward > 0") == {"response_ids"}
    assert not columns_read(ds, "SELECT * FROM groups") & set(TOKEN_COLUMNS)


def test_groups_read_the_prompt_only_where_it_is_asked_for(ds):
    commit(ds, row("a"))
    assert columns_read(ds, "SELECT count(*) FROM groups WHERE zero_variance") == {"group_id", "reward"}


def test_staleness_needs_no_join_even_with_many_policies_where_it_is_not_used(ds):
    commit(ds, row("a", policy="p", policy_version=1))
    assert joins(ds, "SELECT response_id, staleness FROM rollouts") == 0


def test_staleness_is_right_for_more_policies_than_fit_into_the_view(ds):
    policies = range(MAX_POLICIES_INLINE + 5)
    commit(ds, *(row(f"{p}-{v}", policy=f"it's {p}", policy_version=v * p) for p in policies for v in (1, 2)))
    found = ds.sql("SELECT response_id, staleness FROM rollouts").to_pylist()
    assert {r["response_id"]: r["staleness"] for r in found} == {
        f"{p}-{v}": (2 - v) * p for p in policies for v in (1, 2)
    }


def test_a_new_batch_raises_the_staleness_of_the_old_ones_on_the_same_opened_dataset(ds):
    commit(ds, row("a", policy="p", policy_version=1))
    assert ds.sql("SELECT max(staleness) AS s FROM rollouts").to_pylist() == [{"s": 0}]
    commit(ds, row("b", policy="p", policy_version=9))
    assert ds.sql("SELECT max(staleness) AS s FROM rollouts").to_pylist() == [{"s": 8}]


def test_what_is_known_of_a_batch_is_not_taken_for_another_in_its_place(ds):
    for version in (9, 1):
        with ds.writer("one") as writer:
            writer.rollouts(table([row("a", policy="p", policy_version=version)]))
            writer.commit()
        commit(ds, row("b", policy="p", policy_version=2))
        opened = data_tools.open(ds.path)
        found = opened.sql("SELECT min(staleness) AS least, max(staleness) AS most FROM rollouts").to_pylist()
        assert found == [{"least": 0, "most": max(version, 2) - min(version, 2)}]
        for batch in ds.batches():
            ds.storage.remove(f"rollouts/{batch}.parquet")


def test_later_rewards_cost_a_join_only_where_they_exist_and_matter(ds):
    commit(ds, row("a"))
    assert joins(ds, "SELECT response_id, reward FROM rollouts") == 0
    reward(ds, NOON, a=1.0)
    assert joins(ds, "SELECT count(*), min(split), max(staleness) FROM rollouts") == 0
    assert joins(ds, "SELECT response_id, reward FROM rollouts") == 1
