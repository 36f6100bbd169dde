"""Estimates on policies whose value is known exactly, and the identities that they have to fulfil."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from offline_rec.evidence.bootstrap import interval, resampled_means
from offline_rec.evidence.diagnostics import Diagnostics, Drift, pareto_k
from offline_rec.evidence.estimators import (
    ESTIMATORS,
    PRIMARY,
    Episodes,
    Table,
    effective_size,
    loo_baseline,
    power_for,
)
from offline_rec.evidence.verdict import RULES, Verdict, compare, judge
from offline_rec.sampling.evaluate import Interval
from tests.offline_rec.toy import World

LOGS = 500
UNBIASED = {estimator.name for estimator in ESTIMATORS if estimator.bias is None}


def episodes(log_ratio: Any, reward: Any, prompt: Any) -> Episodes:
    log_ratio = np.asarray(log_ratio, float)
    return Episodes(log_ratio, np.minimum(log_ratio, 0), np.asarray(reward, float), np.asarray(prompt))


def estimates(given: Episodes) -> dict[str, float]:
    table = Table.of(given)
    return {name: float(value) for name, value in table.estimates(table.values.mean(0)).items()}


@cache
def simulated(drift: float, tilt: float = 0.0, prompts: int = 100) -> tuple[World, list[dict[str, Any]]]:
    """Of 500 logs: all estimates, intervals of value and gain, and the verdict."""
    world, rng = World.drifted(drift, towards_reward=tilt), np.random.default_rng(1)
    found = []
    for seed in range(LOGS):
        given, measured = world.log(rng, prompts=prompts)
        table, diagnostics = Table.of(given), Diagnostics.of(given, measured)
        values = table.estimates(table.values.mean(0))
        drawn = table.estimates(resampled_means(table.values, seed=seed, resamples=400))
        gain = interval(values[PRIMARY] - values["logged"], drawn[PRIMARY] - drawn["logged"])
        found.append(
            {
                "values": values,
                "value": interval(float(values[PRIMARY]), drawn[PRIMARY]),
                "gain": gain,
                "verdict": judge(diagnostics, gain).word,
            }
        )
    return world, found


def share(hits: Iterator[bool]) -> float:
    return float(np.mean(list(hits)))


@pytest.mark.parametrize("drift", [0.3, 1.2])
def test_what_is_called_unbiased_is_unbiased(drift: float) -> None:
    world, logs = simulated(drift)
    assert {"is", "dr"} == UNBIASED
    truth = world.value(world.pi)
    for name in UNBIASED:
        values = np.array([log["values"][name] for log in logs])
        assert abs(values.mean() - truth) < 3.5 * values.std() / np.sqrt(LOGS), name
    # A negative control: the same test refuses what is biased.
    for name in ("logged", "truncated"):
        values = np.array([log["values"][name] for log in logs])
        assert abs(values.mean() - truth) > 3.5 * values.std() / np.sqrt(LOGS), name


def test_a_baseline_makes_the_estimate_less_noisy() -> None:
    _, logs = simulated(1.2)
    spread = {name: np.std([log["values"][name] for log in logs]) for name in ("is", "dr", "dr_sn")}
    assert spread["dr"] < 0.8 * spread["is"]
    assert spread["dr_sn"] < 0.8 * spread["is"]


@pytest.mark.parametrize(("drift", "tilt"), [(0.3, 0.0), (1.2, 0.0), (0.0, 2.0)])
def test_the_intervals_cover_the_truth_as_often_as_they_say(drift: float, tilt: float) -> None:
    world, logs = simulated(drift, tilt)
    truth, gain = world.value(world.pi), world.value(world.pi) - world.value(world.mu)
    covered = share(log["value"].low <= truth <= log["value"].high for log in logs)
    covered_gain = share(log["gain"].low <= gain <= log["gain"].high for log in logs)
    print(f"drift {drift}, tilt {tilt}: {covered:.3f} of value, {covered_gain:.3f} of gain")
    assert 0.90 <= covered <= 0.99
    assert 0.90 <= covered_gain <= 0.99
    # A negative control: the interval of the log's mean does not know the policy.
    assert share(log["gain"].low <= 0 <= log["gain"].high for log in logs) < (0.9 if drift > 1 or tilt else 1)


def test_a_better_policy_is_called_better_and_a_worse_one_worse() -> None:
    for tilt, word in ((2.0, "better"), (-2.0, "worse")):
        world, logs = simulated(0.0, tilt)
        assert (world.value(world.pi) > world.value(world.mu)) == (word == "better")
        assert share(log["verdict"] == word for log in logs) > 0.95


def test_a_policy_that_is_no_better_is_rarely_called_anything() -> None:
    """Rewards that do not depend on the response: whatever the policy, there is nothing to gain."""
    world = World.drifted(0.7)
    world = World(np.full_like(world.reward, 0.5), world.mu, world.pi)
    rng = np.random.default_rng(0)
    said = []
    for _ in range(100):
        given, drift = world.log(rng)
        # Noise that no policy can know, so that the rewards are not constant.
        given = Episodes(given.log_ratio, given.truncated, rng.random(len(given)), given.prompt)
        table = Table.of(given)
        values, drawn = table.values.mean(0), resampled_means(table.values, resamples=400)
        gains = [table.estimates(x)[PRIMARY] - table.estimates(x)["logged"] for x in (values, drawn)]
        said.append(judge(Diagnostics.of(given, drift), interval(float(gains[0]), gains[1])).word)
    assert said.count("no difference") >= 88
    assert said.count("not identifiable") <= 3


def test_a_policy_far_away_is_not_identifiable() -> None:
    _, logs = simulated(9.0)
    assert share(log["verdict"] == "not identifiable" for log in logs) > 0.95
    # And in between, what is still identifiable is right about the side.
    world, logs = simulated(2.0)
    assert world.value(world.pi) > world.value(world.mu)
    assert share(log["verdict"] == "worse" for log in logs) < 0.01


def test_what_passes_the_rules_is_covered_as_often_as_its_interval_says() -> None:
    """With many prompts and a drift so large that some logs pass and some do not."""
    world, logs = simulated(5.0, 0.0, 200)
    passed = [log for log in logs if log["verdict"] != "not identifiable"]
    assert 0.5 * LOGS < len(passed) < LOGS
    truth = world.value(world.pi)
    assert 0.90 <= share(log["value"].low <= truth <= log["value"].high for log in passed) <= 0.99


def test_equal_policies_have_weights_of_one_and_every_estimate_is_the_logs_mean() -> None:
    rng = np.random.default_rng(0)
    given = episodes(np.zeros(40), rng.random(40), np.repeat(np.arange(10), 4))
    for name, value in estimates(given).items():
        assert value == pytest.approx(given.reward.mean(), abs=1e-12), name
    found = Diagnostics.of(given, Drift(120, 0.0, 0.0))
    assert (found.ess, found.mean_weight, found.mean_weight_se) == (pytest.approx(40), 1.0, 0.0)
    assert found.chi2 == pytest.approx(0)
    assert (found.kl, found.kl_k3, found.kl_sequence, found.pareto_k) == (0, 0, 0, None)


def test_ragged_groups_count_as_one_prompt_each() -> None:
    given = episodes(np.zeros(4), [1, 0, 0, 0], [0, 1, 1, 1])
    assert list(estimates(given).values()) == pytest.approx([0.5] * len(ESTIMATORS))


def test_normalised_estimates_do_not_change_with_a_constant_in_all_log_ratios() -> None:
    rng = np.random.default_rng(0)
    given = episodes(rng.normal(0, 1, 40), rng.random(40), np.repeat(np.arange(10), 4))
    moved = Episodes(given.log_ratio + 3, given.truncated + 3, given.reward, given.prompt)
    before, after = estimates(given), estimates(moved)
    unmoved = {"snis", "snis_prompt", "dr_sn", "tempered", "truncated", "logged", "linear"}
    for name in unmoved:
        assert after[name] == pytest.approx(before[name]), name
    for name in before.keys() - unmoved:
        assert after[name] != pytest.approx(before[name]), name
    assert after["is"] == pytest.approx(np.exp(3) * before["is"])


def test_doubly_robust_with_rewards_that_the_baseline_knows_has_no_error() -> None:
    """Rewards that depend on the prompt alone: the correction is zero, whatever the weights."""
    rng = np.random.default_rng(0)
    prompt = np.repeat(np.arange(10), 4)
    reward = rng.random(10)
    given = episodes(rng.normal(0, 3, 40), reward[prompt], prompt)
    found = estimates(given)
    assert found["dr"] == pytest.approx(reward.mean(), abs=1e-12)
    assert found["dr_sn"] == pytest.approx(reward.mean(), abs=1e-12)
    assert abs(found["is"] - reward.mean()) > 0.01


def test_estimates_are_those_of_a_plain_loop() -> None:
    rng = np.random.default_rng(3)
    prompt = np.array([0, 0, 0, 1, 1, 2])
    ratio, reward = rng.normal(0, 1, 6), rng.random(6)
    given = episodes(ratio, reward, prompt)
    found, weight = estimates(given), np.exp(ratio)
    means = [reward[prompt == x].mean() for x in range(3)]
    parts: dict[str, list[float]] = {
        "dr": [],
        "is": [],
        "snis_prompt": [],
        "linear": [],
        "b": [],
        "c": [],
        "w": [],
    }
    for x in range(3):
        at = np.flatnonzero(prompt == x)
        others = [
            np.mean([reward[j] for j in at if j != i]) if len(at) > 1 else np.mean(means[:2]) for i in at
        ]
        rest = [weight[i] * (reward[i] - b) for i, b in zip(at, others, strict=True)]
        parts["dr"].append(np.mean(others) + np.mean(rest))
        parts["is"].append(np.mean(weight[at] * reward[at]))
        parts["snis_prompt"].append((weight[at] * reward[at]).sum() / weight[at].sum())
        parts["linear"].append(
            np.mean([reward[i] + (reward[i] - b) * ratio[i] for i, b in zip(at, others, strict=True)])
        )
        parts["b"].append(np.mean(others))
        parts["c"].append(np.mean(rest))
        parts["w"].append(np.mean(weight[at]))
    for name in ("dr", "is", "snis_prompt", "linear"):
        assert found[name] == pytest.approx(np.mean(parts[name])), name
    assert found["snis"] == pytest.approx(np.mean(parts["is"]) / np.mean(parts["w"]))
    assert found["dr_sn"] == pytest.approx(np.mean(parts["b"]) + np.mean(parts["c"]) / np.mean(parts["w"]))


def test_the_baseline_of_a_response_does_not_know_its_own_reward() -> None:
    given = episodes(np.zeros(5), [1, 2, 6, 10, 20], [0, 0, 0, 1, 2])
    # The first prompt's mean is 3, those of the lone ones 10 and 20.
    assert loo_baseline(given).tolist() == [4, 3.5, 1.5, (3 + 20) / 2, (3 + 10) / 2]


def test_extreme_log_ratios_overflow_nothing() -> None:
    given = episodes([900.0, -900.0, 0.0, 5.0], [1, 0, 1, 0], [0, 0, 1, 1])
    with np.errstate(all="raise", under="ignore"):
        found = estimates(given)
        Diagnostics.of(given, Drift(4, 5.0, 1.0))
    assert found["snis"] == pytest.approx(1)
    assert all(np.isfinite(value) for value in found.values())


def test_effective_size_and_power_of_weights() -> None:
    assert effective_size(np.log([1.0, 1.0, 2.0])) == pytest.approx(16 / 6)
    assert effective_size(np.log([1.0, 1.0, 2.0]) + 500) == pytest.approx(16 / 6)
    weights = np.random.default_rng(0).normal(0, 3, 1000)
    power = power_for(weights, 400)
    assert 0 < power < 1
    assert effective_size(power * weights) == pytest.approx(400, rel=1e-3)
    assert power_for(weights, 1) == 1


@pytest.mark.parametrize("shape", [0.2, 0.5, 1.0])
def test_the_tail_index_is_that_of_the_tail(shape: float) -> None:
    u = np.random.default_rng(1).random(20_000)
    drawn = 1 + (u**-shape - 1) / shape
    assert pareto_k(np.log(drawn)) == pytest.approx(shape, abs=0.15)
    assert pareto_k(np.log(drawn) - 700) == pytest.approx(pareto_k(np.log(drawn)))


def test_a_tail_that_is_too_short_or_flat_says_so() -> None:
    assert pareto_k(np.zeros(100)) is None
    assert pareto_k(np.array([0.0, 1.0])) == np.inf


def test_resampled_means_are_those_of_drawn_rows_and_memory_is_bounded(monkeypatch: Any) -> None:
    values = np.random.default_rng(0).random((30, 2))
    drawn = np.random.default_rng(5).integers(0, 30, (50, 30))
    expected = values[drawn].mean(1)
    np.testing.assert_allclose(resampled_means(values, seed=5, resamples=50), expected)
    monkeypatch.setattr("offline_rec.evidence.bootstrap.AT_A_TIME", 90)
    np.testing.assert_allclose(resampled_means(values, seed=5, resamples=50), expected)


def test_an_interval_is_the_middle_of_what_was_drawn() -> None:
    found = interval(0.5, np.arange(1001) / 1000)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.025, 0.975))
    assert interval(0.5, np.array([np.nan])) == Interval(0.5, -np.inf, np.inf)


def diagnostics(**changes: Any) -> Diagnostics:
    fine = {"episodes": 1000, "prompts": 100, "tokens": 9000, "ess": 800.0, "ess_share": 0.8}
    fine |= {"max_weight": 0.01, "mean_weight": 1.0, "mean_weight_se": 0.02, "chi2": 0.2, "kl": 0.1}
    fine |= {"kl_k3": 0.1, "kl_sequence": 0.9, "pareto_k": 0.3, "reward_std": 0.5}
    return Diagnostics(**fine | changes)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"prompts": 19}, "few_prompts"),
        ({"ess": 49.0}, "overlap"),
        ({"episodes": 10_000, "ess": 99.0}, "overlap"),
        ({"mean_weight": 0.9}, "mean_weight"),
        ({"mean_weight": 1.1}, "mean_weight"),
        ({"pareto_k": 0.71}, "tail"),
    ],
)
def test_each_rule_is_broken_by_its_number_alone(changes: dict[str, Any], rule: str) -> None:
    gain = Interval(0.1, 0.05, 0.15)
    assert judge(diagnostics(), gain).word == "better"
    found = judge(diagnostics(**changes), gain)
    assert (found.word, found.rule) == ("not identifiable", rule)
    assert found.reason
    assert rule in {each.code for each in RULES}


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": 20},
        {"ess": 50.0},
        {"mean_weight": 0.96, "mean_weight_se": 0.0},  # engines differ a little
        {"mean_weight": 0.9, "mean_weight_se": 0.04},
        {"pareto_k": None},
        {"pareto_k": 0.9, "ess_share": 0.95},
    ],
)
def test_what_is_just_within_the_rules_is_judged(changes: dict[str, Any]) -> None:
    assert judge(diagnostics(**changes), Interval(-0.1, -0.15, -0.05)).word == "worse"


def test_an_interval_that_holds_zero_is_no_difference_and_so_is_a_negligible_gain() -> None:
    assert judge(diagnostics(), Interval(0.1, -0.01, 0.2)).word == "no difference"
    assert judge(diagnostics(), Interval(1e-6, 5e-7, 2e-6)).word == "no difference"
    assert judge(diagnostics(reward_std=1e-6), Interval(1e-6, 5e-7, 2e-6)).word == "better"


def test_a_pair_is_judged_only_if_both_are() -> None:
    fine, lost = Verdict("worse", "it is"), Verdict("not identifiable", "overlap too small", "overlap")
    difference, names = Interval(0.1, 0.05, 0.2), ("a", "b")
    assert compare((fine, fine), difference, names, reward_std=0.5).word == "better"
    found = compare((fine, lost), difference, names, reward_std=0.5)
    assert (found.word, found.rule) == ("not identifiable", "overlap")
    assert found.reason == "b is not: overlap too small"
