"""Where algorithms end on a log of a three-armed bandit, with shaping and objective as they are.

Ten responses of one token hold the arms as the behaviour policy drew them, 3 : 6 : 1, with rewards 0, 0.8, 1.
The policy is a softmax over three logits.
"""

import pytest
import torch
from torch import Tensor

from offline_rec.algorithms import algorithm
from offline_rec.objectives.objective import objective
from tests.offline_rec.shaped import shaped

BEHAVIOUR = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)
REWARD = [0.0, 0.8, 1.0]
ARMS = [0] * 3 + [1] * 6 + [2]


def limit(
    name: str, *, lr: float = 2.0, steps: int = 400, shaping: dict | None = None, **parameters: float
) -> Tensor:
    """Probabilities of the arms after gradient steps on the whole log, from the behaviour policy on."""
    rows = shaped([REWARD[arm] for arm in ARMS], {**algorithm(name).shaping, **(shaping or {})})
    advantages = torch.tensor([rows[i]["advantage"] for i in range(len(ARMS))], dtype=torch.float64)
    weights = torch.tensor([rows[i]["weight"] for i in range(len(ARMS))], dtype=torch.float64)
    behavior, mask = BEHAVIOUR.log()[ARMS][:, None], torch.ones(len(ARMS), 1)
    logits, rule = BEHAVIOUR.log().requires_grad_(), objective(name, **parameters)
    for _ in range(steps):
        logprobs = torch.log_softmax(logits, 0)[ARMS][:, None]
        groups = torch.zeros(len(ARMS), dtype=torch.long)
        loss, _ = rule(logprobs, behavior, advantages, mask, weights, groups=groups)
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - lr * gradient).detach().requires_grad_()
    return torch.softmax(logits, 0).detach()


def assert_ends_at(probabilities: Tensor, expected: list[float], tolerance: float = 6e-3) -> None:
    torch.testing.assert_close(probabilities, torch.tensor(expected).double(), rtol=0, atol=tolerance)


def test_the_gradient_on_the_logits_is_the_advantage_times_the_behaviour_probability():
    """So logits move on straight lines, and the arm of the largest product wins, not the best one."""
    product = BEHAVIOUR * (torch.tensor(REWARD).double() - 0.58)
    moved = limit("reinforce", lr=0.5, steps=6).log() - BEHAVIOUR.log()
    torch.testing.assert_close(moved - moved[0], 3 * (product - product[0]))
    assert product.argmax() == 1


@pytest.mark.parametrize("name", ["reinforce", "red-weight"])
def test_imitating_or_weighing_at_temperature_one_does_not_find_the_best_arm(name):
    assert limit(name, lr=10.0).argmax() == 1


def test_reinforce_ends_on_the_second_best_arm():
    assert_ends_at(limit("reinforce", lr=20.0), [0, 1, 0])


@pytest.mark.parametrize(
    ("shift", "expected"), [(-0.1, [0, 1, 0]), (-0.3, [0, 0.90, 0.10]), (-0.58, [0, 0.828, 0.172])]
)
def test_asymre_imitates_more_the_lower_its_baseline(shift, expected):
    assert_ends_at(limit("asymre", lr=-3 / shift, shaping={"shift": shift}), expected)


@pytest.mark.parametrize(("tau", "expected"), [(0.1, [0.001, 0.774, 0.225]), (1.0, [0.163, 0.697, 0.140])])
@pytest.mark.parametrize("name", ["opmd", "opmd-token"])
def test_opmd_stays_near_the_behaviour_policy(name, tau, expected):
    """On one token, the penalty per token is that of the response, with half of tau."""
    parameters = {"tau": tau} if name == "opmd" else {"penalty": tau / 2}
    assert_ends_at(limit(name, lr=2 / tau, steps=300, **parameters), expected, 1e-3)


def test_pairwise_opmd_with_tau_one_is_close_to_the_exact_tilt():
    tilt = BEHAVIOUR * torch.exp(torch.tensor(REWARD).double())
    assert_ends_at(limit("opmd-pairwise", lr=1.0, steps=400, tau=1.0), (tilt / tilt.sum()).tolist())


@pytest.mark.parametrize(("temperature", "mass"), [(1, 0.116), (0.3, 0.376), (0.2, 0.463), (0.1, 0.702)])
def test_red_weight_moves_mass_to_the_best_arm_as_its_temperature_falls(temperature, mass):
    shaping = {"weight": f"red_weight({temperature}) / red_weight({temperature}, 0.42)"}  # at most 1
    ends = limit("red-weight", lr=10.0, shaping=shaping)
    assert ends[2].item() == pytest.approx(mass, abs=2e-3)


def test_red_weight_limits_are_reinforce_and_imitation_of_the_best():
    assert_ends_at(limit("red-weight", lr=20.0, shaping={"weight": "red_weight(1e6)"}), [0, 1, 0])
    cold = {"weight": "red_weight(0.01) / red_weight(0.01, 0.42)"}
    assert_ends_at(limit("red-weight", lr=10.0, shaping=cold), [0, 0, 1], 1e-2)


def test_one_sided_mask_stops_every_rewarded_arm_at_the_edge_of_the_band():
    assert_ends_at(limit("rec-oneside-nois", lr=0.1), [1 - 1.2 * 0.7, 1.2 * 0.6, 1.2 * 0.1])
