"""What each field of a shaping does to rows worked out by hand."""

import math

import pytest

from data_tools.shaping import COLUMNS, Shaping, compile
from tests.data_tools.shaping_cases import column, connect, rewards, row, shaped


def test_result_has_one_row_a_response_with_the_documented_columns_sorted_by_group_and_id():
    found = shaped([*rewards(1, 0, group="b"), *rewards(0, 1, group="a")])
    assert list(found) == ["a0", "a1", "b0", "b1"]
    assert list(found["a0"]) == list(COLUMNS)
    assert found["b0"]["group_key"] == "b"
    assert found["b0"]["file_row"] == 0


def test_mean_baseline_gives_reward_minus_group_mean():
    found = shaped(rewards(1, 0, 0, 1, 3))
    assert column(found, "advantage") == {"g0": 0, "g1": -1, "g2": -1, "g3": 0, "g4": 2}
    assert {(r["group_mean"], r["group_size"]) for r in found.values()} == {(1.0, 5)}
    assert found["g0"]["group_std"] == pytest.approx(math.sqrt(6 / 5))


def test_groups_are_found_by_key_not_by_position():
    rows = [
        row("a", 1, group_id="x"),
        row("b", 5, group_id="y"),
        row("c", 3, group_id="x"),
        row("d", 7, group_id="y"),
    ]
    assert column(shaped(rows), "advantage") == {"a": -1, "c": 1, "b": -1, "d": 1}


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("mean", {"g0": -1, "g1": 1, "s0": 0}),
        ("loo", {"g0": -2, "g1": 2, "s0": 0}),
        ("global", {"g0": -3, "g1": -1, "s0": 4}),
        ("none", {"g0": 1, "g1": 3, "s0": 8}),
        ("shrunk", {"g0": 1 - (2 * 2 + 2 * 4) / 4, "g1": 3 - (2 * 2 + 2 * 4) / 4, "s0": 8 - (8 + 2 * 4) / 3}),
        ("avg(reward) over (partition by extra->>'template')", {"g0": 0, "g1": -2.5, "s0": 2.5}),
        ("0.5 * group_mean", {"g0": 0, "g1": 2, "s0": 4}),
    ],
)
def test_single_response_gets_signal_from_the_baseline_chosen_and_none_from_its_group(baseline, expected):
    rows = [*rewards(1, 3), *rewards(8, group="s")]
    for r, template in zip(rows, ("one", "two", "two"), strict=True):
        r["extra"] = f'{{"template": "{template}"}}'
    assert column(shaped(rows, baseline=baseline, shrink_k=2), "advantage") == pytest.approx(expected)


def test_logavgexp_baseline_stays_finite_at_a_low_temperature_and_tends_to_the_maximum():
    found = shaped(rewards(0, 1, 700), baseline="logavgexp", tau=1e-3)
    assert column(found, "advantage") == pytest.approx(
        {"g0": -700 + 1e-3 * math.log(3), "g1": -699 + 1e-3 * math.log(3), "g2": 1e-3 * math.log(3)}
    )


def test_shift_of_asymre_is_added_to_the_baseline():
    assert column(shaped(rewards(0, 1), shift=-0.1), "advantage") == pytest.approx({"g0": -0.4, "g1": 0.6})


def test_group_of_equal_rewards_has_advantage_exactly_zero_whatever_rounding_says():
    found = shaped(rewards(*[0.1] * 3, 0.1 + 1e-12), scale="std")
    assert set(column(found, "advantage").values()) == {0.0}
    assert set(column(found, "group_std").values()) == {0.0}


def test_reward_equal_to_the_mean_up_to_rounding_has_advantage_exactly_zero():
    assert column(shaped(rewards(0.1, 0.2, 0.6, 0.3)), "advantage")["g3"] == 0.0


def test_std_scale_divides_by_population_deviation_plus_eps():
    found = shaped(rewards(0, 2), scale="std", eps=0.5)
    assert column(found, "advantage") == pytest.approx({"g0": -1 / 1.5, "g1": 1 / 1.5})


def test_std_scale_leaves_a_group_without_spread_undivided():
    assert column(shaped(rewards(1, 1), scale="std", shift=-0.1), "advantage") == {"g0": 0.1, "g1": 0.1}


def test_scale_may_be_an_expression_over_all_rows():
    rows = [*rewards(0, 2), *rewards(0, 6, group="h")]
    found = shaped(rows, scale="stddev_pop(reward) over ()")
    std = math.sqrt((4 + 0 + 4 + 16) / 4)
    assert column(found, "advantage") == pytest.approx(
        {"g0": -1 / std, "g1": 1 / std, "h0": -3 / std, "h1": 3 / std}
    )


def test_where_selects_before_the_statistics_and_keep_after_them():
    rows = rewards(0, 1, 5)
    assert column(shaped(rows, where="reward < 5"), "advantage") == {"g0": -0.5, "g1": 0.5}
    assert column(shaped(rows, keep="reward < 5"), "advantage") == {"g0": -2, "g1": -1}


def test_where_may_be_a_window_or_ask_another_view():
    rows = [*rewards(0, 1, 2), *rewards(0, 1, group="h")]
    newest = shaped(
        rows, where="row_number() over (partition by group_id order by response_id) <= 1", baseline="none"
    )
    assert list(newest) == ["g0", "h0"]
    assert list(
        shaped(rows, where="group_id in (select group_id from rollouts group by 1 having count(*) > 2)")
    ) == [
        "g0",
        "g1",
        "g2",
    ]


def test_null_counts_as_false_in_every_condition():
    rows = [row("a", 1.0, finish_reason="stop"), row("b", 0.0), row("c", 4.0, finish_reason="length")]
    assert list(shaped(rows, where="finish_reason <> 'length'")) == ["a"]
    assert list(shaped(rows, drop="finish_reason = 'length'")) == ["a", "b"]
    assert list(shaped(rows, keep="finish_reason = 'stop'")) == ["a"]
    assert column(shaped(rows, expert="finish_reason = 'stop'"), "expert") == {
        "a": True,
        "b": False,
        "c": False,
    }


def test_group_by_takes_several_expressions_and_tells_null_from_a_value():
    rows = [
        row(name, i, policy_version=version)
        for i, (name, version) in enumerate(zip("abc", (1, 1, None), strict=True))
    ]
    found = shaped(rows, group_by="group_id, policy_version")
    assert column(found, "group_key") == {"a": '["g",1]', "b": '["g",1]', "c": '["g",null]'}
    assert column(found, "advantage") == {"a": -0.5, "b": 0.5, "c": 0}


def test_trajectory_has_one_reward_that_of_its_last_rewarded_turn_and_its_advantage_goes_to_every_turn():
    rows = [
        row("a1", 9.0, trajectory_id="a", turn=1),
        row("a2", 1.0, trajectory_id="a", turn=2),
        row("a3", None, trajectory_id="a", turn=3),
        row("b", 3.0),
        row("c1", None, trajectory_id="c", turn=1),
    ]
    found = shaped(rows)
    assert column(found, "advantage") == {"a1": -1, "a2": -1, "a3": -1, "b": 1}
    assert column(found, "reward") == {"a1": 1, "a2": 1, "a3": 1, "b": 3}
    assert {r["group_size"] for r in found.values()} == {2}


def test_same_trajectory_id_in_two_groups_is_two_trajectories():
    rows = [
        row(f"{g}{t}", r, group_id=g, trajectory_id=f"t{t}", turn=1)
        for g, t, r in (("x", 0, 0), ("x", 1, 2), ("y", 0, 4))
    ]
    assert column(shaped(rows), "advantage") == {"x0": -1, "x1": 1, "y0": 0}


def test_statistics_of_an_expression_count_a_trajectory_once():
    rows = [row(f"a{t}", 0.0, trajectory_id="a", turn=t) for t in range(3)] + [row("b", 1.0)]
    assert column(shaped(rows, baseline="avg(reward) over ()"), "advantage")["b"] == 0.5


def test_red_drop_keeps_as_many_negatives_as_positives_and_recomputes_the_baseline():
    found = shaped(rewards(1, 0, 0, 0, 0), drop="balance")
    assert len(found) == 2
    assert sorted(column(found, "advantage").values()) == [-0.5, 0.5]
    assert found["g0"]["group_size"] == 2
    assert column(shaped(rewards(1, 0, 0, 0, 0), drop="balance", scale="std", eps=0), "advantage")["g0"] == 1


def test_red_drop_counts_ties_with_the_mean_as_positive():
    assert len(shaped(rewards(0.1, 0.1, 0.1), drop="balance")) == 3
    assert len(shaped(rewards(1, 3, 5, 3, 2.9, 2.9, 3.2), drop="balance")) == 7


def test_red_drop_draws_by_seed_and_id_not_by_place():
    rows = rewards(1, *[0] * 20)
    draws = {frozenset(shaped(rows, drop="balance", seed=seed)) for seed in range(8)}
    assert len(draws) > 3
    assert shaped(rows, drop="balance", seed=3).keys() == shaped(rows[::-1], drop="balance", seed=3).keys()


def test_zero_variance_drops_whole_groups_but_leaves_their_part_in_the_global_mean():
    rows = [*rewards(1, 1), *rewards(0, 2, group="h"), *rewards(7, group="s")]
    found = shaped(rows, drop="zero-variance", baseline="global")
    assert column(found, "advantage") == pytest.approx({"h0": -2.2, "h1": -0.2})


def test_drop_may_be_an_expression_of_the_advantage():
    assert list(shaped(rewards(0, 1, 5), drop="advantage < -1 and reward = 0")) == ["g1", "g2"]


def test_advantage_expression_comes_after_drop_and_before_weight():
    found = shaped(
        rewards(0, 1),
        advantage="case when reward >= 1 then 1 when advantage > 0 then 3 * advantage else advantage end",
        weight="1 + advantage",
    )
    assert column(found, "advantage") == {"g0": -0.5, "g1": 1}
    assert column(found, "weight") == {"g0": 0.5, "g1": 2}


def test_raft_is_a_shaping():
    assert column(shaped(rewards(0, 1, None, 2), advantage="1", keep="reward > 0"), "advantage") == {
        "g1": 1,
        "g3": 1,
    }


def test_best_of_a_group_can_be_kept():
    assert list(shaped(rewards(0, 1, 3), advantage="1", keep="reward = group_max")) == ["g2"]


def test_rows_without_a_reward_stay_out_unless_an_advantage_is_given_that_needs_none():
    rows = [
        *rewards(1, None),
        row("t1", None, trajectory_id="t", turn=1),
        row("t2", None, trajectory_id="t", turn=2),
    ]
    assert list(shaped(rows)) == ["g0"]
    found = shaped(rows, unrewarded="keep", advantage="1")
    assert column(found, "advantage") == {"g0": 1, "g1": 1, "t1": 1, "t2": 1}
    assert found["g1"]["reward"] is None
    assert found["g0"]["group_size"] == 1


def test_weights_are_products_of_macros():
    rows = [row("a", 0.0, staleness=0, age_days=0.0), row("b", 2.0, staleness=10, age_days=30.0)]
    found = shaped(rows, weight="red_weight(0.5) * staleness_halflife(5) * age_halflife(30)")
    assert column(found, "weight") == pytest.approx({"a": math.exp(-2), "b": math.exp(2) * 0.25 * 0.5})


def test_macro_takes_another_column_or_a_value_in_the_place_of_null():
    rows = [row("a", 1.0), row("b", 1.0, staleness=1)]
    assert column(shaped(rows, weight="staleness_halflife(1, coalesce(staleness, 3))"), "weight") == {
        "a": 0.125,
        "b": 0.5,
    }
    assert column(shaped(rows, weight="red_weight(2, advantage := ln(reward))"), "weight") == {"a": 1, "b": 1}
    assert column(shaped(rows, weight="red_weight(T := 2)"), "weight") == {"a": 1, "b": 1}


def test_weight_may_use_the_statistics_and_text_of_the_row_together():
    rows = rewards(0, 1)
    for r in rows:
        r["extra"] = '{"tier": "gold"}' if r["reward"] else "{}"
    found = shaped(
        rows, weight="case when extra->>'tier' = 'gold' then 2 else 1 end * red_weight(1) / group_size"
    )
    assert column(found, "weight") == pytest.approx({"g0": math.exp(-0.5) / 2, "g1": math.exp(0.5)})


def test_value_that_only_a_condition_makes_safe_is_not_taken_before_the_condition():
    rows = [
        row("a", 1.0, extra='{"w": "2"}'),
        row("b", 0.0, extra='{"w": "none"}'),
        row("c", extra='{"w": "?"}'),
    ]
    found = shaped(rows, weight="case when advantage > 0 then (extra->>'w')::double else 1 end")
    assert column(found, "weight") == {"a": 2, "b": 1}


def test_only_the_wanted_part_of_a_wide_column_passes_through_the_statement():
    statement = compile(
        Shaping(
            baseline="avg(reward) over (partition by extra->>'template')",
            weight="red_weight(1) * case when response like '%42%' then 2 else (extra->>'w')::double end",
            keep="len(response) < 100",
        )
    )
    population, after = statement.split("FROM rollouts")
    for part in ("(extra ->> 'template') AS _baseline_1", "(extra ->> 'w')", "len(response) AS _keep_1"):
        assert part in population
    assert "extra" not in after
    assert "response " not in after
    assert "response, " not in population


def test_expert_rows_can_stay_out_of_the_baseline():
    rows = [row("a", 0.0, policy="own"), row("b", 1.0, policy="own"), row("c", 1.0, policy="teacher")]
    baseline = "avg(reward) filter (where not expert) over (partition by group_key)"
    found = shaped(rows, expert="policy = 'teacher'", baseline=baseline)
    assert column(found, "advantage") == {"a": -0.5, "b": 0.5, "c": 0.5}


def test_priority_is_one_unless_given_and_may_use_the_weight():
    assert set(column(shaped(rewards(0, 1)), "priority").values()) == {1.0}
    assert column(shaped(rewards(0, 1), weight="reward + 1", priority="weight * group_std"), "priority") == {
        "g0": 0.5,
        "g1": 1,
    }


def test_keep_may_rank_rows():
    found = shaped(
        rewards(5, 1, 3), keep="row_number() over (partition by group_key order by reward desc) <= 2"
    )
    assert list(found) == ["g0", "g2"]


def test_splits_are_kept_apart():
    rows = [*rewards(0, 1), *rewards(0, 8, group="h")]
    for r in rows[2:]:
        r["split"] = "holdout"
    assert list(shaped(rows)) == ["g0", "g1"]
    assert list(shaped(rows, split="holdout")) == ["h0", "h1"]
    assert len(shaped(rows, split="all")) == 4


def test_fields_may_hold_comments_quotes_and_any_script():
    rows = [row("a", 0.0, policy="pö -- 'x'"), row("b", 1.0, policy="other")]
    found = shaped(
        rows,
        where="true -- everything",
        weight="case when policy = 'pö -- ''x''' then 2 /* ) */ else red_weight( /* ) */ 1 ) end -- done",
        keep="-- nothing to say\n true",
    )
    assert column(found, "weight") == pytest.approx({"a": 2, "b": math.exp(0.5)})


def test_numbers_and_truth_values_are_taken_as_sql():
    shaping = Shaping(weight=2, keep=True, baseline=0.5)
    assert (shaping.weight, shaping.keep, shaping.baseline) == ("2", "true", "0.5")


def test_statement_is_one_select_and_the_same_each_time():
    shaping = Shaping(drop="balance", weight="red_weight(1)", baseline="shrunk")
    statement = compile(shaping)
    assert statement == compile(shaping)
    with connect(rewards(0, 1)) as con:
        assert len(con.extract_statements(statement)) == 1
        assert con.sql(f"SELECT count(*) FROM ({statement})").fetchall() == [(2,)]
