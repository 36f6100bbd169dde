"""The gradient of the head in one pass: the same numbers as differentiating log softmax afterwards."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offline_rec.models import chunks, logprobs
from offline_rec.models.logprobs import Head, token_logprobs, weighted_logprobs
from offline_rec.models.policy import Policy
from tests import tiny
from tests.offline_rec.test_logprobs import PEAK, TOKENS, inputs, naive
from tests.offline_rec.test_policy import random_rows

LEAVES = ("hidden", "weight", "bias")


def weigh_of(given: dict[str, Any]) -> Any:
    """Coefficients that depend on the token and on its log-prob, as an importance weight does."""
    return lambda tokens, values: given["coefficient"][tokens] * (1 + values.exp())


def one_pass(given: dict[str, Any], *, upstream: float = 1.0, **options: Any) -> list[Tensor]:
    """Log-probs, their weighted sum, and gradients of `upstream` times it."""
    head = Head(given["weight"], given["bias"], **options.pop("head", {}))
    values, total = weighted_logprobs(given["hidden"], given["targets"], head, weigh_of(given), **options)
    assert not values.requires_grad
    leaves = [given[name] for name in LEAVES if given[name] is not None]
    return [values, total.detach(), *torch.autograd.grad(upstream * total, leaves)]


def afterwards(given: dict[str, Any], *, upstream: float = 1.0, **options: Any) -> list[Tensor]:
    """The same by plain log softmax over all logits, differentiated by autograd."""
    head = Head(given["weight"], given["bias"], **options.get("head", {}))
    values = naive(given["hidden"], given["targets"], head, options.get("temperature"))
    known = values.detach()
    total = (weigh_of(given)(torch.arange(TOKENS), known) * values).sum()
    leaves = [given[name] for name in LEAVES if given[name] is not None]
    return [known, total.detach(), *torch.autograd.grad(upstream * total, leaves)]


def assert_close(fast: list[Tensor], slow: list[Tensor], tolerance: float = 1e-12) -> None:
    for ours, reference in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours.to(reference.dtype), reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("head", [{}, {"scale": 0.25}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 5.0}])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tempered", [True, False])
def test_one_pass_gives_the_gradient_of_log_softmax(
    chunk: int | None, head: dict[str, float], bias: bool, tempered: bool
) -> None:
    given = inputs(bias=bias)
    options = {"head": head, "temperature": given["temperature"] if tempered else None, "upstream": -0.3}
    assert_close(one_pass(given, chunk=chunk, **options), afterwards(given, **options))


def test_gradient_is_that_of_finite_differences() -> None:
    given = inputs()

    def total() -> Tensor:
        head = Head(given["weight"], given["bias"], 0.5, 4.0)
        fixed = lambda tokens, _: given["coefficient"][tokens]  # noqa: E731
        options = {"temperature": given["temperature"], "chunk": 7}
        return weighted_logprobs(given["hidden"], given["targets"], head, fixed, **options)[1]

    total().backward()
    for name in LEAVES:
        leaf, step = given[name], 1e-6
        along = torch.randn(leaf.shape, dtype=leaf.dtype)
        leaf.data += step * along
        above = total().detach()
        leaf.data -= 2 * step * along
        below = total().detach()
        leaf.data += step * along
        torch.testing.assert_close(
            (leaf.grad * along).sum(), (above - below) / (2 * step), rtol=1e-7, atol=1e-7
        )


@pytest.mark.parametrize(
    "zeros",
    [slice(0, 7), slice(7, 14), slice(0, None, 2), slice(5, None), slice(0, 3), slice(1, None), slice(None)],
)
@pytest.mark.parametrize("head", [{}, {"scale": 2.0, "softcap": 5.0}])
def test_tokens_of_coefficient_zero_are_left_out_of_the_gradient(
    zeros: slice, head: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs()
    given["coefficient"][zeros] = 0
    live = int((given["coefficient"] != 0).sum())
    rows: list[int] = []
    add_outer = logprobs._add_outer

    def counted(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
        rows.append(len(d_logits))
        add_outer(total, d_logits, hidden)

    monkeypatch.setattr(logprobs, "_add_outer", counted)
    monkeypatch.setattr(chunks, "MOVED_ROWS", 2)
    assert_close(one_pass(given, chunk=7, head=head), afterwards(given, head=head))
    assert sum(rows) == live


def test_a_token_of_coefficient_zero_may_have_no_log_prob() -> None:
    given = inputs(bias=False)
    given["coefficient"][2] = 0
    given["hidden"].data[2] = torch.inf
    values, total = weighted_logprobs(
        given["hidden"], given["targets"], Head(given["weight"]), lambda t, _: given["coefficient"][t]
    )
    total.backward()
    assert not values[2].isfinite()
    for tensor in (total, given["hidden"].grad, given["weight"].grad):
        assert tensor.isfinite().all()


def test_a_non_finite_coefficient_is_not_hidden() -> None:
    given = inputs()
    given["coefficient"][3] = torch.nan
    _, total, d_hidden, *_ = one_pass(given, chunk=4)
    assert total.isnan()
    assert d_hidden.isnan().any(1).nonzero()[:, 0].tolist() == [3]


def test_a_tied_head_gathers_the_gradient_of_both_its_uses() -> None:
    given = inputs(bias=False)
    ids = given["targets"].flip(0)
    weight = given["weight"]
    hidden = weight[ids].tanh()
    _, total = weighted_logprobs(hidden, given["targets"], Head(weight), lambda t, _: given["coefficient"][t])
    (fast,) = torch.autograd.grad(total, weight)
    values = naive(weight[ids].tanh(), given["targets"], Head(weight), None)
    (slow,) = torch.autograd.grad((given["coefficient"] * values).sum(), weight)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


def test_a_frozen_head_gets_no_gradient() -> None:
    given = inputs()
    for name in ("weight", "bias"):
        given[name].requires_grad_(False)
    head = Head(given["weight"], given["bias"])
    _, total = weighted_logprobs(given["hidden"], given["targets"], head, weigh_of(given))
    total.backward()
    assert given["weight"].grad is None
    given["hidden"].grad, ours = None, given["hidden"].grad
    values = token_logprobs(given["hidden"], given["targets"], head)
    (weigh_of(given)(torch.arange(TOKENS), values.detach()) * values).sum().backward()
    torch.testing.assert_close(ours, given["hidden"].grad, rtol=1e-12, atol=1e-12)


def exact(given: dict[str, Any]) -> dict[str, Any]:
    """The same numbers in float64."""
    return {k: v.double().detach().requires_grad_() if v.is_floating_point() else v for k, v in given.items()}


def test_half_precision_inputs_are_summed_in_float32() -> None:
    given = inputs(torch.bfloat16)
    fast, slow = one_pass(given, chunk=4, upstream=0.01), afterwards(exact(given), upstream=0.01)
    assert [tensor.dtype for tensor in fast] == [torch.float32] * 2 + [torch.bfloat16] * 3
    assert_close(fast[:2], slow[:2], 1e-5)
    for ours, reference in zip(fast[2:], slow[2:], strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=2e-2, atol=2e-4)


def test_a_loss_scale_saves_small_gradients_in_float16() -> None:
    given = inputs(torch.float16)
    given["coefficient"] = given["coefficient"] * 1e-3
    lost, saved = one_pass(given, upstream=1e-6), one_pass(given, upstream=1e3)
    assert not lost[2].any()
    for ours, reference in zip(saved[2:], afterwards(exact(given), upstream=1e3)[2:], strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=2e-2, atol=2e-2)


def test_products_of_halves_that_sum_in_float32_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, with its product of halves put in by hand."""
    monkeypatch.setattr(logprobs, "_operand", lambda weight, hidden: weight.to(hidden.dtype))
    monkeypatch.setattr(logprobs.torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    monkeypatch.setattr(logprobs, "SLICE_ROWS", 10)
    given = inputs(torch.bfloat16)
    given["coefficient"][::3] = 0
    fast, slow = one_pass(given, chunk=4), afterwards(exact(given))
    assert_close(fast[:2], slow[:2], 1e-4)
    for ours, reference in zip(fast[2:], slow[2:], strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=2e-2, atol=2e-2)


def test_in_float32_both_ways_agree_to_a_millionth() -> None:
    given = inputs(torch.float32)
    values = token_logprobs(given["hidden"], given["targets"], Head(given["weight"], given["bias"]), chunk=5)
    total = (weigh_of(given)(torch.arange(TOKENS), values.detach()) * values).sum()
    slow = [values.detach(), total.detach(), *torch.autograd.grad(total, [given[name] for name in LEAVES])]
    assert_close(one_pass(given, chunk=5), slow, 1e-6)


def test_autocast_around_it_changes_nothing() -> None:
    given = inputs(torch.float32)
    plain = one_pass(given)
    with torch.autocast("cpu", torch.bfloat16):
        cast = one_pass(given)
    assert_close(cast, plain, 0)


def test_the_gradient_may_be_asked_for_once() -> None:
    given = inputs()
    head = Head(given["weight"], given["bias"])
    _, total = weighted_logprobs(given["hidden"], given["targets"], head, weigh_of(given))
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_without_gradient_only_values_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs()
    expected = afterwards(given)[:2]
    monkeypatch.setattr(logprobs, "_add_outer", None)
    with torch.no_grad():
        head = Head(given["weight"], given["bias"])
        found = weighted_logprobs(given["hidden"], given["targets"], head, weigh_of(given))
    assert_close(list(found), expected)


def test_no_tokens_give_no_logprobs_and_zero_gradients() -> None:
    hidden, weight = torch.zeros(0, 3, requires_grad=True), torch.zeros(5, 3, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.long)
    values, total = weighted_logprobs(hidden, targets, Head(weight), lambda tokens, _: tokens.float())
    total.backward()
    assert (values.shape, total.item()) == ((0,), 0.0)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_peak_memory_does_not_grow_with_the_number_of_tokens() -> None:
    script = (
        PEAK.format(path=str(Path(__file__).parents[2]), tokens=4096)
        .replace("import Head, token_logprobs", "import Head, weighted_logprobs")
        .replace(
            "token_logprobs(states, targets, head, chunk=chunk).sum()",
            "weighted_logprobs(states, targets, head, lambda t, _: t % 3 - 1.0, chunk=chunk)[1]",
        )
        .replace(
            "token_logprobs(states[:chunk], targets[:chunk], head, chunk=chunk).sum()",
            "weighted_logprobs(states[:chunk], targets[:chunk], head, lambda t, _: t + 1.0, chunk=chunk)[1]",
        )
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 * 1024  # KiB; all logits at once would take 256 MiB


@pytest.mark.parametrize("whole", [False, True])
def test_a_policy_takes_the_same_gradient_through_its_body(whole: bool) -> None:
    """With a model whose head is not understood, too, where whole logits are differentiated."""
    rows = random_rows(3)
    policy = Policy(tiny.model(100), tiny.tokenizer())
    parameters = list(policy.model.parameters())
    expected = policy.logprobs(rows)
    coefficients = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    slow = torch.autograd.grad((coefficients * expected).sum(), parameters)
    if whole:
        policy.token_model.rule = None
    values, total = policy.weighted_logprobs(rows, lambda at, _: coefficients.flatten()[at])
    assert not values.requires_grad
    torch.testing.assert_close(values, expected.detach(), rtol=0, atol=1e-5)
    for ours, reference in zip(torch.autograd.grad(total, parameters), slow, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
