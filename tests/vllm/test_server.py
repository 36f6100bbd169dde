"""A vLLM server of one's own: its samples, its weights, and that nothing of it is left."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.errors import ConfigError, DataError, RecError
from offline_rec.models.policy import Policy
from offline_rec.sampling.choose import SamplerSettings, open_sampler
from offline_rec.sampling.sampler import SamplingParams
from offline_rec.sampling.verify import verify
from offline_rec.sampling.vllm_server import LaunchSettings, launch
from tests import tiny
from tests.offline_rec.drawn import assert_drawn_from, by_plain_forward
from tests.offline_rec.openai_server import wait_until
from tests.offline_rec.sessions import processes
from tests.vllm.conftest import ARGUMENTS

pytestmark = pytest.mark.vllm

PROMPTS = ["ab", "c", "abcabcabc", "ba"]
PARAMS = SamplingParams(max_tokens=12, seed=3)
WAYS = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 4}]


def settings_of(python: str) -> SamplerSettings:
    return SamplerSettings("server", launch=True, python=python, dtype="float32", arguments=ARGUMENTS)


@pytest.fixture(scope="module")
def sampler(models: dict[str, Path], vllm_python: str) -> Iterator[Any]:
    with open_sampler(models["old"], settings_of(vllm_python)) as opened:
        yield opened
        session = opened.server.pid
    assert wait_until(lambda: not processes(session), 30)


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


def test_a_server_that_others_started_is_used_by_its_address(
    sampler: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    settings = SamplerSettings("server", urls=(sampler.server.url,), dtype="float32")
    with open_sampler(models["old"], settings) as opened:
        assert len(opened.sample(PROMPTS, 2, PARAMS)[3]) == 2
        with pytest.raises(ConfigError, match="started by others"):
            opened.update_weights(models["new"])
    with (
        pytest.raises(RecError, match="does not draw from the weights"),
        open_sampler(models["new"], settings),
    ):
        pass
    other = tiny.save(tmp_path / "other", alphabet="cba", head_dim=32)
    with pytest.raises(DataError, match="another tokenizer"), open_sampler(other, settings):
        pass


def test_a_head_of_its_own_is_reloaded_without_a_restart(
    sampler: Any, policy: Policy, models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    before = sampler.server.pid
    # What was sampled fills the cache of prompts, which must not outlive its weights.
    assert verify(sampler, policy).largest < 1e-4
    sampler.update_weights(models["new"])
    assert sampler.server.pid == before
    assert "has reloaded other weights" not in caplog.text
    assert verify(sampler, Policy.load(models["new"], device="cpu", dtype="float32")).largest < 1e-4
    assert not verify(sampler, policy).good


def test_a_tied_head_that_would_keep_its_old_weights_is_found_and_the_server_restarted(
    sampler: Any, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sampler.update_weights(models["old-tied"])
    before = sampler.server.pid
    new = Policy.load(models["new-tied"], device="cpu", dtype="float32")
    # As if it were not known that this cannot be reloaded.
    monkeypatch.setattr("offline_rec.sampling.verify.has_own_head", lambda directory: True)
    sampler.update_weights(models["new-tied"], policy=new)
    assert "has reloaded other weights" in caplog.text
    assert sampler.server.pid != before
    assert not processes(before)
    assert verify(sampler, new).largest < 1e-4


def test_a_server_that_dies_is_named_and_what_was_finished_is_given(sampler: Any) -> None:
    session = sampler.server.pid
    assert len(processes(session)) > 2
    finished = {}
    stream = sampler.stream(PROMPTS * 50, 8, replace(PARAMS, max_tokens=400))
    finished.update([next(stream)])
    for pid, _ in processes(session):
        if pid != session:
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(RecError, match=r"the vLLM server of .* has ended with exit code"):
        finished.update(stream)
    assert all(len(samples) == 8 for samples in finished.values())
    assert 0 < len(finished) < len(PROMPTS) * 50
    assert wait_until(lambda: not processes(session))


HOST = """
import sys, time
from offline_rec.sampling.vllm_server import LaunchSettings, VLLMServer
server = VLLMServer(sys.argv[1], LaunchSettings(sys.argv[2], dtype="float32"))
server.start_process()
print(server.pid, flush=True)
time.sleep(600)
"""


def test_a_server_ends_with_the_process_that_started_it(models: dict[str, Path], vllm_python: str) -> None:
    command = [sys.executable, "-c", HOST, str(models["old"]), vllm_python]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        session = int(host.stdout.readline())
        time.sleep(3)
        assert processes(session)
        host.kill()
    assert wait_until(lambda: not processes(session), 30)


def test_a_server_that_does_not_start_says_why(models: dict[str, Path], vllm_python: str) -> None:
    settings = LaunchSettings(vllm_python, arguments=("--max-model-len", "100000"))
    with (
        pytest.raises(RecError, match=r"(?s)has ended with exit code \d.*its log ends with.*max_model_len"),
        launch(models["old"], settings),
    ):
        pass
    with pytest.raises(RecError, match="nopython"), launch(models["old"], LaunchSettings("/nopython")):
        pass
