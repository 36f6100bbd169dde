"""`check` without a model: a clean dataset, and for each rule a dataset made to break it."""

import math
from datetime import UTC, datetime, timedelta

import pytest

import data_tools
from data_tools.checking import RULES, draw
from data_tools.errors import ConfigError
from tests.data_tools.rollout_rows import row, table

NOW = datetime.now(UTC)


def good(i, **values):
    """A row with nothing to say against it; four make a group."""
    filled = {
        "group_id": f"g{i // 4}",
        "prompt": f"{i // 4}+1=",
        "response": f"answer {i}",
        "prompt_ids": [5, 6],
        "response_ids": [i + 10, i + 11],
        "behavior_logprobs": [-0.5, -0.25],
        "behavior_logprob": -0.75,
        "n_prompt_tokens": 2,
        "n_tokens": 2,
        "reward": float(i % 2),
        "policy": "old",
        "policy_version": i // 8,
        "sampled_at": NOW - timedelta(days=10 - i // 8),
        "temperature": 1.0,
        "logprob_kind": "processed",
        "finish_reason": "stop",
        "source_file": "log.jsonl",
    }
    return row(**({"response_id": f"r{i:02d}"} | filled | values))


TEXT_ONLY = {"response_ids": None, "n_tokens": None, "behavior_logprobs": None, "behavior_logprob": None}
ALL = range(16)

CASES = {
    "mixed_group": {3: {"prompt": "another task"}},
    "split_group": {3: {"group_id": "alone"}},
    "repeated_prompt": {i: {"group_id": "again"} for i in (2, 3)},
    "single_group": {3: {"group_id": "alone", "prompt": "alone"}},
    "ragged_group": {3: {"group_id": "g1", "prompt": "1+1="}},
    "no_contrast": {i: {"reward": 1.0} for i in ALL},
    "reward_not_finite": {3: {"reward": math.inf}, 5: {"reward": math.nan}},
    "reward_unreadable": {3: {"reward": None, "extra": '{"score": "N/A"}'}},
    "no_rewards": {i: {"reward": None} for i in ALL},
    "missing_reward": {3: {"reward": None}},
    "reward_outlier": {3: {"reward": 250.0}},
    "unknown_kind": {3: {"logprob_kind": "unknown", "temperature": None}},
    "raw_at_temperature": {
        3: {
            "logprob_kind": "raw",
            "temperature": 0.7,
            "behavior_logprob": None,
            "flags": ["raw_at_temperature"],
        }
    },
    "missing_temperature": {3: {"temperature": None}},
    "cut_sampling": {3: {"top_p": 0.9}, 4: {"top_k": 20}, 5: {"top_p": 1.0, "top_k": -1}},
    "greedy": {3: {"temperature": 0.0, "behavior_logprob": None}},
    "no_logprobs": {3: TEXT_ONLY},
    "truncated": {i: {"finish_reason": "length"} for i in (3, 5)},
    "missing_finish_reason": {3: {**TEXT_ONLY, "finish_reason": None}},
    "empty_response": {3: {**TEXT_ONLY, "response": ""}},
    "future": {3: {"sampled_at": NOW + timedelta(days=400), "policy_version": 9}},
    "no_policy": {3: {"policy": None, "policy_version": None}},
    "flagged": {3: {"flags": ["missing_logprobs"], "behavior_logprob": None}},
    "marked": {3: {"flags": ["multimodal"]}},
    "duplicate_id": {3: {"response_id": "r02"}},
    "duplicate": {
        i: {"response": "equal", "behavior_logprobs": [-9.0, -9.0], "behavior_logprob": -18.0} for i in (2, 3)
    },
    "time_order": {i: {"sampled_at": NOW - timedelta(days=30)} for i in range(8, 16)},
    "missing_version": {3: {"policy_version": None}},
    "reward_scales": {i: {"reward": 100.0 * (i % 2), "source_file": "percent.jsonl"} for i in range(8, 16)},
    "zero_filled": {3: {"response_ids": [1] * 4, "behavior_logprobs": [0.0] * 4, "behavior_logprob": 0.0}},
    "mostly_zero": {
        3: {
            "response_ids": [1] * 20,
            "behavior_logprobs": [0.0] * 19 + [-1.0],
            "behavior_logprob": -1.0,
        }
    },
    "positive_logprob": {3: {"behavior_logprobs": [0.5, -0.25], "behavior_logprob": 0.25}},
    "logprob_not_finite": {3: {"behavior_logprobs": [-math.inf, -0.25], "behavior_logprob": None}},
    "length_differs": {3: {"behavior_logprobs": [-0.75]}, 4: {"loss_mask": [1]}},
    "sum_differs": {3: {"behavior_logprob": -7.5}},
}
"""Rows that are unlike the good ones, by their number, for each rule."""

FOUND = {
    "single_group": (1, ["r03"]),
    "reward_not_finite": (2, ["r03", "r05"]),
    "no_rewards": (16, ["r00", "r01", "r02"]),
    "cut_sampling": (2, ["r03", "r04"]),
    "truncated": (2, ["r03", "r05"]),
    "duplicate_id": (1, ["r02"]),
    "duplicate": (1, ["r03"]),
    "time_order": (1, ["r08"]),
    "length_differs": (2, ["r03", "r04"]),
    "mixed_group": (1, ["r00"]),
    "split_group": (1, ["r00"]),
    "repeated_prompt": (1, ["r00"]),
    "ragged_group": (2, ["r00", "r03"]),
    "no_contrast": (4, ["r00", "r04", "r08"]),
    "reward_scales": (1, ["r08"]),
}
"""How often, and the rows named; else once, row 3."""


def dataset(path, changes=None):
    ds = data_tools.open(path, create=True)
    with ds.writer() as writer:
        writer.rollouts(table([good(i, **(changes or {}).get(i, {})) for i in ALL]))
        writer.commit()
    return ds


def test_a_clean_dataset_has_no_findings(tmp_path):
    report = dataset(tmp_path / "ds").check()
    assert report.findings == []
    assert report.verdict == "ready to be used"
    assert (report.rows, report.sampled, report.failed) == (16, 16, False)
    assert report.rewards == {"count": 16, "min": 0.0, "max": 1.0, "mean": 0.5, "type": "binary"}


@pytest.mark.parametrize("code", CASES)
def test_a_rule_finds_the_rows_that_were_made_to_break_it(tmp_path, code):
    report = dataset(tmp_path / "ds", CASES[code]).check()
    [finding] = [finding for finding in report.findings if finding.code == code]
    assert (finding.count, finding.rows) == FOUND.get(code, (1, ["r03"]))
    [rule] = [rule for rule in RULES if rule.code == code]
    assert finding.severity == rule.severity
    assert report.failed == any(other.severity == "error" for other in report.findings)
    assert str(tmp_path) in finding.fix or "NEW" in finding.fix


def test_every_rule_has_a_case():
    assert {rule.code for rule in RULES} == CASES.keys()


def test_findings_come_gravest_first(tmp_path):
    changes = CASES["missing_reward"] | {4: {"temperature": None}, 5: {"behavior_logprob": -7.5}}
    report = dataset(tmp_path / "ds", changes).check()
    assert [finding.severity for finding in report.findings] == ["error", "warning", "info"]
    assert report.verdict.startswith("do not fit yet")


def test_single_zeros_and_greedy_zeros_are_legal(tmp_path):
    zeros = {"response_ids": [1] * 4, "behavior_logprobs": [0.0] * 4}
    certain = {"response_ids": [1] * 4, "behavior_logprobs": [0.0, 0.0, 0.0, -0.75]}
    changes = {3: zeros | {"temperature": 0.0, "behavior_logprob": None}, 4: certain}
    report = dataset(tmp_path / "ds", changes).check()
    assert [finding.code for finding in report.findings] == ["greedy", "no_logprobs"]


def test_equal_draws_that_are_probable_are_no_duplicates(tmp_path):
    changes = {i: {"response": "yes"} for i in ALL}
    assert dataset(tmp_path / "ds", changes).check().findings == []


def test_responses_that_are_known_by_their_ids_alone_are_no_duplicates(tmp_path):
    changes = {
        i: {"response": None, "behavior_logprobs": [-9.0, -9.0 - i], "behavior_logprob": -18.0 - i}
        for i in ALL
    }
    assert dataset(tmp_path / "ds", changes).check().findings == []


def test_turns_of_an_episode_may_differ_in_their_prompts(tmp_path):
    changes = {3: {"prompt": "turn two"}}
    changes = {i: {"trajectory_id": f"t{i}"} | changes.get(i, {}) for i in range(4)}
    assert dataset(tmp_path / "ds", changes).check().findings == []


def test_rows_outside_the_condition_are_not_looked_at(tmp_path):
    ds = dataset(tmp_path / "ds", CASES["sum_differs"])
    report = ds.check(where="response_id <> 'r03'")
    assert (report.rows, report.sampled) == (15, 15)
    assert [finding.code for finding in report.findings] == ["ragged_group"]


def test_a_condition_that_is_none_is_wrong_usage(tmp_path):
    ds = dataset(tmp_path / "ds")
    with pytest.raises(ConfigError):
        ds.check(where="true) UNION SELECT (1")
    with pytest.raises(ConfigError, match="nothing"):
        ds.check(where="nothing = 1")
    with pytest.raises(ConfigError, match="at least 1 row"):
        ds.check(sample=0)


def test_an_empty_dataset_is_told(tmp_path):
    report = data_tools.open(tmp_path / "ds", create=True).check()
    assert (report.verdict, report.findings) == ("there are no rows", [])


def test_a_sample_depends_on_rows_and_seed_not_on_their_order(tmp_path):
    rows = [good(i) for i in ALL]
    one, two = (data_tools.open(tmp_path / name, create=True) for name in ("one", "two"))
    with one.writer() as writer:
        writer.rollouts(table(rows))
        writer.commit()
    for part in (rows[9:], rows[:9]):
        with two.writer() as writer:
            writer.rollouts(table(part[::-1]))
            writer.commit()

    def names(ds, seed):
        return {
            name
            for chunk in draw(ds, 5, seed=seed).chunks(["response_id"], size=2)
            for name in chunk.column(0).to_pylist()
        }

    assert len(names(one, 0)) == 5
    assert names(one, 0) == names(two, 0) != names(one, 1)
