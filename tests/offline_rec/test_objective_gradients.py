"""Every objective against its loss, written as plain loops, differentiated by autograd or by differences."""

import pytest
import torch
from torch.testing import assert_close

from offline_rec.algorithms import ALGORITHMS
from offline_rec.objectives import scalars
from offline_rec.objectives.objective import objective
from tests.offline_rec import by_hand
from tests.offline_rec.steps import centred, random_step

SEEDS = (0, 1, 2)
SPREADS = {"gspo": 3e-4, "rec-gspo-nois": 3e-4, "rec-gspo-is": 3e-4}
"""Log-ratios of the size of the band, so that both sides of it occur."""


def step_for(name, seed):
    step = random_step(seed, spread=SPREADS.get(name, 0.5))
    if name == "opmd-pairwise":
        step.advantages = centred(step.advantages, step.weights, step.groups)
    return step


def test_every_algorithm_has_a_loss_by_hand():
    assert set(by_hand.LOSSES) == set(ALGORITHMS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradient_is_that_of_the_loss_by_hand(name, seed):
    step = step_for(name, seed)
    leaf, batch = step.by_hand()
    (expected,) = torch.autograd.grad(by_hand.LOSSES[name](batch), leaf)
    _, _, gradient = step.call(objective(name))
    assert expected.abs().sum() > 0
    assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", by_hand.VALUES)
def test_value_of_the_scalar_objective_is_reported(name, seed):
    step = step_for(name, seed)
    _, batch = step.by_hand()
    _, metrics, _ = step.call(objective(name))
    assert_close(metrics["objective"], -by_hand.VALUES[name](batch).detach(), rtol=1e-10, atol=1e-14)


WITH_SCALAR = [
    name
    for name, row in ALGORITHMS.items()
    if (row.composition.keep, row.composition.importance) in scalars.GAIN
]


@pytest.mark.parametrize("name", WITH_SCALAR)
def test_reported_value_changes_as_the_gradient_says(name):
    """Along a random direction; at the defaults the bounds of M2PO are its constant floors."""
    rule, step = objective(name, kl_coef=0.03), random_step(6, spread=SPREADS.get(name, 0.5))
    _, _, gradient = step.call(rule)
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start, values = step.logprobs, []
    for sign in (1, -1):
        step.logprobs = start + sign * 1e-6 * direction
        values.append(step.call(rule)[1]["objective"].item())
    slope = (values[0] - values[1]) / 2e-6
    assert slope == pytest.approx(-(gradient * direction).sum().item(), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("name", ["reinforce", "rec-oneside-is", "opmd-token", "dapo"])
def test_kl_to_a_reference_joins_any_objective(name, kind):
    step = random_step(3)
    leaf, batch = step.by_hand()
    whole = by_hand.LOSSES[name](batch) + by_hand.kl(batch, kind, 0.07)
    (expected,) = torch.autograd.grad(whole, leaf)
    _, metrics, gradient = step.call(objective(name, kl_kind=kind, kl_coef=0.07))
    assert_close(gradient, expected, rtol=1e-10, atol=1e-14)
    assert_close(metrics["objective"], -whole.detach(), rtol=1e-10, atol=1e-14)


def test_pairwise_gradient_is_the_finite_difference_of_the_pairwise_loss():
    step = step_for("opmd-pairwise", 5)
    _, _, gradient = step.call(objective("opmd-pairwise"))

    def loss_at(row, token, offset):
        moved = random_step(5)
        moved.advantages = step.advantages
        moved.logprobs[row, token] += offset
        return by_hand.opmd_pairwise(moved.by_hand()[1]).item()

    for row in range(len(step.mask)):
        for token in step.mask[row].nonzero().flatten().tolist():
            difference = (loss_at(row, token, 1e-5) - loss_at(row, token, -1e-5)) / 2e-5
            assert gradient[row, token].item() == pytest.approx(difference, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "opmd", "topr", "luffy"])
@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "sequence-sum", "constant"])
def test_a_reduction_changes_the_factor_of_a_response_and_nothing_else(name, reduction):
    step = step_for(name, 1)
    original, changed = objective(name), objective(name, reduction=reduction)
    lengths = (step.mask != 0).sum(1).double()[:, None]
    rows, tokens = (step.weights > 0).sum(), lengths[step.weights > 0].sum()

    def factor(composition):
        constant = rows * composition.parameters.get("length", 1)
        return {
            "token-mean": 1 / tokens,
            "sequence-mean": 1 / lengths / rows,
            "sequence-sum": 1 / rows,
            "constant": 1 / constant,
        }[composition.reduction]

    plain = step.call(original)[2] / factor(original.composition)
    assert_close(step.call(changed)[2], plain * factor(changed.composition), rtol=1e-6, atol=1e-14)


def test_token_advantages_are_taken_as_they_are():
    step = random_step(4)
    per_token = step.advantages[:, None] * torch.linspace(0.5, 1.5, step.mask.shape[1]).double()
    _, _, whole = step.call(objective("rec-oneside-is"))
    step.advantages = per_token
    _, _, scaled = step.call(objective("rec-oneside-is"))
    assert_close(scaled, whole * torch.linspace(0.5, 1.5, step.mask.shape[1]).double())


def test_token_that_tripled_in_probability_gets_no_gradient():
    logprobs = torch.log(torch.tensor([[0.5, 0.9]], dtype=torch.float64)).requires_grad_()
    behavior = torch.log(torch.tensor([[0.5, 0.3]], dtype=torch.float64))
    loss, metrics = objective("rec-oneside-nois")(
        logprobs, behavior, torch.tensor([1.0]), torch.ones(1, 2, dtype=torch.uint8)
    )
    loss.backward()
    assert_close(loss.item(), -0.5 * torch.log(torch.tensor(0.5)).item())
    assert logprobs.grad.tolist() == [[-0.5, 0.0]]
    assert metrics["kept"] == 1
