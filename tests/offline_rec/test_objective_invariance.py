"""The result does not depend on padding, order, or the split into micro-batches; for every scope."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from offline_rec.algorithms import ALGORITHMS
from offline_rec.objectives import metrics as metric
from offline_rec.objectives.objective import objective
from offline_rec.objectives.signals import concatenate
from tests.offline_rec.steps import Step, random_step

TOLERANCES = {torch.float64: {"rtol": 1e-11, "atol": 1e-13}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}


def trimmed(step):
    """A micro-batch is as wide as its own longest row."""
    width = int(step.mask.any(0).nonzero().max()) + 1 if step.mask.any() else 0
    cut = {name: getattr(step, name)[:, :width] for name in ("logprobs", "behavior", "reference", "mask")}
    return Step(**{**vars(step), **cut})


def in_two_phases(rule, step, split):
    """Loss, metrics and gradient of a step whose rows are in the given micro-batches."""
    micros = [trimmed(step.rows(index)) for index in split]
    seen = [
        rule.signals(
            micro.logprobs,
            micro.behavior,
            micro.advantages,
            micro.mask,
            micro.weights,
            reference_logprobs=micro.reference,
            groups=micro.groups,
            expert=micro.expert,
        )
        for micro in micros
    ]
    whole = concatenate(seen)
    terms = rule.terms(whole)
    normalizer = sum(rule.normalizer(micro.mask, micro.weights) for micro in micros)
    gradient, loss, start = torch.zeros_like(step.logprobs), 0.0, 0
    for micro, index in zip(micros, split, strict=True):
        width = micro.mask.shape[1]
        own = terms.coefficients[start : start + len(index), :width]
        start += len(index)
        leaf = micro.logprobs.clone().requires_grad_()
        part = rule.surrogate(own, leaf, micro.mask, normalizer)
        gradient[index, :width] = torch.autograd.grad(part, leaf)[0]
        loss = loss + part.detach()
    return loss, rule.metrics(whole, terms, normalizer), gradient


def in_single_calls(rule, step, split):
    micros = [trimmed(step.rows(index)) for index in split]
    normalizer = sum(rule.normalizer(micro.mask, micro.weights) for micro in micros)
    gradient, losses, found = torch.zeros_like(step.logprobs), [], []
    for micro, index in zip(micros, split, strict=True):
        loss, metrics, own = micro.call(rule, normalizer=normalizer)
        gradient[index, : micro.mask.shape[1]] = own
        losses.append(loss)
        found.append(metrics)
    return sum(losses), metric.add(found), gradient


def splits(rows, parts, seed=0):
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return list(order.tensor_split(parts))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_micro_batches_add_up_to_the_step(name, parts, dtype):
    rule, step = objective(name, kl_coef=0.01), random_step(11, rows=13).to(dtype)
    loss, metrics, gradient = step.call(rule)
    ways = [in_two_phases]
    if rule.scope in ("token", "sequence"):
        ways.append(in_single_calls)
    for way in ways:
        other_loss, other_metrics, other_gradient = way(rule, step, splits(13, parts))
        assert_close(other_gradient, gradient, **TOLERANCES[dtype])
        assert_close(other_loss, loss, **TOLERANCES[dtype])
        for key, value in other_metrics.items():
            assert_close(value, metrics[key], **TOLERANCES[dtype], msg=key)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("m2po", {"budget": 0.3, "floor_low": 0, "floor_high": 0}),
        ("red-weight-adaptive", {"min_temperature": 0.1}),
        ("opmd-pairwise", {}),
    ],
)
def test_micro_batches_on_their_own_would_be_wrong_for_a_wide_scope(name, parameters):
    rule, step = objective(name, **parameters), random_step(11, rows=13)
    step.advantages -= 0.1
    _, _, gradient = step.call(rule)
    _, _, other = in_single_calls(rule, step, splits(13, 7))
    assert (other - gradient).abs().max() > 1e-3


@pytest.mark.parametrize("name", ALGORITHMS)
def test_padding_changes_nothing(name):
    rule, step = objective(name, kl_coef=0.01), random_step(12)
    loss, metrics, gradient = step.call(rule)
    rubbish = {"logprobs": torch.nan, "behavior": torch.inf, "reference": torch.nan, "mask": 0}
    wide = {
        key: torch.cat([getattr(step, key), torch.full((9, 3), value).to(getattr(step, key).dtype)], 1)
        for key, value in rubbish.items()
    }
    wider = Step(**{**vars(step), **wide})
    wider = wider.rows(torch.cat([torch.arange(9), torch.tensor([0])]))
    wider.mask[9] = 0  # a row without a token is padding too
    other_loss, other_metrics, other_gradient = wider.call(rule)
    assert_close(other_loss, loss, **TOLERANCES[torch.float64])
    assert_close(other_gradient[:9, :-3], gradient, **TOLERANCES[torch.float64])
    assert not other_gradient[:, -3:].any()
    assert not other_gradient[9].any()
    for key, value in other_metrics.items():
        assert_close(value, metrics[key], **TOLERANCES[torch.float64], msg=key)


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_order_of_rows_and_names_of_groups_change_nothing(name, seed):
    rule, step = objective(name), random_step(seed)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    shuffled = step.rows(order)
    shuffled.groups = 5 - shuffled.groups * 3
    loss, _, gradient = step.call(rule)
    other_loss, _, other_gradient = shuffled.call(rule)
    assert_close(other_loss, loss, **TOLERANCES[torch.float64])
    assert_close(other_gradient, gradient[order], **TOLERANCES[torch.float64])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_of_weight_zero_does_not_exist(name):
    rule, step = objective(name, kl_coef=0.01), random_step(13)
    assert step.weights[2] == 0
    step.behavior[2] = torch.nan
    loss, _, gradient = step.call(rule)
    there = torch.tensor([i for i in range(9) if i != 2])
    other_loss, _, other_gradient = step.rows(there).call(rule)
    assert_close(other_loss, loss)
    assert_close(other_gradient, gradient[there])
    assert not gradient[2].any()


@pytest.mark.parametrize(
    "name", [name for name, row in ALGORITHMS.items() if row.scope in ("token", "sequence")]
)
def test_weights_scale_whole_rows(name):
    """Regulariser and KL term included."""
    rule, step = objective(name, kl_coef=0.01), random_step(14, weighted=False)
    _, _, plain = step.call(rule)
    step.weights = torch.linspace(0.1, 3, 9).double()
    _, _, weighted = step.call(rule)
    assert_close(weighted, plain * step.weights[:, None])


def test_rows_without_an_advantage_count_in_the_token_mean():
    step = random_step(15, weighted=False)
    step.advantages = torch.ones(9).double()
    _, _, full = step.call(objective("reinforce"))
    step.advantages[4:] = 0
    _, _, part = step.call(objective("reinforce"))
    assert_close(part[:4], full[:4])
