"""vLLM in this process: its samples, its log-probs, and the weights that it is given later."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.errors import DataError, RecError
from offline_rec.models.policy import Policy
from offline_rec.sampling.choose import SamplerSettings, open_sampler
from offline_rec.sampling.sampler import SamplingParams
from offline_rec.sampling.verify import verify
from tests.offline_rec.drawn import assert_drawn_from, by_plain_forward
from tests.vllm.conftest import ARGUMENTS

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PROMPTS = ["ab", "c", "abcabcabc", "ba"]
PARAMS = SamplingParams(max_tokens=12, seed=3)
WAYS = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 4}]


@pytest.fixture(scope="module")
def sampler(models: dict[str, Path]) -> Iterator[Any]:
    settings = SamplerSettings("vllm", dtype="float32", arguments=ARGUMENTS)
    with open_sampler(models["old"], settings) as opened:
        yield opened


@pytest.fixture(scope="module")
def policy(models: dict[str, Path]) -> Policy:
    return Policy.load(models["old"], device="cpu", dtype="float32")


@pytest.mark.parametrize("changes", WAYS, ids=str)
def test_logprobs_are_those_of_a_forward_pass(
    sampler: Any, policy: Policy, changes: dict[str, float]
) -> None:
    params = replace(PARAMS, **changes)
    samples = list(itertools.chain(*sampler.sample(PROMPTS, 8, params)))
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    for sample in samples:
        expected = by_plain_forward(policy.model, sample, params)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
        assert (sample.finish_reason == "stop") == (sample.response_ids[-1] == 3)


@pytest.mark.parametrize("changes", WAYS[:2], ids=str)
def test_frequencies_of_whole_responses_match_their_probabilities(
    sampler: Any, policy: Policy, changes: dict[str, float]
) -> None:
    params = SamplingParams(max_tokens=3, seed=11, **changes)
    groups = sampler.sample(["ab"] * 60, 100, params)
    assert_drawn_from(policy.model, list(itertools.chain(*groups)), params)


def test_more_tokens_of_prompts_than_are_computed_at_once_are_no_trouble(sampler: Any) -> None:
    prompts = [("abc" * 80)[: 200 + i % 7] + "abc"[i % 3] for i in range(150)]
    groups = sampler.sample(prompts, 2, replace(PARAMS, max_tokens=3))
    assert [len(group) for group in groups] == [2] * 150


def test_the_same_seed_gives_the_same_samples_also_beside_others(sampler: Any) -> None:
    whole = sampler.sample(PROMPTS, 4, PARAMS)
    part = dict(sampler.stream(PROMPTS, 4, PARAMS, skip={0, 2}))
    assert sorted(part) == [1, 3]
    assert [s.response_ids for s in part[3]] == [s.response_ids for s in whole[3]]
    other = sampler.sample(PROMPTS, 4, replace(PARAMS, seed=4))
    assert [s.response_ids for s in other[3]] != [s.response_ids for s in whole[3]]


def test_greedy_tokens_are_certain_and_a_closed_stream_leaves_nothing_behind(sampler: Any) -> None:
    greedy = replace(PARAMS, temperature=0.0)
    first, second = sampler.sample(["ab"], 2, greedy)[0]
    assert first.response_ids == second.response_ids
    assert set(first.logprobs) == {0.0}
    stream = sampler.stream(PROMPTS * 20, 4, replace(PARAMS, max_tokens=100))
    next(stream)
    stream.close()
    assert len(sampler.sample(["c"], 3, PARAMS)[0]) == 3
    with pytest.raises(DataError, match="512 positions"):
        sampler.sample(["ab"], 1, replace(PARAMS, max_tokens=511))


def test_weights_are_reloaded_or_the_engine_restarted_and_verified_either_way(
    sampler: Any, policy: Policy, models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert verify(sampler, policy).largest < 1e-4
    sampler.update_weights(models["new"])
    assert "has reloaded other weights" not in caplog.text
    new = Policy.load(models["new"], device="cpu", dtype="float32")
    assert verify(sampler, new).largest < 1e-4
    # Negative control: the old weights are told from the new ones.
    assert not verify(sampler, policy).good
    with pytest.raises(RecError, match="does not draw from the weights that it should"):
        verify(sampler, policy).demand("the engine")
    sampler.update_weights(models["old-tied"])
    tied = Policy.load(models["old-tied"], device="cpu", dtype="float32")
    assert verify(sampler, tied).largest < 1e-4
