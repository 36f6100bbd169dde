"""What must not pass silently: missing log-probs, ratios that overflow, numbers and shapes without sense."""

import math

import pytest
import torch
from torch.testing import assert_close

from data_tools.errors import ConfigError, DataError
from offline_rec.algorithms import ALGORITHMS
from offline_rec.objectives import metrics as metric
from offline_rec.objectives.objective import objective
from offline_rec.objectives.signals import concatenate, signals
from tests.offline_rec.steps import random_step

NEEDS_MU = [name for name, row in ALGORITHMS.items() if "behavior_logprobs" in row.needs]
NO_MU = [name for name in ALGORITHMS if name not in NEEDS_MU]


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NEEDS_MU)
def test_missing_behaviour_logprobs_are_refused_by_row(name, missing):
    step = random_step(0, weighted=False)
    step.expert[:] = False
    step.behavior[3, 0], step.behavior[7, 0] = missing, missing
    step.mask[3, 0], step.mask[7, 0] = 1, 1
    with pytest.raises(DataError, match=r"behaviour log-probs are missing .* in 2 of 9 rows: positions 3, 7"):
        step.call(objective(name))


@pytest.mark.parametrize("name", NEEDS_MU)
def test_no_behaviour_logprobs_at_all_are_refused(name):
    step = random_step(0)
    step.expert[:] = False
    step.behavior = None
    with pytest.raises(DataError, match="needs behaviour log-probs"):
        step.call(objective(name))


@pytest.mark.parametrize("name", NO_MU)
def test_objectives_without_ratios_need_no_behaviour_logprobs(name):
    step = random_step(1)
    _, _, with_them = step.call(objective(name))
    step.behavior = torch.full_like(step.behavior, math.nan)
    _, metrics, without = step.call(objective(name))
    assert_close(without, with_them)
    assert "kl_k3" not in metric.finish(metrics)
    step.behavior = None
    assert_close(step.call(objective(name))[2], with_them)


def test_expert_rows_need_no_behaviour_logprobs():
    step = random_step(2)
    _, _, full = step.call(objective("luffy"))
    step.behavior[step.expert] = math.nan
    assert step.expert.any()
    assert_close(step.call(objective("luffy"))[2], full)
    step.expert = None
    with pytest.raises(DataError, match="expert"):
        step.call(objective("luffy"))


def test_missing_reference_is_refused_once_a_kl_term_is_asked_for():
    step = random_step(3)
    step.reference[1, 0] = math.nan
    step.mask[1, 0] = 1
    step.call(objective("grpo"))
    with pytest.raises(DataError, match=r"reference log-probs .* positions 1"):
        step.call(objective("grpo", kl_coef=0.1))
    with pytest.raises(DataError, match="reference log-probs"):
        step.call(objective("dro"))


def test_missing_groups_are_refused_by_the_pairwise_loss():
    step = random_step(4)
    step.groups = None
    with pytest.raises(DataError, match="groups"):
        step.call(objective("opmd-pairwise"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_extreme_ratios_give_finite_gradients(name, dtype):
    step = random_step(5)
    step.logprobs[0, 0], step.behavior[0, 0] = -1e4, -1e-3
    step.logprobs[1, 0], step.behavior[1, 0] = -1e-3, -1e4
    step.mask[:2, 0] = 1
    loss, metrics, gradient = step.to(dtype).call(objective(name, kl_coef=0.1))
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert all(math.isfinite(value) for value in metric.finish(metrics).values())
    assert loss.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)


def test_log_ratios_are_bounded_by_twenty():
    behavior = torch.tensor([[-30.0, -1.0]], dtype=torch.float64)
    logprobs = torch.tensor([[-1.0, -31.0]], dtype=torch.float64, requires_grad=True)
    loss, _ = objective("opmd-token", penalty=0.5)(logprobs, behavior, torch.zeros(1), torch.ones(1, 2))
    loss.backward()
    assert logprobs.grad.tolist() == [[10.0, -10.0]]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_half_precision_is_widened_before_the_difference(name):
    step = random_step(6).to(torch.bfloat16)
    _, _, low = step.call(objective(name))
    _, _, high = step.to(torch.float32).call(objective(name))
    assert low.dtype == torch.bfloat16
    assert_close(low.float(), high, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 4)])
def test_a_step_without_tokens_is_zero_not_nan(name, shape):
    leaf = torch.zeros(shape, requires_grad=True)
    rows = shape[0]
    loss, metrics = objective(name, kl_coef=0.1)(
        leaf,
        torch.zeros(shape),
        torch.ones(rows),
        torch.zeros(shape),
        reference_logprobs=torch.zeros(shape),
        groups=torch.zeros(rows, dtype=torch.long),
        expert=torch.zeros(rows, dtype=torch.bool),
    )
    loss.backward()
    assert loss == 0
    assert not leaf.grad.any()
    assert metric.finish(metrics)["tokens"] == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("weights", -1.0, "weights are negative or not finite in 1 of 9 rows: positions 4"),
        ("weights", math.nan, "weights are negative or not finite"),
        ("advantages", math.nan, "advantages are not finite in 1 of 9 rows: positions 4"),
        ("advantages", math.inf, "advantages are not finite"),
    ],
)
def test_senseless_numbers_are_refused_by_row(field, value, message):
    step = random_step(7, weighted=False)
    getattr(step, field)[4] = value
    with pytest.raises(DataError, match=message):
        step.call(objective("reinforce"))


def test_many_bad_rows_are_not_all_listed():
    step = random_step(7, rows=30, weighted=False)
    step.advantages[:] = math.nan
    with pytest.raises(DataError, match=r"in 30 of 30 rows: positions 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.$"):
        step.call(objective("reinforce"))


@pytest.mark.parametrize("field", ["mask", "behavior", "advantages", "weights", "groups", "expert"])
def test_shapes_that_do_not_fit_are_refused(field):
    step = random_step(8)
    setattr(step, field, getattr(step, field)[:-1])
    with pytest.raises(DataError):
        step.call(objective("opmd-pairwise"))
    with pytest.raises(DataError, match="axes"):
        objective("reinforce")(torch.zeros(3), None, torch.zeros(3), torch.ones(3))


def test_micro_batches_with_and_without_an_input_cannot_be_joined():
    step = random_step(9)
    ones = {"mask": step.mask, "advantages": step.advantages}
    with_it = signals(step.logprobs, step.behavior, **ones)
    without = signals(step.logprobs, None, **ones)
    with pytest.raises(DataError, match="behavior is given for some"):
        concatenate([with_it, without])


def test_masked_advantages_of_token_shape_may_be_anything():
    step = random_step(10)
    _, _, plain = step.call(objective("rec-oneside-nois"))
    step.advantages = torch.where(step.mask != 0, step.advantages[:, None], math.nan)
    assert_close(step.call(objective("rec-oneside-nois"))[2], plain)


def test_gradient_never_flows_through_the_coefficients():
    step = random_step(11)
    loss, _, gradient = step.call(objective("rec-oneside-is"))
    terms = objective("rec-oneside-is").terms(
        signals(step.logprobs.requires_grad_(), step.behavior, step.advantages, step.mask, step.weights)
    )
    assert not terms.coefficients.requires_grad
    tokens = (step.mask != 0)[step.weights > 0].sum()
    assert_close(gradient, -terms.coefficients / tokens)
    assert_close(
        loss, -(terms.coefficients * torch.where(step.mask != 0, step.logprobs, 0)).sum().detach() / tokens
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"epsilon_hihg": 1.0}, "no parameter 'epsilon_hihg'\ndid you mean 'epsilon_high'"),
        ({"tau": 1.0}, "no parameter 'tau'"),
        ({"epsilon_low": 0.0}, r"epsilon_low must be a number in \(0, 1\], got 0.0"),
        ({"epsilon_low": 1.5}, "epsilon_low must be"),
        ({"epsilon_high": math.nan}, "epsilon_high must be"),
        ({"epsilon_high": "wide"}, "epsilon_high must be"),
        ({"epsilon_high": True}, "epsilon_high must be"),
        ({"kl_coef": -1.0}, "kl_coef must be"),
        ({"keep": "oneside"}, "keep 'oneside' is unknown\ndid you mean 'one-side'"),
        ({"kl_kind": "k1"}, "kl_kind 'k1' is unknown"),
        ({"reduction": 3}, "reduction 3 is unknown"),
    ],
)
def test_wrong_parameters_are_named(parameters, message):
    with pytest.raises(ConfigError, match=message):
        objective("rec-oneside-nois", **parameters)


def test_unknown_algorithm_names_the_nearest():
    with pytest.raises(
        ConfigError, match="unknown algorithm 'rec-onside-nois'\ndid you mean 'rec-oneside-nois'"
    ):
        objective("rec-onside-nois")
