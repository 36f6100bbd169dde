"""What a shaping did to the data, in numbers."""

import json

import pytest

from data_tools.errors import ConfigError, DataError
from data_tools.shaping import Shaping, compile, explain
from tests.data_tools.shaping_cases import connect, rewards, row

ROWS = [
    *[r | {"policy": "a", "policy_version": i % 2} for i, r in enumerate(rewards(1, 0, 0, 0, None))],
    *[r | {"policy": "b"} for r in rewards(2, 2, group="same")],
    *[r | {"policy": "b"} for r in rewards(5, group="single")],
    row("t1", None, group_id="turns", trajectory_id="t", turn=1),
    row("t2", 1.0, group_id="turns", trajectory_id="t", turn=2),
    row("elsewhere", 1.0, split="holdout"),
]


def explained(**fields):
    with connect(ROWS) as con:
        return explain(con, Shaping(**fields))


def test_every_row_of_the_population_is_accounted_for():
    found = explained(drop="balance", keep="reward < 5")
    assert (found.population, found.without_reward, found.rewards) == (10, 1, 8)
    assert (found.groups, found.single_groups, found.zero_variance_groups) == (4, 2, 1)
    assert (found.dropped, found.not_kept, found.kept) == (2, 1, 6)
    assert found.population == found.without_reward + found.dropped + found.not_kept + found.kept


def test_rows_without_reward_that_are_kept_are_not_counted_as_dropped():
    found = explained(unrewarded="keep", advantage="1")
    assert (found.without_reward, found.dropped, found.kept) == (1, 0, 10)


def test_dropping_zero_variance_groups_counts_their_rows():
    found = explained(drop="zero-variance")
    assert (found.dropped, found.kept) == (5, 4)


def test_weight_mass_is_given_by_policy_and_version_and_sums_to_one():
    found = explained(weight="1 + reward", where="policy is not null")
    mass = {(m.policy, m.policy_version): (m.rows, m.weight) for m in found.mass}
    assert mass == {("a", 0): (2, 3.0), ("a", 1): (2, 2.0), ("b", None): (3, 12.0)}
    assert [m.share for m in found.mass] == pytest.approx([3 / 17, 2 / 17, 12 / 17])
    assert found.effective_rows == pytest.approx(17**2 / (4 + 1 + 1 + 1 + 9 + 9 + 36))


def test_rows_that_teach_nothing_are_counted():
    found = explained(weight="case when reward > 1 then 0 else 1 end")
    assert (found.zero_advantage, found.zero_weight) == (5, 3)


def test_weights_that_are_all_zero_have_no_shares():
    found = explained(weight="0")
    assert {m.share for m in found.mass} == {None}
    assert found.effective_rows is None


def test_explanation_is_data_and_text():
    found = explained(where="policy is not null")
    assert json.loads(found.model_dump_json())["kept"] == 7
    assert found.statement == compile(Shaping(where="policy is not null"))
    text = found.text().removeprefix(found.statement)
    assert text.splitlines() == [
        "",
        "",
        "8  rows of split train where policy is not null",
        "1  without a reward, left out",
        "3  groups of 7 rewards by group_id",
        "1  of one reward",
        "1  of several equal rewards",
        "0  rows dropped by drop = none",
        "0  rows not kept by keep = true",
        "7  rows kept",
        "3  with advantage 0",
        "0  with weight 0",
        "7  effective rows by weight",
        "",
        "policy  version  rows  weight  share",
        "a             0     2       2  28.6%",
        "a             1     2       2  28.6%",
        "b       unknown     3       3  42.9%",
    ]


def test_explaining_what_cannot_be_shaped_raises_what_shaping_would():
    with pytest.raises(DataError, match="matches none of the 10 rows"):
        explained(where="false")
    with pytest.raises(DataError, match=r"weight = '-1' .* in 9 rows"):
        explained(weight="-1")
    with pytest.raises(ConfigError, match="keep = 'nope'"):
        explained(keep="nope")
