"""Identities between algorithms: what the paper proves, and what follows from its formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from offline_rec.algorithms import ALGORITHMS
from offline_rec.objectives.adaptive import balancing_temperature, water_level
from offline_rec.objectives.keep import KEEP
from offline_rec.objectives.objective import objective
from offline_rec.objectives.signals import signals
from tests.offline_rec import by_hand
from tests.offline_rec.steps import centred, random_step

RATIO_FREE_AT_ONE = [
    *(
        "rec-oneside-nois",
        "rec-oneside-is",
        "rec-twoside-nois",
        "rec-twoside-is",
        "rec-ring-nois",
        "rec-ring-is",
    ),
    *("cispo", "tis", "dapo", "m2po", "asymre", "red-drop", "red-weight", "opmd-token"),
    *(
        "opmd",
        "opmd-pairwise",
        "topr",
        "sapo",
        "gmpo",
        "gspo",
        "rec-gspo-nois",
        "rec-gspo-is",
        "grpo",
        "dr-grpo",
    ),
]


def gradient(name, step, **parameters):
    return step.call(objective(name, **parameters))[2]


@pytest.mark.parametrize("name", RATIO_FREE_AT_ONE)
def test_at_ratio_one_every_variant_is_reinforce(name):
    step = random_step(0, weighted=False)
    step.behavior = step.logprobs.clone()
    own = objective(name)
    reduction = {"reduction": own.composition.reduction}
    if "length" in own.composition.parameters:
        reduction["length"] = own.composition.parameters["length"]
    assert_close(gradient(name, step), gradient("reinforce", step, **reduction))


@pytest.mark.parametrize("tau", [0.0, 0.3, 10.0])
def test_pairwise_loss_at_the_anchor_has_the_gradient_of_reinforce(tau):
    """For any responses, wherever they came from: finite differences of the pairwise loss itself."""
    step = random_step(1, weighted=False)
    step.behavior = step.logprobs.clone()
    step.advantages = centred(step.advantages, step.weights, step.groups)
    plain = gradient("reinforce", step, reduction="sequence-sum")
    assert_close(gradient("opmd-pairwise", step, tau=tau), plain)

    def pairwise(moved):
        return by_hand.opmd_pairwise(moved.by_hand()[1]).item()

    for row, token in [(0, 0), (3, 0), (8, 0)]:
        moved = [random_step(1, weighted=False) for _ in range(2)]
        for other, offset in zip(moved, (1e-5, -1e-5), strict=True):
            other.behavior, other.advantages = step.behavior, step.advantages
            other.logprobs[row, token] += offset
        difference = (pairwise(moved[0]) - pairwise(moved[1])) / 2e-5
        assert plain[row, token].item() == pytest.approx(difference, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["rec-oneside-nois", "rec-twoside-nois", "rec-ring-nois"])
def test_an_endless_band_is_reinforce(name, seed):
    step = random_step(seed, spread=2.0)
    assert_close(gradient(name, step, epsilon_low=1.0, epsilon_high=math.inf), gradient("reinforce", step))


def exact_ties():
    """Ratios that lie exactly on the bounds that are read off them, for either sign of the advantage."""
    logprobs = torch.log(torch.tensor([[0.6, 0.4], [0.6, 0.4]], dtype=torch.float64))
    behavior = torch.log(torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64))
    high, low = torch.exp(logprobs - behavior)[0].tolist()
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    return logprobs, behavior, advantages, {"epsilon_low": 1 - low, "epsilon_high": high - 1}


@pytest.mark.parametrize("name", ["rec-oneside-is", "rec-twoside-is", "rec-ring-is"])
def test_tokens_on_the_bound_are_kept_as_the_gradient_of_a_clip_is(name):
    logprobs, behavior, advantages, band = exact_ties()
    leaf, other = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    loss, metrics = objective(name, **band)(leaf, behavior, advantages, torch.ones(2, 2))
    ratio, a = torch.exp(other - behavior), advantages[:, None]
    clipped = ratio.clamp(1 - band["epsilon_low"], 1 + band["epsilon_high"])
    (-torch.minimum(ratio * a, clipped * a).mean()).backward()
    loss.backward()
    assert_close(leaf.grad, other.grad)
    assert metrics["kept"] == 4


@settings(max_examples=50, deadline=None)
@given(
    drift=st.floats(-3, 3),
    advantage=st.sampled_from([-1.0, 1.0]),
    low=st.floats(0.01, 1),
    high=st.floats(0.01, 3),
    outer=st.tuples(st.floats(0.01, 1), st.floats(0.01, 4)),
)
def test_two_side_is_within_ring_is_within_one_side(drift, advantage, low, high, outer):
    seen = signals(
        torch.tensor([[drift - 5]], dtype=torch.float64),
        torch.tensor([[-5.0]], dtype=torch.float64),
        torch.tensor([advantage]),
        torch.ones(1, 1),
    )
    band = {"epsilon_low": low, "epsilon_high": high}
    one, two = KEEP["one-side"](seen, **band).item(), KEEP["two-side"](seen, **band).item()
    ring = KEEP["ring"](seen, **band, outer_low=outer[0], outer_high=outer[1]).item()
    assert two <= ring <= one


@pytest.mark.parametrize(
    ("ratio", "advantage", "kept"),
    [
        (0.3, 1, True),  # far below: the update leads back
        (0.4, 1, True),
        (0.41, 1, False),  # the annulus
        (0.79, 1, False),
        (0.81, 1, True),
        (1.19, 1, True),
        (1.21, 1, False),
        (3.5, 1, False),
        (0.3, -1, False),
        (0.79, -1, False),
        (1.21, -1, False),
        (2.99, -1, False),
        (3.01, -1, True),
    ],
)
def test_ring_leaves_out_one_annulus_a_sign(ratio, advantage, kept):
    behavior = torch.tensor([[-4.0]], dtype=torch.float64)
    seen = signals(behavior + math.log(ratio), behavior, torch.tensor([float(advantage)]), torch.ones(1, 1))
    parameters = objective("rec-ring-nois").composition.parameters
    band = {key: parameters[key] for key in ("epsilon_low", "epsilon_high", "outer_low", "outer_high")}
    assert KEEP["ring"](seen, **band).item() is kept


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_lower_baseline_is_imitation_with_that_coefficient(beta):
    step = random_step(2, weighted=False)
    plain = gradient("reinforce", step)
    step.advantages = step.advantages + beta
    shifted = gradient("asymre", step)
    step.advantages = torch.full((9,), beta).double()
    assert_close(shifted, plain + gradient("sft", step))


def test_red_weight_splits_into_a_weighted_baseline_and_imitation():
    step = random_step(3, rows=6, weighted=False)
    step.groups = torch.zeros(6, dtype=torch.long)
    rewards = step.advantages.clone()
    step.advantages = rewards - rewards.mean()
    step.weights = torch.exp(step.advantages)
    whole = gradient("red-weight", step)
    weighted_mean = (step.weights * rewards).sum() / step.weights.sum()
    step.advantages = rewards - weighted_mean
    first = gradient("reinforce", step)
    step.advantages = (weighted_mean - rewards.mean()).expand(6)
    assert weighted_mean > rewards.mean()
    assert_close(whole, first + gradient("sft", step))


def test_adaptive_weights_start_once_kept_advantages_are_negative():
    step = random_step(4, weighted=False)
    step.advantages = torch.tensor([0.5, -1.0, 0.7, -0.2, 0.9, 0.1, 0.3, 0.2, 0.4]).double()
    assert_close(gradient("red-weight-adaptive", step), gradient("rec-oneside-nois", step))
    step.advantages = step.advantages - 0.5
    adaptive, plain = gradient("red-weight-adaptive", step), gradient("rec-oneside-nois", step)
    assert adaptive[1].abs().sum() < plain[1].abs().sum()


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(-3, 3), min_size=2, max_size=8))
def test_balancing_temperature_balances_or_is_the_lowest(values):
    advantages = torch.tensor(values, dtype=torch.float64)
    temperature = balancing_temperature(advantages, torch.ones_like(advantages), 0.8).item()
    if advantages.sum() >= 0:
        assert temperature == math.inf
    elif temperature > 0.8 + 1e-9:
        weights = torch.exp(advantages / temperature)
        assert abs((advantages * weights).sum().item()) < 1e-9
    else:
        assert (advantages * torch.exp(advantages / 0.8)).sum() <= 1e-9


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(0, 4), max_size=9), budget=st.floats(0.001, 3))
def test_water_level_meets_the_budget_exactly(values, budget):
    squares = torch.tensor(values, dtype=torch.float64)
    level = water_level(squares, budget).item()
    if not values or squares.mean() <= budget:
        assert level == math.inf
    else:
        assert squares.clamp(max=level).mean().item() == pytest.approx(budget, rel=1e-9)


@pytest.mark.parametrize("budget", [0.01, 0.1, 0.4, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_second_moment_bounds_clip_as_the_plain_search_says(seed, budget):
    step = random_step(seed, weighted=False)
    floors = {"floor_low": 0.0, "floor_high": 0.0}
    leaf, batch = step.by_hand()
    squares = [
        math.log(rho) ** 2
        for y in batch
        for rho in y.ratio
        if (y.advantage > 0 and rho > 1) or (y.advantage < 0 and rho < 1)
    ]
    edge = math.sqrt(by_hand.max_level(sorted(squares), budget))
    loss = by_hand.token_mean(by_hand.ppo(1 - math.exp(-edge), math.expm1(edge)))(batch)
    assert_close(gradient("m2po", step, budget=budget, **floors), torch.autograd.grad(loss, leaf)[0])


def test_second_moment_never_touches_tokens_that_come_back():
    logprobs = torch.tensor([[-5.0, -1.0], [-1.0, -5.0]], dtype=torch.float64)
    behavior = torch.tensor([[-3.0, -1.0], [-3.0, -5.0]], dtype=torch.float64)
    _, metrics = objective("m2po")(logprobs, behavior, torch.tensor([1.0, -1.0]), torch.ones(2, 2))
    assert metrics["kept"] == 4


def test_a_constant_added_to_the_rewards_of_a_group_leaves_group_means_unchanged():
    """Here for the objective; the shaping has its own test."""
    step = random_step(5, weighted=False)
    rewards = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for constant in (0.0, 3.0):
        step.advantages = centred(rewards + constant, step.weights, step.groups)
        results.append(gradient("rec-oneside-nois", step))
    assert_close(*results)


@pytest.mark.parametrize("name", ["reinforce", "rec-oneside-nois", "rec-oneside-is", "rec-ring-nois", "topr"])
def test_advantages_scaled_by_a_constant_scale_the_gradient(name):
    step = random_step(6)
    plain = gradient(name, step)
    step.advantages = step.advantages * 2.5
    assert_close(gradient(name, step), plain * 2.5)


def test_grpo_and_its_relatives_differ_in_reduction_and_band_only():
    step = random_step(7)
    assert_close(gradient("grpo", step, reduction="token-mean"), gradient("rec-oneside-is", step))
    assert_close(gradient("dapo", step, epsilon_high=0.2), gradient("rec-oneside-is", step))
    assert_close(gradient("rec-gspo-is", step), gradient("gspo", step))
    assert ALGORITHMS["gspo"].shaping != ALGORITHMS["rec-gspo-is"].shaping
