import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offline_rec.models import logprobs
from offline_rec.models.logprobs import Head, token_logprobs

TOKENS, HIDDEN, VOCABULARY = 23, 8, 37


def naive(hidden: Tensor, targets: Tensor, head: Head, temperature: Tensor | None) -> Tensor:
    z = hidden @ head.weight.T
    if head.bias is not None:
        z = z + head.bias
    z = z * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    if temperature is not None:
        z = z / temperature[:, None]
    return torch.log_softmax(z, -1).gather(1, targets[:, None])[:, 0]


def inputs(dtype: torch.dtype = torch.float64, bias: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(TOKENS, HIDDEN, dtype=dtype).requires_grad_(),
        "weight": torch.randn(VOCABULARY, HIDDEN, dtype=dtype).requires_grad_(),
        "bias": torch.randn(VOCABULARY, dtype=dtype).requires_grad_() if bias else None,
        "targets": torch.randint(VOCABULARY, (TOKENS,)),
        "temperature": torch.rand(TOKENS, dtype=dtype) + 0.5,
        "coefficient": torch.randn(TOKENS, dtype=dtype),
    }


def values_and_gradients(compute: Any, given: dict[str, Any], **head: Any) -> list[Tensor]:
    leaves = [given[name] for name in ("hidden", "weight", "bias") if given[name] is not None]
    logprobs = compute(given["hidden"], given["targets"], Head(given["weight"], given["bias"], **head))
    return [logprobs.detach(), *torch.autograd.grad((logprobs * given["coefficient"]).sum(), leaves)]


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("head", [{}, {"scale": 0.25}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 5.0}])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tempered", [True, False])
def test_chunked_logprobs_equal_log_softmax_with_gradients(
    chunk: int | None, head: dict[str, float], bias: bool, tempered: bool
) -> None:
    given = inputs(bias=bias)
    temperature = given["temperature"] if tempered else None
    fast = values_and_gradients(
        lambda h, y, head: token_logprobs(h, y, head, temperature=temperature, chunk=chunk), given, **head
    )
    slow = values_and_gradients(lambda h, y, head: naive(h, y, head, temperature), given, **head)
    for ours, reference in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


def test_gradient_is_that_of_finite_differences() -> None:
    given = inputs()

    def compute(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = Head(weight, bias, 0.5, 4.0)
        return token_logprobs(
            hidden[:3], given["targets"][:3], head, temperature=given["temperature"][:3], chunk=2
        )

    assert torch.autograd.gradcheck(compute, (given["hidden"], given["weight"], given["bias"]))


def test_a_tied_head_gathers_the_gradient_of_both_its_uses() -> None:
    given = inputs(bias=False)
    ids = given["targets"].flip(0)

    def loss(compute: Any) -> Tensor:
        hidden = given["weight"][ids].tanh()
        (grad,) = torch.autograd.grad(
            compute(hidden, given["targets"], Head(given["weight"])).sum(), given["weight"]
        )
        return grad

    fast, slow = loss(token_logprobs), loss(lambda h, y, head: naive(h, y, head, None))
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


def test_a_frozen_head_gets_no_gradient() -> None:
    given = inputs()
    given["weight"].requires_grad_(False)
    given["bias"].requires_grad_(False)
    token_logprobs(given["hidden"], given["targets"], Head(given["weight"], given["bias"])).sum().backward()
    assert given["hidden"].grad is not None
    assert given["weight"].grad is None


def test_tokens_of_coefficient_zero_leave_the_gradient_unchanged() -> None:
    given = inputs()
    given["coefficient"][::2] = 0
    fast = values_and_gradients(lambda h, y, head: token_logprobs(h, y, head, chunk=4), given)
    slow = values_and_gradients(lambda h, y, head: naive(h, y, head, None), given)
    for ours, reference in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


def test_a_non_finite_coefficient_is_not_hidden() -> None:
    given = inputs()
    given["coefficient"][3] = torch.nan
    _, d_hidden, _, _ = values_and_gradients(lambda h, y, head: token_logprobs(h, y, head, chunk=4), given)
    assert d_hidden.isnan().any(1).nonzero()[:, 0].tolist() == [3]


def test_half_precision_inputs_are_summed_in_float32() -> None:
    given = inputs(torch.bfloat16)
    exact = {
        k: v.double().detach().requires_grad_() if v.is_floating_point() else v for k, v in given.items()
    }
    fast = values_and_gradients(lambda h, y, head: token_logprobs(h, y, head, chunk=4), given)
    slow = values_and_gradients(lambda h, y, head: naive(h, y, head, None), exact)
    assert fast[0].dtype == torch.float32
    torch.testing.assert_close(fast[0].double(), slow[0], rtol=0, atol=1e-5)
    for ours, reference in zip(fast[1:], slow[1:], strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), reference, rtol=2e-2, atol=2e-2)


def test_autocast_around_it_changes_nothing() -> None:
    given = inputs(torch.float32)
    plain = values_and_gradients(token_logprobs, given)
    with torch.autocast("cpu", torch.bfloat16):
        cast = values_and_gradients(token_logprobs, given)
    for ours, reference in zip(cast, plain, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)


def test_certain_tokens_never_get_a_positive_logprob() -> None:
    hidden, weight = torch.eye(4) * 200, torch.eye(4)
    logprobs = token_logprobs(hidden, torch.arange(4), Head(weight))
    assert logprobs.max() <= 0
    assert logprobs.min() > -1e-6


def test_no_tokens_give_no_logprobs_and_zero_gradients() -> None:
    hidden, weight = torch.zeros(0, 3, requires_grad=True), torch.zeros(5, 3, requires_grad=True)
    logprobs = token_logprobs(hidden, torch.zeros(0, dtype=torch.long), Head(weight))
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


PEAK = """
import resource, sys, torch
sys.path.insert(0, {path!r})
from offline_rec.models import logprobs
from offline_rec.models.logprobs import Head, token_logprobs
torch.set_num_threads(1)
tokens, hidden, vocabulary, chunk = {tokens}, 16, 16_384, 64
states = torch.randn(tokens, hidden, requires_grad=True)
head = Head(torch.randn(vocabulary, hidden, requires_grad=True))
targets = torch.randint(vocabulary, (tokens,))
warm = token_logprobs(states[:chunk], targets[:chunk], head, chunk=chunk).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
token_logprobs(states, targets, head, chunk=chunk).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_peak_memory_does_not_grow_with_the_number_of_tokens() -> None:
    tokens = 4096  # all logits at once would take 256 MiB, and as much again for their gradient
    script = PEAK.format(path=str(Path(__file__).parents[2]), tokens=tokens)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 * 1024  # KiB


def test_products_of_halves_that_sum_in_float32_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, in slices of the vocabulary, with its product of halves put in by hand."""
    monkeypatch.setattr(logprobs, "_operand", lambda weight, hidden: weight.to(hidden.dtype))
    monkeypatch.setattr(logprobs.torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    monkeypatch.setattr(logprobs, "SLICE_ROWS", 10)
    given = inputs(torch.bfloat16)
    exact = {
        k: v.double().detach().requires_grad_() if v.is_floating_point() else v for k, v in given.items()
    }
    fast = values_and_gradients(lambda h, y, head: token_logprobs(h, y, head, chunk=4), given)
    slow = values_and_gradients(lambda h, y, head: naive(h, y, head, None), exact)
    torch.testing.assert_close(fast[0].double(), slow[0], rtol=0, atol=1e-5)
    for ours, reference in zip(fast[1:], slow[1:], strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=2e-2, atol=2e-2)
