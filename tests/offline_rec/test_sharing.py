"""Prompts that are computed once give what every row alone gives; who cannot do that is found out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from offline_rec.data.passes import Costs, Sharing, distinct, shared_prompts
from offline_rec.data.rows import Rows
from offline_rec.models import policy as policies
from offline_rec.models import sharing
from offline_rec.models.padding import of_passes
from offline_rec.models.policy import Policy
from tests import tiny
from tests.offline_rec.test_policy import VOCABULARY, config_of, count_calls, make_rows, one_by_one

WINDOW = {"head_dim": 8, "query_pre_attn_scalar": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", WINDOW | {"sliding_window": 64, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", WINDOW | {"sliding_window": 64}),
    "phi": ("PhiConfig", {}),
    "gpt2": ("GPT2Config", {"n_positions": 64}),
}
TOGETHER, APART = Costs(launch=1e9), Costs()
"""All prompts in one pass and all responses in one; a pass for each length."""


def build(family: str) -> Any:
    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(name, **extra)).eval().double()


def groups(seed: int = 0, longest: int = 9) -> Rows:
    """Four prompts of different lengths with one to four responses each, rows in no order."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(4, VOCABULARY - 1, n).tolist() for n in (12, 3, 7, 1)]
    owner = rng.permutation([0, 0, 0, 0, 1, 1, 2, 3, 3, 3])
    lengths = rng.permutation([0, 1, 1, 2, longest, longest, 4, 5, 6, 3])
    responses = [rng.integers(4, VOCABULARY - 1, n).tolist() for n in lengths]
    return make_rows([prompts[i] for i in owner], responses, rng.uniform(0.5, 1.5, len(owner)))


def compute_shared(policy: Policy, rows: Rows, costs: Costs) -> Tensor:
    """Log-probs of all response tokens, row after row, every prompt computed once."""
    every = np.arange(len(rows))
    lengths = rows.prompt_ids.lengths, rows.response_ids.lengths
    planned = shared_prompts(*lengths, distinct(rows.prompt_ids), every, costs)
    computed: Tensor = policy.module(of_passes(rows, planned, policy.device))
    return computed


def check(policy: Policy, rows: Rows, computed: Tensor) -> None:
    """Log-probs, a loss of them and its gradient are those of every row alone."""
    alone = torch.cat(one_by_one(policy.model, rows))
    torch.testing.assert_close(computed, alone, rtol=0, atol=1e-5)
    weight = torch.linspace(-1, 1, len(alone), dtype=alone.dtype)
    losses = [(values * weight).sum() for values in (computed, alone)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    parameters = list(policy.model.parameters())
    ours, reference = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in losses)
    for one, other in zip(ours, reference, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("costs", [TOGETHER, APART])
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_give_what_every_row_alone_gives(family: str, costs: Costs) -> None:
    policy = Policy(build(family), None)
    assert policy.sharing.shares
    check(policy, groups(), compute_shared(policy, groups(), costs))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_in_float32_they_agree_to_its_rounding(family: str) -> None:
    policy = Policy(build(family).float(), None)
    rows = groups(1)
    alone = torch.cat(one_by_one(policy.model, rows))
    torch.testing.assert_close(compute_shared(policy, rows, TOGETHER), alone, rtol=0, atol=1e-5)


def leaking(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Any]:
    """`carried` whose responses see something of each other."""

    def leaky(past: Any, follows: Tensor) -> Any:
        cache = sharing.carried(past, follows)
        for layer in cache.layers:
            honest = layer.update
            layer.update = lambda keys, values, *_, honest=honest, **__: honest(keys, change(values))
        return cache

    return leaky


@pytest.mark.parametrize("family", FAMILIES)
def test_a_leak_between_siblings_would_be_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(build(family), None)
    monkeypatch.setattr(policies, "carried", leaking(lambda values: values + 0.05 * values.roll(1, 0)))
    with pytest.raises(AssertionError, match="not close"):
        check(policy, groups(), compute_shared(policy, groups(), TOGETHER))


def test_a_gradient_that_does_not_reach_the_prompt_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(past: Any, follows: Tensor) -> Any:
        for layer in past.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return sharing.carried(past, follows)

    policy = Policy(build("llama"), None)
    monkeypatch.setattr(policies, "carried", cut_off)
    with pytest.raises(AssertionError, match="not close"):
        check(policy, groups(), compute_shared(policy, groups(), TOGETHER))
    assert not Policy(build("llama"), None).sharing.shares


def test_prompts_that_see_their_padding_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(build("llama"), None)
    honest = policy.token_model._states
    monkeypatch.setattr(
        policy.token_model, "_states", lambda sheet, past: honest(replace(sheet, attention=None), past)
    )
    with pytest.raises(AssertionError, match="not close"):
        check(policy, groups(), compute_shared(policy, groups(), TOGETHER))


def test_a_prompt_of_several_rows_is_computed_once() -> None:
    policy = Policy(tiny.model(VOCABULARY), None)
    prompts = [[5] * 300] * 4 + [[6] * 290] * 4 + [[7] * 9]
    rows = make_rows(prompts, [[8, 9, 10]] * 9)
    seen: list[int] = []
    policy.model.model.layers[0].register_forward_pre_hook(
        lambda _, given: seen.append(given[0][..., 0].numel())
    )
    computed = policy.logprobs(rows)
    assert sum(seen) <= 2 * 300 + 8 * 2 + 12
    for i, alone in enumerate(one_by_one(policy.model, rows)):
        torch.testing.assert_close(computed[i], alone, rtol=0, atol=1e-5)


def test_passes_that_fill_up_run_the_layers_and_change_nothing() -> None:
    policy = Policy(tiny.model(VOCABULARY), None)
    rows = groups()
    plain = policy.logprobs(rows)
    calls = count_calls(policy.model.model.layers[0])
    filled = policy.logprobs(rows, passes=7)
    assert len(calls) == 7
    parameters = list(policy.model.parameters())
    torch.testing.assert_close(filled, plain, rtol=0, atol=0)
    ours, reference = (torch.autograd.grad(values.sum(), parameters) for values in (filled, plain))
    for one, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_model_that_takes_no_keys_and_values_computes_whole_rows_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Forgetful(type(tiny.model(8).model)):  # type: ignore[misc]
        def forward(self, **inputs: Any) -> Any:
            return super().forward(**inputs | {"past_key_values": None})

    model = tiny.model(VOCABULARY)
    model.model.__class__ = Forgetful
    policy = Policy(model, None)
    assert not policy.sharing.shares
    assert "each response is computed with its prompt" in caplog.text
    computed = policy.logprobs(groups())
    for i, alone in enumerate(one_by_one(policy.model, groups())):
        torch.testing.assert_close(computed[i, : len(alone)], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("rounding", "carrying", "shares"), [(1e-3, 1e-3, True), (0, 1e-3, False), (3e-2, 3e-2, False)]
)
def test_a_model_that_rounds_coarsely_shares_as_far_as_its_rounding_goes(
    rounding: float, carrying: float, shares: bool
) -> None:
    """As trained models do: what rows computed apart are off by, carried ones may be, within reason."""

    class Coarse(type(tiny.model(8).model)):  # type: ignore[misc]
        def forward(self, **inputs: Any) -> Any:
            out = super().forward(**inputs)
            off = carrying if inputs.get("past_key_values") is not None else rounding
            out["last_hidden_state"] = out[0] * (1 + off * (len(inputs["input_ids"]) % 2))
            return out

    model = tiny.model(VOCABULARY)
    model.model.__class__ = Coarse
    assert Policy(model, None).sharing.shares == shares


def test_a_state_space_model_computes_whole_rows(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    policy = Policy(AutoModelForCausalLM.from_config(config_of("MambaConfig", state_size=4)).eval(), None)
    assert not policy.sharing.shares
    assert "MambaForCausalLM: each response is computed with its prompt" in caplog.text


@pytest.mark.parametrize("name", ["Gemma2Config", "Gemma3TextConfig", "MistralConfig"])
def test_rows_longer_than_a_sliding_window_are_computed_whole(name: str) -> None:
    extra = WINDOW if name.startswith("Gemma") else {}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config_of(name, sliding_window=10, **extra)).eval().double()
    policy, rows = Policy(made, None), groups()
    policy.token_model.sharing = replace(policy.token_model.sharing, costs=APART)
    assert policy.sharing.limit == 10
    values = torch.cat(
        [row[:n] for row, n in zip(policy.logprobs(rows), rows.response_ids.lengths, strict=True)]
    )
    check(policy, rows, values)
    with pytest.raises(AssertionError, match="not close"):
        check(policy, rows, compute_shared(policy, rows, TOGETHER))


def test_rows_beyond_the_window_are_told_of() -> None:
    windowed = Sharing(shares=True, limit=10)
    told = sharing.beyond_window(windowed, 11)
    assert told is not None
    assert "up to 11 tokens, and the model's attention window is 10" in told
    quiet = ((windowed, 10), (Sharing(shares=True), 11), (Sharing(limit=10), 11))
    assert [sharing.beyond_window(*one) for one in quiet] == [None] * 3


def test_layers_that_recompute_get_whole_rows(caplog: pytest.LogCaptureFixture) -> None:
    """Transformers takes the keys and values away from layers that are to compute their activations again."""
    rows = groups()
    policy = Policy(tiny.model(VOCABULARY).double(), None, gradient_checkpointing=True)
    assert policy.token_model.sharing.shares
    assert not policy.sharing.shares
    assert "gradient checkpointing: each response is computed with its prompt" in caplog.text
    values = policy.logprobs(rows)
    check(
        policy, rows, torch.cat([row[:n] for row, n in zip(values, rows.response_ids.lengths, strict=True)])
    )
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check(policy, rows, compute_shared(policy, rows, TOGETHER))


def test_half_precision_shares_within_its_rounding() -> None:
    policy = Policy(build("qwen2").bfloat16(), None)
    assert policy.sharing.shares
    exact = torch.cat(one_by_one(build("qwen2").bfloat16().double(), groups()))
    computed = compute_shared(policy, groups(), TOGETHER).double()
    torch.testing.assert_close(computed, exact, rtol=0, atol=0.2)


def test_costs_are_in_tokens_of_the_model() -> None:
    small, large = (
        Policy(tiny.model(VOCABULARY), None).sharing.costs,
        Policy(build("gpt2"), None).sharing.costs,
    )
    for costs in (small, large):
        assert 0 < costs.attention < costs.carried < 1 < costs.launch
    assert Sharing().costs.of(3, 5) == 15
