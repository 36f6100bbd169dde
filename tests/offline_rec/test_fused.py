"""The Triton kernels and the operations of torch that they stand for give the same numbers.

They run on a GPU where there is one, else in Triton's interpreter: `TRITON_INTERPRET=1 pytest -m kernels`.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offline_rec.models.logprobs import Head, token_logprobs, weighted_logprobs
from tests.offline_rec.test_logprobs import inputs, naive, values_and_gradients

pytestmark = pytest.mark.kernels

triton = pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).parent.parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET is not 1", allow_module_level=True)

from offline_rec.models import fused  # noqa: E402

HEADS: list[dict[str, Any]] = [{}, {"scale": 0.25}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 5.0}]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a row, the last of them not full."""
    monkeypatch.setattr(fused, "REDUCED", 16)
    monkeypatch.setattr(fused, "DESCENDED", 8)


def on_device(given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value if value is None else value.detach().to(DEVICE).requires_grad_(value.requires_grad)
        for name, value in given.items()
    }


def exact(given: dict[str, Any]) -> dict[str, Any]:
    """The same numbers in float64."""
    return {
        name: value.detach().double().requires_grad_(value.requires_grad)
        if value is not None and value.is_floating_point()
        else value
        for name, value in given.items()
    }


def assert_close(ours: list[Tensor], reference: list[Tensor], tolerance: float = 3e-6) -> None:
    for one, other in zip(ours, reference, strict=True):
        scale = max(float(other.abs().max()), 1.0)
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("head", "bias", "chunk"), [*zip(HEADS, (True, False) * 2, (7, None, None, 7), strict=True)]
)
def test_kernels_give_the_logprobs_and_gradients_of_torch(
    head: dict[str, float], bias: bool, chunk: int | None
) -> None:
    given = on_device(inputs(torch.float32, bias=bias))
    how = {"temperature": given["temperature"], "chunk": chunk}
    ours, twin = (
        values_and_gradients(lambda h, y, w, f=f: token_logprobs(h, y, w, fused=f, **how), given, **head)
        for f in (True, False)
    )
    wide = exact(given)
    reference = values_and_gradients(lambda h, y, w: naive(h, y, w, wide["temperature"]), wide, **head)
    assert_close(ours, twin)
    assert_close(ours, reference)


@pytest.mark.parametrize(("head", "tempered"), [*zip(HEADS[::2], (False, True), strict=True)])
def test_in_one_pass_too(head: dict[str, float], tempered: bool) -> None:
    given = on_device(inputs(torch.float32))
    given["coefficient"][::3] = 0
    leaves = [given[name] for name in ("hidden", "weight", "bias")]

    def weigh(tokens: Tensor, values: Tensor) -> Tensor:
        return given["coefficient"][tokens] * (1 + values.exp())

    def found(fused: bool) -> list[Tensor]:
        values, total = weighted_logprobs(
            given["hidden"],
            given["targets"],
            Head(given["weight"], given["bias"], **head),
            weigh,
            temperature=given["temperature"] if tempered else None,
            chunk=9,
            fused=fused,
        )
        return [values, total.detach(), *torch.autograd.grad(total, leaves)]

    assert_close(found(fused=True), found(fused=False))


def reduced(product: Tensor, targets: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Log-probs of the targets, and what softmax is made of, by the kernel."""
    peak, total, picked = fused.reduce(product, targets, None, Head(product))
    return picked - peak - total.log(), (peak, total)


def descended(product: Tensor, targets: Tensor, coefficient: Tensor, sums: Any, **options: Any) -> Tensor:
    """The gradient with respect to a product that is the logits."""
    to = options.get("dtype", torch.float32)
    head = Head(product)
    return fused.descend(product, targets, None, head, coefficient=coefficient, sums=sums, dtype=to)


@pytest.mark.parametrize("vocabulary", [1, 7, 8, 9, 16, 17, 37, 64])
def test_any_size_of_vocabulary(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    product = torch.randn(3, vocabulary, device=DEVICE) * 5
    targets = torch.randint(vocabulary, (3,), device=DEVICE)
    logprobs, (peak, total) = reduced(product, targets)
    wide = product.double()
    expected = wide.log_softmax(1)
    assert_close([logprobs, peak + total.log()], [expected[range(3), targets], wide.logsumexp(1)])
    coefficient = torch.tensor([2.0, -1.0, 0.0], device=DEVICE)
    slope = coefficient[:, None] * (torch.nn.functional.one_hot(targets, vocabulary) - expected.exp())
    gradient = descended(product, targets, coefficient, (peak, total))
    assert gradient.data_ptr() == product.data_ptr()
    assert_close([gradient], [slope])
    expanded = torch.ones((), device=DEVICE).expand(3)
    gradient = descended(wide.float(), targets, expanded, (peak, total))
    assert_close([gradient], [torch.nn.functional.one_hot(targets, vocabulary) - expected.exp()])


def test_a_row_in_a_wider_matrix_leaves_what_is_beside_it_alone() -> None:
    memory = torch.full((3, 50), 7.0, device=DEVICE)
    product = memory[:, :37].normal_()
    targets = torch.tensor([0, 36, 20], device=DEVICE)
    _, sums = reduced(product, targets)
    descended(product, targets, torch.ones(3, device=DEVICE), sums)
    assert (memory[:, 37:] == 7).all()
    torch.testing.assert_close(product.sum(1), torch.zeros(3, device=DEVICE), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="contiguous"):
        fused.reduce(memory.t(), targets, None, Head(product))


def test_more_logits_than_32_bits_count() -> None:
    """Three rows, each 2**30 numbers after the one before it; of those between them none is looked at."""
    far = torch.empty(3 << 30, dtype=torch.int8, device=DEVICE).as_strided((3, 37), (1 << 30, 1))
    torch.manual_seed(0)
    far.copy_(torch.randint(-9, 9, (3, 37)))
    targets = torch.tensor([0, 36, 20], device=DEVICE)
    logprobs, sums = reduced(far, targets)
    expected = far.double().log_softmax(1)
    assert_close([logprobs], [expected[range(3), targets]])
    gradient = descended(far, targets, torch.ones(3, device=DEVICE), sums)
    assert_close([gradient], [torch.nn.functional.one_hot(targets, 37) - expected.exp()])


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # the interpreter's, of infinities
def test_infinite_and_huge_logits() -> None:
    inf = float("inf")
    rows = [
        [-inf] * 20 + [1.0] + [-inf] * 16,  # first a whole block of nothing
        [3e38, -3e38] + [0.0] * 35,
        [1e4] * 37,
        [0.0] * 36 + [-inf],
    ]
    product = torch.tensor(rows, device=DEVICE)
    targets = torch.tensor([20, 0, 5, 36], device=DEVICE)
    logprobs, sums = reduced(product, targets)
    expected = product.double().log_softmax(1)[range(4), targets]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-6)
    assert logprobs[3] == -inf
    slope = torch.nn.functional.one_hot(targets, 37) - product.double().softmax(1)
    assert_close([descended(product, targets, torch.ones(4, device=DEVICE), sums)], [slope])


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_is_not_hidden(bad: float) -> None:
    product = torch.zeros(2, 37, device=DEVICE)
    product[0, 30] = bad
    at, one = torch.tensor([3, 3], device=DEVICE), torch.ones(2, device=DEVICE)
    logprobs, sums = reduced(product, at)
    assert logprobs.isfinite().tolist() == [False, True]
    gradient = descended(product, at, one, sums)
    assert not gradient[0].isfinite().all()
    assert gradient[1].isfinite().all()


def test_rows_of_coefficient_zero_are_zero_whatever_their_logits() -> None:
    product = torch.full((2, 37), float("nan"), device=DEVICE)
    at, none = torch.tensor([3, 3], device=DEVICE), torch.zeros(2, device=DEVICE)
    assert (descended(product, at, none, (none * torch.nan, none + 1)) == 0).all()


def test_half_precision_in_and_out() -> None:
    """bfloat16 states and head; and the gradient rounded as it is written, for products in bfloat16."""
    given = on_device({k: v.detach() for k, v in inputs(torch.float32).items()})
    half = {k: v.bfloat16() if k in ("hidden", "weight", "bias") else v for k, v in given.items()}
    logprobs = token_logprobs(half["hidden"], half["targets"], Head(half["weight"], half["bias"]), fused=True)
    assert logprobs.dtype == torch.float32
    wide = {k: v.double() if v.is_floating_point() else v for k, v in half.items()}
    expected = naive(wide["hidden"], wide["targets"], Head(wide["weight"], wide["bias"]), None)
    assert_close([logprobs], [expected])
    product = given["hidden"] @ given["weight"].T
    _, sums = reduced(product, given["targets"])
    plain, rounded = (
        descended(product.clone(), given["targets"], given["coefficient"], sums, dtype=to)
        for to in (torch.float32, torch.bfloat16)
    )
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded, plain.bfloat16(), rtol=2**-7, atol=1e-6)


def test_a_small_softcapped_logit_keeps_its_digits() -> None:
    product = torch.logspace(-6, 2, 64, device=DEVICE)[:, None].repeat(1, 3) * torch.tensor(
        [1.0, -1.0, 0.5], device=DEVICE
    )
    head = Head(product, softcap=30.0)
    targets = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    peak, _, picked = fused.reduce(product, targets, None, head)
    expected = 30 * torch.tanh(product.double() / 30)
    torch.testing.assert_close(picked.double(), expected[:, 0], rtol=5e-7, atol=0)
    torch.testing.assert_close(peak.double(), expected.amax(1), rtol=5e-7, atol=0)


def test_a_kernel_that_forgets_a_block_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = fused.reduce
    monkeypatch.setattr(fused, "reduce", lambda product, *given: honest(product[:, :-16], *given))
    with pytest.raises(AssertionError):
        test_kernels_give_the_logprobs_and_gradients_of_torch({}, bias=False, chunk=None)


def test_no_tokens_are_no_work() -> None:
    product = torch.zeros(0, 37, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert [len(found) for found in fused.reduce(product, none, None, Head(product))] == [0, 0, 0]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from offline_rec.models import fused

TYPES = dict.fromkeys(("product", "coefficient", "shift", "total", "peak", "picked"), "*fp32")
TYPES |= dict.fromkeys(("vocabulary", "stride", "result_stride"), "i32")
TYPES |= {"targets": "*i64", "scale": "fp32", "softcap": "fp32"}
for kernel in (fused._reduce, fused._descend):
    for everything in (True, False):
        kinds = {"TEMPERED": everything, "BIASED": everything, "CAPPED": everything, "BLOCK": fused.REDUCED}
        types = TYPES | {"result": "*fp32" if everything else "*bf16"}
        types |= {"temperature": "*fp32", "bias": "*bf16"} if everything else {}
        constant = {**kinds} if everything else {**kinds, "temperature": None, "bias": None}
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constexprs=constant)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": fused.WARPS})
        print(kernel.fn.__name__, len(made.asm["cubin"]))
"""


def test_they_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """Down to machine code of an H100 or H200; in a process of its own, where Triton does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["_reduce"] * 2 + ["_descend"] * 2
