"""Micro-batches as one packed row give what every row alone gives; who cannot do that is found out.

FlexAttention has no backward pass on a CPU: gradients are those of its mask, written out, in torch's
attention, and its forward pass is compared with that.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from transformers import AutoModelForCausalLM

from data_tools.errors import ConfigError
from offline_rec.config import fit_config
from offline_rec.data.packing import micro_batches
from offline_rec.data.passes import BLOCK, Costs, Sharing, cost_of, distinct, fill_of, packed_row, plan_rows
from offline_rec.data.rows import Rows
from offline_rec.models import flex, padding
from offline_rec.models import policy as policies
from offline_rec.models.flex import Spans, block_mask
from offline_rec.models.padding import of_passes
from offline_rec.models.policy import Policy
from offline_rec.models.sharing import find_packing
from offline_rec.training.fit import fit
from offline_rec.training.metrics import read_metrics
from tests import tiny
from tests.offline_rec.fitting import config, furthest, weights, world
from tests.offline_rec.test_policy import VOCABULARY, config_of, count_calls, make_rows, one_by_one
from tests.offline_rec.test_sharing import FAMILIES, WINDOW, build, check, groups

CPU = torch.device("cpu")
KERNEL = flex.kernel
PACKING = [family for family in FAMILIES if family != "gpt2"]


def written_out(mask: Any) -> Tensor:
    """What each token sees, [length, length], asked of the mask pair by pair."""
    length = mask.seq_lengths[0]
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    seen: Tensor = mask.mask_mod(torch.tensor(0), torch.tensor(0), query, key)
    return seen


def dense(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, **options: Any) -> Tensor:
    """The same attention by torch's own, with a backward pass on a CPU."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=written_out(block_mask), **options
    )


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "kernel", lambda: dense)


def packing(model: Any, **options: Any) -> Policy:
    """A policy that packs, as `kernels=["flex"]` makes it on a GPU."""
    policy = Policy(model, None, kernels=["flex"], **options)
    assert policy.sharing.packs
    return policy


def compute(policy: Policy, rows: Rows) -> Tensor:
    """Log-probs of all response tokens, row after row, from one packed row."""
    planned = packed_row(rows.prompt_ids.lengths, rows.response_ids.lengths, distinct(rows.prompt_ids))
    found: Tensor = policy.module(of_passes(rows, [planned], policy.device))
    return found


def long_groups() -> Rows:
    """Three prompts, up to three responses each, over several blocks of tokens."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(4, VOCABULARY - 1, n).tolist() for n in (130, 40, 300)]
    owner, lengths = [0, 2, 0, 1, 2, 0], [20, 140, 1, 0, 90, 200]
    responses = [rng.integers(4, VOCABULARY - 1, n).tolist() for n in lengths]
    return make_rows([prompts[i] for i in owner], responses)


@pytest.mark.parametrize("family", PACKING)
def test_a_packed_row_gives_what_every_row_alone_gives(family: str) -> None:
    policy = packing(build(family))
    check(policy, groups(), compute(policy, groups()))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_itself_gives_the_same_in_float32(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = packing(build(family).float())
    alone, twin = torch.cat(one_by_one(policy.model, groups())), compute(policy, groups())
    calls: list[int] = []

    def itself(*given: Any, **options: Any) -> Any:
        calls.append(1)
        return torch_flex.flex_attention(*given, **options)

    monkeypatch.setattr(flex, "kernel", lambda: itself)
    with torch.no_grad():
        computed = compute(policy, groups())
    assert len(calls) == 2
    torch.testing.assert_close(computed, twin, rtol=0, atol=1e-5)
    torch.testing.assert_close(computed, alone, rtol=0, atol=1e-5)


@pytest.mark.kernels
def test_flex_attention_compiled_skips_blocks_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, it goes by the list of blocks; several of them, seen in part or in full."""
    policy = packing(tiny.model(VOCABULARY, head_dim=16))
    rows = long_groups()
    alone = torch.cat(one_by_one(policy.model, rows))
    compiled = torch.compile(torch_flex.flex_attention)
    monkeypatch.setattr(flex, "kernel", lambda: compiled)
    with torch.no_grad():
        torch.testing.assert_close(compute(policy, rows), alone, rtol=0, atol=1e-5)
        monkeypatch.setattr(Spans, "blocks", lambda spans: (np.eye(len(spans.own) // BLOCK) > 0,) * 2)
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(compute(policy, rows), alone, rtol=0, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_it_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = tiny.model(VOCABULARY, head_dim=16), long_groups()
    alone = torch.cat(one_by_one(model, rows))
    weight = torch.linspace(-1, 1, len(alone))
    expected = torch.autograd.grad((alone * weight).sum(), list(model.parameters()))
    monkeypatch.setattr(flex, "kernel", KERNEL)
    policy = packing(model.cuda())
    computed = compute(policy, rows).cpu()
    torch.testing.assert_close(computed, alone, rtol=0, atol=1e-4)
    found = torch.autograd.grad((computed * weight).sum(), list(policy.model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", PACKING)
def test_a_leak_between_siblings_would_be_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = packing(build(family))

    def leaky(spans: Spans, device: torch.device) -> Any:
        """A response sees all between its prompt and itself."""
        return block_mask(replace(spans, last=np.where(spans.last > spans.first, spans.own, 0)), device)

    monkeypatch.setattr(padding, "block_mask", leaky)
    with pytest.raises(AssertionError, match="not close"):
        check(policy, groups(), compute(policy, groups()))
    assert not find_packing(policy.model, policy.token_model)


def test_positions_that_do_not_restart_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = packing(build("llama"))
    monkeypatch.setattr(Spans, "places", property(lambda spans: np.arange(len(spans.own))))
    with pytest.raises(AssertionError, match="not close"):
        check(policy, groups(), compute(policy, groups()))


def test_the_mask_is_own_span_and_own_prompt() -> None:
    """Against a drawing: prompts of 2 and 3 tokens, responses of 2, 1 and 2 to them, then filling."""
    spans = Spans.of(np.array([2, 3]), np.array([2, 1, 2]), np.array([0, 0, 1]), BLOCK)
    drawn = """
        X..........
        XX.........
        ..X........
        ..XX.......
        ..XXX......
        XX...X.....
        XX...XX....
        XX.....X...
        ..XXX...X..
        ..XXX...XX.
        ..........X
    """
    expected = torch.tensor([[mark == "X" for mark in line] for line in drawn.split()])
    seen = written_out(block_mask(spans, CPU))
    assert (seen[:11, :11] == expected).all()
    assert (seen[10:] == torch.eye(BLOCK)[10:]).all()
    assert spans.places.tolist() == [0, 1, 0, 1, 2, 2, 3, 2, 3, 4] + [0] * (BLOCK - 10)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_are_those_that_torch_finds_pair_by_pair(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 500, 4)
    place = rng.permutation([0, 1, 2, 3, 3, 3, 0])
    response = rng.choice([0, 1, 5, 128, 400], len(place))
    length = -(-int(prompt.sum() + response.sum()) // BLOCK) * BLOCK
    mask = block_mask(Spans.of(prompt, response, place, length), CPU)
    reference = torch_flex.create_block_mask(mask.mask_mod, 1, 1, length, length, device="cpu")
    for name in ("kv", "full_kv", "q", "full_q"):
        numbers, indices = (getattr(mask, f"{name}_{part}") for part in ("num_blocks", "indices"))
        theirs = (getattr(reference, f"{name}_{part}") for part in ("num_blocks", "indices"))
        expected, order = theirs
        assert torch.equal(numbers, expected)
        for row, count in enumerate(expected[0, 0].tolist()):
            assert torch.equal(indices[0, 0, row, :count], order[0, 0, row, :count])
    assert mask.full_kv_num_blocks.sum() > 0


def test_a_policy_packs_its_micro_batches() -> None:
    policy, rows = packing(tiny.model(VOCABULARY)), groups()
    assert policy.passes(rows) == 1
    calls = count_calls(policy.model.model.layers[0])
    values = policy.logprobs(rows, passes=3)
    assert len(calls) == 3
    for i, alone in enumerate(one_by_one(policy.model, rows)):
        torch.testing.assert_close(values[i, : len(alone)], alone, rtol=0, atol=1e-5)
    seen = policy.logprobs(rows, np.array([4, 1]))
    torch.testing.assert_close(seen, values[[4, 1], : seen.shape[1]], rtol=0, atol=1e-5)


def test_layers_that_recompute_take_packed_rows() -> None:
    policy = packing(tiny.model(VOCABULARY).double(), gradient_checkpointing=True)
    assert not policy.sharing.shares
    calls = count_calls(policy.model.model.layers[0].mlp)
    values = policy.logprobs(groups())
    lengths = groups().response_ids.lengths
    check(policy, groups(), torch.cat([row[:n] for row, n in zip(values, lengths, strict=True)]))
    assert len(calls) > 2


@pytest.mark.parametrize("name", ["Gemma2Config", "Gemma3TextConfig", "MistralConfig"])
def test_rows_longer_than_a_sliding_window_are_computed_as_before(name: str) -> None:
    extra = WINDOW if name.startswith("Gemma") else {}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config_of(name, sliding_window=10, **extra)).eval().double()
    policy, rows = packing(made), groups()
    assert policy.sharing.limit == 10
    assert all(one.packed is None for one in plan_rows(rows, policy.sharing))
    values = policy.logprobs(rows)
    lengths = rows.response_ids.lengths
    check(policy, rows, torch.cat([row[:n] for row, n in zip(values, lengths, strict=True)]))
    with pytest.raises(AssertionError, match="not close"):
        check(policy, rows, compute(policy, rows))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("MambaConfig", "it does not attend by torch's own"),
        ("BloomConfig", "it does not attend by torch's own"),
        ("FalconConfig", "a packed row fails"),
        ("GPT2Config", "a packed row fails"),
    ],
)
def test_a_model_that_takes_no_packed_rows_computes_as_before_and_says_so(
    name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    extra = {"MambaConfig": {"state_size": 4}, "FalconConfig": {"alibi": True}}.get(name, {})
    policy = Policy(AutoModelForCausalLM.from_config(config_of(name, **extra)).eval(), None, kernels=["flex"])
    assert not policy.sharing.packs
    assert "micro-batches are not computed as one packed row, because" in caplog.text
    assert why in caplog.text
    for i, alone in enumerate(one_by_one(policy.model, groups())):
        torch.testing.assert_close(policy.logprobs(groups())[i, : len(alone)], alone, rtol=0, atol=1e-5)


def test_the_way_of_attending_is_no_part_of_a_saved_model(tmp_path: Path) -> None:
    policy = Policy(tiny.model(len(tiny.tokenizer())), tiny.tokenizer(), kernels=["flex"])
    saved = json.loads((policy.save(tmp_path / "saved") / "config.json").read_text())
    assert flex.IMPLEMENTATION not in json.dumps(saved)


def test_plans_count_a_packed_row_for_what_it_is() -> None:
    rows = make_rows([[5] * 100] * 3 + [[6] * 50], [[7] * 11, [8], [9] * 21, [9, 9]])
    sharing = Sharing(Costs(launch=3, attention=0.5), packs=True)
    (one,) = plan_rows(rows, sharing)
    assert (one.real, one.length, one.tokens) == (181, 256, 256)
    assert one.opens is not None
    assert sorted(one.opens.tolist()) == [0, 1, 2]
    assert fill_of([one]) == 181 / 256
    pairs = 100**2 / 2 + 10 * (100 + 5) + 20 * (100 + 10) + 50**2 / 2 + 1 * 50.5
    assert cost_of([one], sharing.costs) == pytest.approx(3 + 181 + 0.5 * pairs)
    assert [len(batch) for batch in micro_batches(rows, 190, sharing)] == [4]
    silent = make_rows([[5]], [[]])
    assert [one.packed for one in plan_rows(silent, sharing)] == [None]


def test_kernels_are_refused_where_they_cannot_run(tmp_path: Path) -> None:
    made = tiny.save(tmp_path / "model")
    with pytest.raises(ConfigError, match="kernels flex run on a GPU, and the device is cpu"):
        Policy.load(made, device="cpu", kernels=["flex"])
    with pytest.raises(ConfigError, match=r"kernels\.0: input should be 'flex' or 'triton'"):
        fit_config(overrides=["kernels=[flash]"], flags={"dataset": "d", "model": "m", "out": "o"})


def test_a_fit_that_packs_comes_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates on a CPU, FlexAttention's place taken by its mask in torch's attention."""
    folder = world(tmp_path)
    options: dict[str, Any] = {"steps": 2, "schedule_steps": 6, "algorithm": "grpo"}
    fit(config(folder, "before", **options))
    with pytest.raises(ConfigError, match="kernels flex run on a GPU"):
        fit(config(folder, "refused", kernels=["flex"], **options))
    monkeypatch.setattr(policies, "check_kernels", lambda *_: None)
    used: list[int] = []
    monkeypatch.setattr(flex, "kernel", lambda: used.append(1) or dense)
    fit(config(folder, "packed", kernels=["flex"], **options))
    assert furthest(weights(folder / "before"), weights(folder / "packed")) < 1e-5
    first = next(record for record in read_metrics(folder / "packed") if "timing" in record)
    assert first["timing"]["shared"] == 1
    assert used
