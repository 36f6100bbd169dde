"""The shaping half of every algorithm, run by DuckDB."""

import math

import pytest

from offline_rec.algorithms import ALGORITHMS, algorithm
from tests.offline_rec.shaped import shaped

REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0]
GROUPS = list("aaaabbb")
EXPERT = {"expert": "policy = 'teacher'"}


def column(rows, name="advantage"):
    return {position: row[name] for position, row in rows.items()}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_shaping_of_every_algorithm_runs(name):
    rows = shaped(REWARDS, {**EXPERT, **algorithm(name).shaping}, groups=GROUPS)
    assert rows
    assert all(math.isfinite(row["advantage"]) and row["weight"] > 0 for row in rows.values())


MEAN = {0: 0.625, 1: -0.375, 2: 0.125, 3: -0.375, 4: 0, 5: 0, 6: 0}


@pytest.mark.parametrize(
    "name", ["reinforce", "rec-oneside-nois", "tis", "opmd", "opmd-pairwise", "dr-grpo", "dro"]
)
def test_advantage_is_the_reward_minus_the_mean_of_the_group(name):
    rows = shaped(REWARDS, algorithm(name).shaping, groups=GROUPS)
    assert column(rows) == pytest.approx(MEAN)
    assert set(column(rows, "weight").values()) == {1}


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "cispo", "sapo", "m2po"])
def test_grpo_family_divides_by_the_deviation(name):
    deviation = math.sqrt((0.625**2 + 2 * 0.375**2 + 0.125**2) / 4)
    rows = shaped(REWARDS, algorithm(name).shaping, groups=GROUPS)
    assert column(rows) == pytest.approx({i: a / deviation for i, a in MEAN.items()}, rel=1e-5)


def test_dapo_leaves_groups_of_equal_rewards_out():
    assert set(shaped(REWARDS, algorithm("dapo").shaping, groups=GROUPS)) == {0, 1, 2, 3}


def test_asymre_lowers_the_baseline_also_where_all_rewards_are_equal():
    rows = shaped(REWARDS, algorithm("asymre").shaping, groups=GROUPS)
    assert column(rows) == pytest.approx({i: a + 0.1 for i, a in MEAN.items()})


def test_topr_takes_the_reward_itself():
    rows = shaped([1.0, -1.0, 1.0, 1.0], algorithm("topr").shaping, groups=list("aabb"))
    assert column(rows) == {0: 1, 1: -1, 2: 1, 3: 1}


@pytest.mark.parametrize("name", ["raft", "dft"])
def test_imitation_takes_responses_with_a_positive_reward(name):
    rows = shaped([*REWARDS, None], algorithm(name).shaping, groups=[*GROUPS, "b"])
    assert column(rows) == {0: 1, 2: 1, 4: 1, 5: 1, 6: 1}


def test_sft_takes_every_response_judged_or_not():
    rows = shaped([1.0, 0.0, None, -3.0], algorithm("sft").shaping)
    assert column(rows) == {0: 1, 1: 1, 2: 1, 3: 1}


def test_red_drop_evens_out_and_takes_the_mean_of_the_rest():
    rows = shaped([1.0, 0.0, 0.0, 0.0, 0.0, 1.0], algorithm("red-drop").shaping)
    assert sorted(column(rows).values()) == [-0.5, -0.5, 0.5, 0.5]
    assert {0, 5} <= set(rows)


def test_red_weight_is_exponential_in_the_advantage():
    rows = shaped(REWARDS, algorithm("red-weight").shaping, groups=GROUPS)
    assert column(rows, "weight") == pytest.approx({i: math.exp(a) for i, a in MEAN.items()})
    assert column(rows) == pytest.approx(MEAN)


def test_luffy_takes_the_baseline_from_sampled_rows():
    policies = ["teacher", None, None, None, "teacher", "teacher", "teacher"]
    rows = shaped(REWARDS, {**EXPERT, **algorithm("luffy").shaping}, groups=GROUPS, policies=policies)
    assert column(rows) == pytest.approx({0: 5 / 6, 1: -1 / 6, 2: 1 / 3, 3: -1 / 6, 4: 0, 5: 0, 6: 0})
    assert column(rows, "expert")[0]


def test_leave_one_out_is_the_group_mean_scaled():
    rows = shaped(REWARDS[:4], {"baseline": "loo"})
    assert column(rows) == pytest.approx({i: 4 / 3 * MEAN[i] for i in range(4)})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_constant_added_to_the_rewards_of_a_group_changes_absolute_rules_only(name):
    """TOPR takes rewards as they are, RAFT and DFT their sign."""
    fields = {**EXPERT, **algorithm(name).shaping}
    plain = shaped(REWARDS, fields, groups=GROUPS)
    raised = shaped([r + 2 for r in REWARDS], fields, groups=GROUPS)
    same = column(plain) == pytest.approx(column(raised)) and column(plain, "weight") == pytest.approx(
        column(raised, "weight")
    )
    assert same is (name not in ("topr", "raft", "dft"))


def test_rewards_scaled_by_a_constant_scale_reinforce_and_leave_grpo_unchanged():
    scaled = [3 * r for r in REWARDS]
    for name, factor in (("reinforce", 3), ("grpo", 1)):
        plain = column(shaped(REWARDS, algorithm(name).shaping, groups=GROUPS))
        other = column(shaped(scaled, algorithm(name).shaping, groups=GROUPS))
        assert other == pytest.approx({i: factor * a for i, a in plain.items()}, rel=1e-4)


def test_red_weight_is_unchanged_if_its_temperature_scales_with_the_rewards():
    scaled = [3 * r for r in REWARDS]
    plain = column(shaped(REWARDS, {"weight": "red_weight(1)"}, groups=GROUPS), "weight")
    assert column(shaped(scaled, {"weight": "red_weight(3)"}, groups=GROUPS), "weight") == pytest.approx(
        plain
    )
    assert column(shaped(scaled, {"weight": "red_weight(1)"}, groups=GROUPS), "weight") != pytest.approx(
        plain
    )
