"""A step whose head gradient is taken in one pass against the same step with logits computed twice."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data_tools.errors import DataError
from offline_rec.algorithms import ALGORITHMS
from offline_rec.data.index import IndexedRows
from offline_rec.data.rows import Ragged, Rows
from offline_rec.models import logprobs
from offline_rec.models.chunks import Chunk
from offline_rec.models.policy import Policy
from offline_rec.objectives.objective import Objective, objective
from offline_rec.training import step as stepping
from offline_rec.training.engine import OptimizerSettings
from offline_rec.training.engines.plain import TorchEngine
from offline_rec.training.step import StepResult, StepRows, update
from tests import tiny
from tests.offline_rec.steps import random_step

VOCABULARY = 100
NARROW = [name for name, row in ALGORITHMS.items() if row.scope != "sequence"]


class Listening(TorchEngine):
    """Keeps the gradient of the step that it takes, and counts its backward passes."""

    gradient: dict[str, Tensor]
    passes = 0

    def backward(self, loss: Tensor) -> None:
        self.passes += 1
        super().backward(loss)

    def step(self, lr: float) -> float:
        self.gradient = {name: p.grad.clone() for name, p in self._masters.items() if p.grad is not None}
        return super().step(lr)


def rows_of_a_step(seed: int = 0) -> StepRows:
    """Nine responses in three groups, with masked tokens, weights, temperatures and two micro-batches."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 9)
    responses = [rng.integers(4, VOCABULARY, n).tolist() for n in lengths]
    ids = Ragged.from_lists(responses, np.int32)
    drift = [rng.normal(-4.5, 0.6, n).tolist() for n in lengths]
    mask = [np.r_[1, rng.random(n - 1) > 0.3].astype(int).tolist() for n in lengths]
    rows = Rows(
        response_id=[f"r{i}" for i in range(9)],
        prompt_ids=Ragged.from_lists([rng.integers(4, VOCABULARY, 3).tolist() for _ in range(9)], np.int32),
        response_ids=ids,
        mask=Ragged.from_lists(mask, np.uint8),
        behavior=Ragged.from_lists(drift, np.float32),
        anchor=None,
        reference=Ragged.from_lists([[x + 0.3 for x in row] for row in drift], np.float32),
        temperature=np.where(np.arange(9) < 5, 1.0, 0.8).astype(np.float32),
    )
    made = random_step(seed)
    indexed = IndexedRows(
        response_id=rows.response_id,
        file=np.zeros(9, np.int64),
        file_row=np.arange(9),
        group=np.arange(9) // 3,
        advantage=made.advantages.numpy(),
        weight=made.weights.numpy(),
        expert=made.expert.numpy(),
        reward=np.zeros(9),
    )
    batches = [np.array([4, 0, 7, 2, 8]), np.array([1, 3, 5, 6])]
    tokens = int(lengths.sum())
    return StepRows(1, rows, indexed, batches, anchor="behavior", groups=3, tokens=tokens, packing={})


def take(
    chosen: Objective, step: StepRows, engine: Listening | None = None
) -> tuple[StepResult, dict[str, Tensor]]:
    """One update of a tiny model, and the gradient that it was made with."""
    engine = Listening("cpu") if engine is None else engine
    return update(engine, prepared(engine), chosen, step, lr=1e-3), engine.gradient


def prepared(engine: Listening) -> Policy:
    policy = Policy(tiny.model(VOCABULARY, std=0.1), tiny.tokenizer())
    policy.module = engine.prepare(policy.module, OptimizerSettings())
    return policy


def twice(policy: Policy, _: Objective, micro: Any, *__: Any) -> tuple[Tensor, None]:
    return policy.logprobs(micro.rows), None


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen tokens, so that responses are cut."""
    monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", 1)


def always(_: Any, __: Any, micros: list[Any]) -> list[bool]:
    return [False] * len(micros)


def assert_same_step(chosen: Objective, step: StepRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against logits computed twice, and a backward pass for every micro-batch."""
    fast, fast_gradient = take(chosen, step)
    with monkeypatch.context() as patch:
        patch.setattr(stepping, "_forward", twice)
        patch.setattr(stepping, "_idle", always)
        slow, slow_gradient = take(chosen, step)
    assert fast.metrics == pytest.approx(slow.metrics, rel=1e-6, abs=1e-9)
    assert fast.metrics.keys() == slow.metrics.keys()
    assert fast.grad_norm == pytest.approx(slow.grad_norm, rel=1e-5)
    np.testing.assert_array_equal(fast.order, slow.order)
    np.testing.assert_allclose(fast.mean_ratio, slow.mean_ratio, rtol=1e-6)
    np.testing.assert_allclose(fast.kept_share, slow.kept_share, rtol=1e-6)
    assert fast_gradient.keys() == slow_gradient.keys()
    for name, ours in fast_gradient.items():
        scale = float(slow_gradient[name].abs().max())
        torch.testing.assert_close(ours, slow_gradient[name], rtol=1e-6, atol=1e-6 * scale + 1e-12)


@pytest.mark.parametrize("name", NARROW)
def test_every_algorithm_steps_the_same_either_way(
    name: str, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_step(objective(name), rows_of_a_step(), monkeypatch)


@pytest.mark.parametrize("more", [{"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_kind": "k2"}])
def test_a_kl_term_steps_the_same_either_way(
    more: dict[str, Any], small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_step(objective("grpo", **more), rows_of_a_step(1), monkeypatch)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_logits_are_computed_once_unless_a_coefficient_needs_its_whole_response(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens whose logits are computed, forward and backward; a wide scope passes over the step first."""
    seen = 0
    normalise, resume = Chunk.normalise, Chunk.resume

    def first(self: Any) -> Any:
        nonlocal seen
        seen += len(self.part)
        return normalise(self)

    def again(self: Any, log_total: Tensor) -> None:
        nonlocal seen
        seen += len(self.part)
        resume(self, log_total)

    engine, step = Listening("cpu"), rows_of_a_step()
    policy = prepared(engine)
    monkeypatch.setattr(Chunk, "normalise", first)
    monkeypatch.setattr(Chunk, "resume", again)
    update(engine, policy, objective(name), step, lr=1e-3)
    tokens = int(step.rows.response_ids.lengths.sum())
    scope = ALGORITHMS[name].scope
    if scope == "token":
        assert seen == tokens
    elif scope == "sequence":
        assert tokens < seen <= 2 * tokens
    else:
        assert seen == 2 * tokens


def test_a_token_alone_has_the_coefficient_that_it_has_in_its_step() -> None:
    """For all parts of scope `token`, with tokens in any order; a part that looks further would differ."""
    made = random_step(4)
    for name in NARROW:
        chosen = objective(name)
        if chosen.scope != "token":
            continue
        given = (made.behavior, made.advantages, made.mask, made.weights)
        more = {"reference_logprobs": made.reference, "groups": made.groups, "expert": made.expert}
        seen = chosen.signals(made.logprobs, *given, **more)
        blank = chosen.signals(torch.zeros_like(made.logprobs), *given, **more)
        at = torch.randperm(made.mask.numel())[:40]
        found = chosen.token_gradient(blank, 4.0)(at, made.logprobs.flatten()[at])
        expected = -chosen.coefficients(seen).flatten()[at] / 4
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_missing_log_probs_are_refused_by_row_before_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = rows_of_a_step()
    step.rows.behavior.values[int(step.rows.behavior.offsets[7])] = np.nan
    monkeypatch.setattr(Policy, "weighted_logprobs", None)
    with pytest.raises(
        DataError, match="missing or not finite on unmasked tokens in 1 of 5 rows: positions 2"
    ):
        take(objective("grpo"), step)


def at_rest(step: StepRows, rows: list[int]) -> StepRows:
    """The step with advantages of 0 in some rows, as a group of equal rewards has them."""
    step.indexed.advantage[rows] = 0
    return step


@pytest.mark.parametrize("name", ["rec-oneside-nois", "gspo", "m2po"])
def test_a_micro_batch_that_moves_nothing_is_measured_without_a_backward_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Listening("cpu")
    step = at_rest(rows_of_a_step(), [1, 3, 5, 6])
    take(objective(name), step, engine)
    assert engine.passes == 1
    assert_same_step(objective(name), step, monkeypatch)


@pytest.mark.parametrize("chosen", [objective("grpo", kl_coef=0.1), objective("opmd"), objective("dro")])
def test_a_penalty_moves_rows_without_an_advantage(
    chosen: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Listening("cpu")
    step = at_rest(rows_of_a_step(), [1, 3, 5, 6])
    take(chosen, step, engine)
    assert engine.passes == 2
    assert_same_step(chosen, step, monkeypatch)


def test_a_step_that_moves_nothing_has_a_gradient_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not none, which would hold back what momentum and decay do with it."""
    engine = Listening("cpu")
    step = at_rest(rows_of_a_step(), list(range(9)))
    _, gradient = take(objective("rec-oneside-nois"), step, engine)
    assert engine.passes == 1
    assert gradient
    assert not any(tensor.any() for tensor in gradient.values())
    assert_same_step(objective("rec-oneside-nois"), step, monkeypatch)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_rows_at_rest_have_no_coefficient_whatever_their_log_probs(name: str) -> None:
    chosen = objective(name)
    for seed in range(5):
        made = random_step(seed)
        made.advantages[4:] = 0
        seen = chosen.signals(
            made.logprobs,
            made.behavior,
            made.advantages,
            made.mask,
            made.weights,
            reference_logprobs=made.reference,
            groups=made.groups,
            expert=made.expert,
        )
        resting = chosen.at_rest(made.advantages, made.weights)
        moving = chosen.coefficients(seen).any(1)
        assert not (resting & moving).any()
        assert resting.any()
