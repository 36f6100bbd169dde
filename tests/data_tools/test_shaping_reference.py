"""Presets against plain Python on random ragged groups, and the identities that hold between them."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.shaping import BASELINES, COLUMNS, DROPS, SCALES, Shaping, compile, shape
from data_tools.shaping.checks import any_turns
from data_tools.shaping.statement import stages, with_stages
from tests.data_tools.shaping_cases import by_group, column, connect, judged, load, reference, row, shaped

# Thousandths: never within a rounding of each other, often tied.
REWARDS = st.one_of(st.sampled_from([0.0, 0.1, 0.3, 1.0]), st.integers(-3000, 3000).map(lambda n: n / 1000))


@st.composite
def populations(draw, *, nulls=True, trajectories=True):
    rows = []
    for g in range(draw(st.integers(1, 5))):
        for i in range(draw(st.integers(1, 7))):
            reward = draw(st.one_of(st.none(), REWARDS) if nulls else REWARDS)
            trajectory = draw(st.sampled_from([None, "a", "b"])) if trajectories else None
            place = {"trajectory_id": trajectory, "turn": i if trajectory else None}
            rows.append(row(f"g{g}r{i}", reward, group_id=f"g{g}", **place))
    return draw(st.permutations(rows))


CON = connect([])  # opening one for each of many examples takes longer than shaping them


def shaped_or_empty(rows, shaping):
    """The shaped rows, without complaint if there are none."""
    load(CON, rows)
    found = CON.sql(compile(shaping)).to_arrow_table().to_pylist()
    return {r["response_id"]: r for r in found}


@settings(max_examples=100, deadline=None)
@given(
    rows=populations(),
    baseline=st.sampled_from(sorted(BASELINES)),
    scale=st.sampled_from(sorted(SCALES)),
    drop=st.sampled_from(sorted(DROPS)),
    shift=st.sampled_from([0.0, -0.1]),
    seed=st.integers(0, 3),
    tau=st.sampled_from([0.01, 1.0, 10.0]),
    shrink_k=st.sampled_from([0.0, 1.0, 2.5]),
)
def test_every_combination_of_presets_gives_the_advantages_of_the_reference(rows, **fields):
    shaping = Shaping(**fields)
    found = shaped_or_empty(rows, shaping)
    assert column(found, "advantage") == pytest.approx(reference(rows, shaping), rel=1e-9, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(rows=populations())
def test_group_statistics_are_those_of_numpy_over_one_reward_a_trajectory(rows):
    groups = {key: [r["reward"] for r in group] for key, group in by_group(judged(rows)).items()}
    for found in shaped_or_empty(rows, Shaping()).values():
        rewards = groups[found["group_key"]]
        assert found["group_size"] == len(rewards)
        assert found["group_mean"] == pytest.approx(np.mean(rewards), abs=1e-12)
        assert found["group_std"] == pytest.approx(np.std(rewards), abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    rows=populations(trajectories=False, nulls=True),
    drop=st.sampled_from(sorted(DROPS)),
    unrewarded=st.sampled_from(["drop", "keep"]),
)
def test_stages_without_turns_give_the_same_where_no_row_is_one(rows, drop, unrewarded):
    given_anyway = {"advantage": "coalesce(advantage, 1)"} if unrewarded == "keep" else {}
    shaping = Shaping(drop=drop, scale="std", baseline="shrunk", unrewarded=unrewarded, **given_anyway)
    load(CON, rows)
    assert not any_turns(CON)
    select = f"SELECT {', '.join(COLUMNS)} FROM final WHERE kept ORDER BY group_key, response_id"
    tables = [
        CON.sql(with_stages(stages(shaping, "train", turns=turns), select)).to_arrow_table()
        for turns in (True, False)
    ]
    assert tables[0].equals(tables[1])


@settings(max_examples=30, deadline=None)
@given(rows=populations(), drop=st.sampled_from(sorted(DROPS)), order=st.randoms(use_true_random=False))
def test_order_of_rows_and_number_of_threads_do_not_change_one_bit(rows, drop, order):
    shaping = Shaping(drop=drop, scale="std", baseline="logavgexp", weight="red_weight(0.7)")
    shuffled = order.sample(rows, len(rows))
    tables = []
    for arranged, threads in ((rows, 1), (shuffled, 4)):
        with connect(arranged, threads) as con:
            found = con.sql(compile(shaping)).to_arrow_table()
            tables.append(found.drop_columns(["file_row"]))
    assert tables[0].equals(tables[1])


def test_sums_over_many_rows_are_the_same_bits_for_any_order_and_threads():
    draw = random.Random(0)
    rows = [row(f"r{i}", draw.random(), group_id=f"g{i % 900}") for i in range(6000)]
    tables = []
    for threads in (1, 4, 4):
        draw.shuffle(rows)
        with connect(rows, threads) as con:
            stream = shape(con, Shaping(baseline="shrunk", scale="std", weight="red_weight(1)"))
            tables.append(stream.read_all().drop_columns(["file_row"]))
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])


@settings(max_examples=40, deadline=None)
@given(
    rows=populations(),
    baseline=st.sampled_from(["mean", "loo", "global", "shrunk", "logavgexp"]),
    drop=st.sampled_from(sorted(DROPS)),
    constant=st.integers(-50, 50),
)
def test_a_constant_added_to_all_rewards_changes_nothing(rows, baseline, drop, constant):
    shaping = Shaping(baseline=baseline, drop=drop, scale="std")
    moved = [r | {"reward": None if r["reward"] is None else r["reward"] + constant} for r in rows]
    before, after = (column(shaped_or_empty(each, shaping), "advantage") for each in (rows, moved))
    assert after == pytest.approx(before, rel=1e-6, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(rows=populations(nulls=False))
def test_leave_one_out_is_the_group_mean_times_k_over_k_minus_1(rows):
    mean, loo = (shaped_or_empty(rows, Shaping(baseline=name)) for name in ("mean", "loo"))
    for response_id, r in mean.items():
        factor = r["group_size"] / max(1, r["group_size"] - 1)
        assert loo[response_id]["advantage"] == pytest.approx(factor * r["advantage"], abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(rows=populations(nulls=False, trajectories=False), temperature=st.sampled_from([0.3, 1.0, 4.0]))
def test_red_weight_is_weighted_reinforce_plus_imitation(rows, temperature):
    """sum w (r - m) g = sum w (r - m_w) g + (m_w - m) sum w g, and m_w >= m; g stands for any gradient."""
    found = shaped_or_empty(rows, Shaping(weight=f"red_weight({temperature})"))
    for key in {r["group_key"] for r in found.values()}:
        group = [r for r in found.values() if r["group_key"] == key]
        reward, advantage, weight = (
            np.array([r[n] for r in group]) for n in ("reward", "advantage", "weight")
        )
        assert weight == pytest.approx(np.exp((reward - reward.mean()) / temperature), rel=1e-9)
        gradient = np.random.default_rng(len(group)).normal(size=(len(group), 3))
        weighted_mean = weight @ reward / weight.sum()
        lift = weighted_mean - group[0]["group_mean"]
        assert lift >= -1e-12
        pull = (weight * (reward - weighted_mean)) @ gradient + lift * (weight @ gradient)
        assert (weight * advantage) @ gradient == pytest.approx(pull, abs=1e-9 * weight.sum())


def test_red_weight_tends_to_reinforce_as_the_temperature_rises():
    rows = [row(f"r{i}", float(i)) for i in range(4)]
    weights = column(shaped(rows, weight="red_weight(1e9)"), "weight")
    assert list(weights.values()) == pytest.approx([1] * 4)


def test_logavgexp_lies_between_mean_and_maximum_and_moves_from_one_to_the_other():
    rows = [row(f"r{i}", r) for i, r in enumerate((0.0, 0.2, 1.0))]
    baselines = [
        r["reward"] - r["advantage"]
        for tau in (1e6, 1.0, 0.1, 1e-6)
        for r in [shaped(rows, baseline="logavgexp", tau=tau)["r2"]]
    ]
    assert baselines == sorted(baselines)
    assert baselines[0] == pytest.approx(0.4, abs=1e-6)
    assert baselines[-1] == pytest.approx(1.0, abs=1e-5)
    assert baselines[1] == pytest.approx(math.log((1 + math.exp(0.2) + math.e) / 3))
