import json
from datetime import UTC, datetime

import pyarrow as pa
import pytest

import data_tools
from data_tools.store.stats import _summary
from tests.data_tools.rollout_rows import row, table


@pytest.fixture
def ds(tmp_path):
    return data_tools.open(str(tmp_path / "ds"), create=True, holdout=0.0)


def commit(ds, *rows, rejects=()):
    with ds.writer() as writer:
        writer.rollouts(table(rows))
        if rejects:
            writer.rejects(pa.table({"reason": list(rejects)}))
        return writer.commit()


def test_an_empty_dataset_has_facts_too(ds):
    facts = ds.stats()
    assert facts["rows"] == 0
    assert facts["rewards"]["null_share"] is None
    assert facts["groups"]["zero_variance_share"] is None
    assert facts["lengths"] == {"prompt_tokens": None, "response_tokens": None, "response_characters": None}
    json.dumps(facts, allow_nan=False)


def test_the_facts_of_a_small_dataset_worked_by_hand(ds):
    sampled = {"policy": "p", "n_prompt_tokens": 3}
    scored = {
        "behavior_logprob": -1.0,
        "logprob_kind": "processed",
        "finish_reason": "length",
        "flags": ["truncated"],
    }
    dated = {"finish_reason": "stop", "sampled_at": datetime(2026, 1, 1, tzinfo=UTC)}
    a, b = {"group_id": "a", "prompt": "A"}, {"group_id": "b", "prompt": "B"}
    commit(
        ds,
        row("a1", reward=1.0, policy_version=1, n_tokens=10, **a, **sampled, **scored),
        row("a2", reward=1.0, policy_version=3, n_tokens=30, **a, **sampled, **dated),
        row("b1", reward=0.0, response="four", flags=["truncated", "multimodal"], **b),
        row("b2", reward=2.0, response="sixsix", **b),
        row("c1", group_id="c", prompt="C", reward=None, response="xx"),
        rejects=["torn_line", "torn_line", "no_response"],
    )
    facts = ds.stats()
    assert (facts["batches"], facts["rows"], facts["prompts"]) == (1, 5, 3)
    assert facts["groups"] == {
        "count": 3, "single": 1, "comparable": 2, "zero_variance": 1, "zero_variance_share": 0.5,
        "sizes": {"mean": 5 / 3, "min": 1, "p05": 1, "p25": 1, "p50": 2, "p75": 2, "p95": 2, "max": 2},
    }  # fmt: skip
    assert facts["rewards"] == {
        "count": 4, "null": 1, "null_share": 0.2, "mean": 1.0, "std": pytest.approx(0.5**0.5),
        "min": 0.0, "p05": 0.0, "p25": 0.0, "p50": 1.0, "p75": 1.0, "p95": 2.0, "max": 2.0,
    }  # fmt: skip
    assert facts["logprobs"] == {
        "with_ids": 2, "with_logprobs": 1, "ids_share": 0.4, "logprobs_share": 0.2, "kinds": {"processed": 1},
    }  # fmt: skip
    assert facts["lengths"]["response_tokens"]["p50"] == 10
    assert facts["lengths"]["response_tokens"]["max"] == 30
    assert facts["lengths"]["response_characters"] == {
        "mean": 4.0, "min": 2, "p05": 2, "p25": 2, "p50": 4, "p75": 6, "p95": 6, "max": 6,
    }  # fmt: skip
    assert facts["staleness"]["max"] == 2
    assert facts["flags"] == {"truncated": 2, "multimodal": 1}
    assert facts["finish_reasons"] == {"null": 3, "length": 1, "stop": 1}
    assert facts["rejects"] == {"torn_line": 2, "no_response": 1}
    assert facts["splits"] == {"train": {"rows": 5, "prompts": 3}}
    assert facts["policies"] == [
        {"policy": None, "rows": 3, "min_version": None, "max_version": None, "mean_reward": 1.0,
         "logprobs_share": 0.0, "first_sampled_at": None, "last_sampled_at": None},
        {"policy": "p", "rows": 2, "min_version": 1, "max_version": 3, "mean_reward": 1.0,
         "logprobs_share": 0.5, "first_sampled_at": "2026-01-01 00:00:00+00",
         "last_sampled_at": "2026-01-01 00:00:00+00"},
    ]  # fmt: skip
    json.dumps(facts, allow_nan=False)


def test_later_rewards_count(ds):
    commit(ds, row("a"), row("b"))
    with ds.rewards_writer("judge") as writer:
        writer.write(pa.table({"response_id": ["a"], "reward": [3.0]}))
        writer.commit()
    assert ds.stats()["rewards"]["mean"] == 3.0
    assert ds.stats()["rewards"]["null"] == 1


def test_sidecars_are_listed_with_what_they_lack(ds):
    name = commit(ds, row("a"))
    commit(ds, row("b"))
    with ds.sidecar("tokens", "t1").writer(name) as writer:
        writer.write(pa.table({"response_id": ["a"]}))
        writer.commit()
    facts = ds.stats()
    assert facts["sidecars"] == {"tokens/t1": {"batches": 1, "missing": 1}}
    assert facts["bytes"]["tokens"] > 0


@pytest.mark.parametrize("n", [1, 2, 19, 20, 21, 1000])
def test_quantiles_are_the_smallest_value_that_enough_rows_do_not_exceed(ds, n):
    values = [(i * 7919) % 101 for i in range(n)]
    ordered = sorted(values)
    with ds.connect() as con:
        found = _summary(con, f"SELECT unnest({values})")
    for name, share in (("p05", 5), ("p25", 25), ("p50", 50), ("p75", 75), ("p95", 95)):
        assert found[name] == ordered[max(1, -(-share * n // 100)) - 1]


def test_a_summary_of_nulls_alone_is_none(ds):
    with ds.connect() as con:
        assert _summary(con, "SELECT CAST(NULL AS DOUBLE) FROM range(3)") is None
