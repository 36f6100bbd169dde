"""Which prompts deserve new samples, on data whose scores are worked out by hand."""

import math

import pyarrow as pa
import pytest

import data_tools
from data_tools.errors import ConfigError
from data_tools.schema import LOGPROBS
from offline_rec.sampling.planner import COLUMNS, Budget, plan_prompts, planned_prompts
from tests import tiny
from tests.offline_rec.datasets import rollouts

WEIGHTS = "f" * 32
REWARDS = {"even": [0.0, 1.0, 0.0, 1.0], "settled": [1.0, 1.0], "rare": [0.0, 0.0, 0.0, 1.0], "new": [None]}
RATIOS = {"even": [1.0, 1.0, 1.0, 1.0], "settled": [0.1, 0.1], "rare": [3.0, 1.0, 1.0, 1.0], "new": [1.0]}
"""What the model's scores are over those logged, by prompt."""


@pytest.fixture
def ds(tmp_path):
    rows = [
        {
            "response_id": f"{prompt}-{k}",
            "group_id": prompt,
            "prompt": prompt,
            "prompt_hash": prompt,
            "reward": reward,
            "response_ids": [5],
            "prompt_ids": [4],
            "behavior_logprobs": [-2.0],
            "behavior_logprob": -2.0,
        }
        for prompt, rewards in REWARDS.items()
        for k, reward in enumerate(rewards)
    ]
    made = data_tools.open(tmp_path / "ds", create=True)
    with made.writer() as writer:
        writer.rollouts(rollouts(rows))
        batch = writer.commit()
    ratios = [ratio for prompt in REWARDS for ratio in RATIOS[prompt]]
    scores = pa.table(
        {
            "response_id": [row["response_id"] for row in rows],
            "logprobs": [[-2.0 + math.log(ratio)] for ratio in ratios],
            "logprob": [-2.0 + math.log(ratio) for ratio in ratios],
            "temperature": [1.0] * len(rows),
        }
    ).cast(LOGPROBS)
    with made.sidecar("logprobs", WEIGHTS).writer(batch) as writer:
        writer.write(scores)
        writer.commit()
    return made


def by_prompt(table):
    return {row["prompt_hash"]: row for row in table.to_pylist()}


def test_scores_are_those_worked_out_by_hand(ds):
    found = by_prompt(plan_prompts(ds, weights=WEIGHTS))
    assert found["even"]["ess"] == pytest.approx(1)
    assert found["rare"]["ess"] == pytest.approx(6**2 / 12 / 4)
    assert found["rare"]["mean_ratio"] == pytest.approx(1.5)
    assert found["rare"]["overlap"] == pytest.approx(0.75)
    # Both of its rows are equally unlikely now: an effective share of 1 hides what the mean ratio tells.
    assert found["settled"]["ess"] == pytest.approx(1)
    assert found["settled"]["overlap"] == pytest.approx(0.1)
    assert found["settled"]["zero_variance"] is True
    spread = math.sqrt(3) / 4 / 0.5
    expected = {
        "even": 0 + 1 + 0 + 0.5,
        "rare": 0.25 + spread + 0 + 0.5,
        "settled": 0.9 + 0 + 0.5 + 0.25,
        "new": 0 + 0 + 0 + 0.125,
    }
    assert {key: row["score"] for key, row in found.items()} == pytest.approx(expected)
    assert plan_prompts(ds, weights=WEIGHTS)["prompt_hash"].to_pylist() == sorted(
        expected, key=lambda key: -expected[key]
    )


def test_without_stored_scores_nothing_is_said_of_the_overlap(ds):
    for weights in (None, "0" * 32):
        found = by_prompt(plan_prompts(ds, weights=weights))
        assert {row["overlap"] for row in found.values()} == {None}
        assert found["even"]["score"] == pytest.approx(1.5)


def test_a_budget_goes_to_the_best_prompts_by_an_expression_of_ones_own(ds, tmp_path):
    model = tiny.save(tmp_path / "m")
    found = planned_prompts(ds, model, Budget(9, "-reward_mean"), n=4, where="reward IS NOT NULL")
    assert found == ["rare", "even"]
    assert all(plan_prompts(ds, score=name).num_rows == 4 for name in COLUMNS)
    with pytest.raises(ConfigError, match="budget of 3 responses is less than the 4"):
        planned_prompts(ds, model, Budget(3), n=4)
    with pytest.raises(ConfigError):
        plan_prompts(ds, score="no_such_column")
