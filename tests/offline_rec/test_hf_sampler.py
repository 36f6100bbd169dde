"""Sampling: the right distribution, its log-probs, and the same samples however they are batched."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from data_tools.errors import ConfigError, DataError
from offline_rec.sampling.hf_sampler import HFSampler, draw, sampling_logprobs
from offline_rec.sampling.sampler import Noise, Prompt, SamplingParams
from tests import tiny
from tests.offline_rec.drawn import assert_drawn_from, by_plain_forward

PROMPTS = ["12+34=", "5", "a longer prompt than the others: ", "99+1=", "5"]
PARAMS = SamplingParams(max_tokens=12, seed=3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    torch.set_num_threads(1)
    policy = tiny.model(len(tokenizer), seed=1)
    # Likely enough that some responses end and some do not.
    with torch.no_grad():
        policy.lm_head.weight[3] *= 3
    return policy


@pytest.fixture(scope="module")
def toy() -> tuple[Any, Any]:
    """A model of seven tokens, so that short responses can be counted."""
    tokenizer = tiny.tokenizer("abc")
    return tiny.model(len(tokenizer), seed=2, std=0.15), tokenizer


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 5}, {"top_k": 9, "top_p": 0.6}],
    ids=str,
)
def test_logprobs_are_those_of_the_sampling_distribution(
    model: Any, tokenizer: Any, changes: dict[str, float]
) -> None:
    params = replace(PARAMS, **changes)
    for sample in itertools.chain(*HFSampler(model, tokenizer).sample(PROMPTS, 4, params)):
        expected = by_plain_forward(model, sample, params)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
OTHERS = {
    "qwen2": SHAPE,
    "mistral": SHAPE | {"sliding_window": 5, "head_dim": 8},
    "gemma2": SHAPE | {"sliding_window": 5, "head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures_give_the_same_logprobs_as_their_plain_forward_pass(
    tokenizer: Any, kind: str
) -> None:
    torch.manual_seed(0)
    facts = {"vocab_size": len(tokenizer), "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": 3}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **OTHERS[kind], **facts)).eval()
    for sample in itertools.chain(*HFSampler(model, tokenizer).sample(PROMPTS, 3, PARAMS)):
        expected = by_plain_forward(model, sample, PARAMS)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("max_sequences", [1, 3, 7, 64])
def test_samples_do_not_depend_on_the_batch(model: Any, tokenizer: Any, max_sequences: int) -> None:
    whole = HFSampler(model, tokenizer, max_sequences=100).sample(PROMPTS, 5, PARAMS)
    parts = HFSampler(model, tokenizer, max_sequences=max_sequences).sample(PROMPTS, 5, PARAMS)
    for one, other in zip(itertools.chain(*whole), itertools.chain(*parts), strict=True):
        assert one.response_ids == other.response_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_a_part_of_the_prompts_gives_that_part_of_the_samples(model: Any, tokenizer: Any) -> None:
    sampler = HFSampler(model, tokenizer)
    whole = sampler.sample(PROMPTS, 3, PARAMS)
    part = sampler.sample(PROMPTS[2:4], 3, PARAMS)
    assert [s.response_ids for s in part[1]] == [s.response_ids for s in whole[3]]


def test_a_prompt_given_twice_is_sampled_anew_and_another_seed_changes_everything(
    model: Any, tokenizer: Any
) -> None:
    sampler = HFSampler(model, tokenizer)
    _, first, _, _, second = sampler.sample(PROMPTS, 3, PARAMS)
    assert [s.response_ids for s in first] != [s.response_ids for s in second]
    assert [s.response_ids for s in first + second] == [
        s.response_ids for s in sampler.sample(["5"], 6, PARAMS)[0]
    ]
    (other,) = sampler.sample(["5"], 3, replace(PARAMS, seed=4))
    assert {tuple(s.response_ids) for s in first}.isdisjoint(tuple(s.response_ids) for s in other)


def test_every_response_ends_with_the_stop_token_or_at_the_length(model: Any, tokenizer: Any) -> None:
    samples = list(itertools.chain(*HFSampler(model, tokenizer).sample(PROMPTS, 16, PARAMS)))
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    for sample in samples:
        ends = sample.response_ids[-1] == tokenizer.eos_token_id
        assert (sample.finish_reason == "stop") == ends
        assert ends or len(sample.response_ids) == PARAMS.max_tokens
        assert tokenizer.eos_token_id not in sample.response_ids[:-1]
        assert sample.text == tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        assert len(sample.logprobs) == len(sample.response_ids)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 3}], ids=str)
def test_frequencies_of_whole_responses_match_their_probabilities(
    toy: tuple[Any, Any], changes: dict[str, float]
) -> None:
    model, tokenizer = toy
    params = SamplingParams(max_tokens=3, seed=11, **changes)
    n = 6000
    (samples,) = HFSampler(model, tokenizer, max_sequences=2000).sample(["ab"], n, params)
    assert_drawn_from(model, samples, params)


def test_temperature_zero_takes_the_most_likely_token_with_certainty(model: Any, tokenizer: Any) -> None:
    params = replace(PARAMS, temperature=0.0)
    for samples in HFSampler(model, tokenizer).sample(PROMPTS, 2, params):
        assert samples[0].response_ids == samples[1].response_ids
        assert set(samples[0].logprobs) == {0.0}
        ids = torch.tensor([samples[0].prompt_ids + samples[0].response_ids])
        best = model(ids).logits[0, len(samples[0].prompt_ids) - 1 : -1].argmax(-1)
        assert best.tolist() == samples[0].response_ids


def test_top_p_keeps_the_fewest_tokens_that_hold_it() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.1, 0.3, 0.1]]))
    kept = sampling_logprobs(logits, SamplingParams(top_p=0.75)).exp()
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.0, 0.375, 0.0]]))
    only = sampling_logprobs(logits, SamplingParams(top_p=0.01)).exp()
    torch.testing.assert_close(only, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -1e9, 0.0, -torch.inf]).expand(3, -1)
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    token, logprob = draw(logits, uniform, SamplingParams())
    assert token.tolist() == [1, 3, 3]
    torch.testing.assert_close(logprob, torch.full((3,), math.log(0.5)))


def test_noise_is_uniform_and_differs_between_samples_prompts_and_seeds() -> None:
    keys = [
        *Noise(0).numbers([1, 2], 200),
        *Noise(0).numbers([1, 3], 200),
        *Noise(1).numbers([1, 2], 200),
        *Noise(-1).numbers([1, 2], 200),
    ]
    assert len(set(keys)) == 800
    numbers = Noise.uniforms(keys, 50)
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 43.8  # 99.9 % point at 19 degrees of freedom
    assert abs(np.corrcoef(numbers[:200].ravel(), numbers[200:400].ravel())[0, 1]) < 0.05


def test_chats_go_through_the_template_and_ids_stay_as_they_are(model: Any, tokenizer: Any) -> None:
    sampler = HFSampler(model, tokenizer)
    chat = '[{"role": "user", "content": "1+1"}]'
    ids = sampler.reader.encode([chat])[0]
    assert tokenizer.decode(ids) == "<user>1+1</><assistant>"
    (by_chat,), (by_ids,) = sampler.sample([chat, Prompt("?", ids=ids)], 1, PARAMS)
    assert by_chat.prompt_ids == by_ids.prompt_ids == ids
    (again,) = HFSampler(model, tokenizer).sample([Prompt("?", ids=ids)], 1, PARAMS)[0]
    assert again.response_ids == by_chat.response_ids


def test_progress_adds_up_to_all_samples(model: Any, tokenizer: Any) -> None:
    seen: list[int] = []
    HFSampler(model, tokenizer, max_sequences=6).sample(PROMPTS, 4, PARAMS, progress=seen.append)
    assert sum(seen) == 20
    assert len(seen) > 1


def test_unusable_prompts_and_parameters_are_refused(model: Any, tokenizer: Any) -> None:
    sampler = HFSampler(model, tokenizer)
    with pytest.raises(DataError, match="prompt 1: a message holds parts that are no text"):
        sampler.sample(["1", '[{"role": "user", "content": [{"type": "image"}]}]'], 1, PARAMS)
    with pytest.raises(DataError, match="512 positions"):
        sampler.sample(["1" * 505], 1, PARAMS)
    with pytest.raises(ConfigError, match="at least 1"):
        sampler.sample(["1"], 0, PARAMS)
    for wrong in ({"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_k": -1}):
        with pytest.raises(ConfigError):
            SamplingParams(**wrong)  # type: ignore[arg-type]


def test_scores_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(DataError, match="not finite"):
        draw(torch.tensor([[0.0, math.nan]]), torch.tensor([0.5]), SamplingParams())
