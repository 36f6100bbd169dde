"""Opening the sampler that settings name."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from data_tools.errors import ConfigError, MissingExtra, RecError
from offline_rec.models.policy import Policy
from offline_rec.sampling.choose import SamplerSettings, as_keywords, open_sampler
from offline_rec.sampling.hf_sampler import HFSampler
from offline_rec.sampling.sampler import SamplingParams
from offline_rec.sampling.verify import has_own_head, verify
from offline_rec.sampling.vocabulary import Vocabulary
from tests import tiny
from tests.offline_rec.openai_server import FakeServer, serving

PARAMS = SamplingParams(max_tokens=6, seed=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny.save(tmp_path_factory.mktemp("model"), seed=1)


def test_settings_need_no_torch() -> None:
    script = "import sys; from offline_rec.sampling.choose import SamplerSettings; SamplerSettings()"
    subprocess.run([sys.executable, "-c", f"{script}; assert 'torch' not in sys.modules"], check=True)


def test_the_embedded_engine_gives_prompts_as_batches_finish_and_takes_new_weights(
    directory: Path, tmp_path: Path
) -> None:
    with open_sampler(directory, SamplerSettings(concurrency=4)) as sampler:
        stream = sampler.stream(["long prompt", "1", "12", "1"], 4, PARAMS)
        assert [number for number, _ in stream] == [1, 3, 2, 0]
        # A prompt that is given twice goes on counting, also where the first is there already.
        whole = sampler.sample(["1", "1"], 6, PARAMS)
        assert [s.response_ids for s in dict(sampler.stream(["1", "1"], 6, PARAMS, skip={0}))[1]] == [
            s.response_ids for s in whole[1]
        ]
        before = Policy.load(directory, device="cpu")
        assert verify(sampler, before).largest < 1e-4
        other = tiny.save(tmp_path / "other", seed=2)
        sampler.update_weights(other)
        assert verify(sampler, Policy.load(other, device="cpu")).largest < 1e-4
        assert not verify(sampler, before).good


def test_a_model_in_training_mode_is_left_in_it_between_prompts() -> None:
    tokenizer = tiny.tokenizer()
    model = tiny.model(len(tokenizer)).train()
    stream = HFSampler(model, tokenizer, max_sequences=1).stream(["1", "2"], 1, PARAMS)
    next(stream)
    assert model.training
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_a_server_is_opened_only_if_it_draws_from_the_weights_of_the_directory(
    directory: Path, tmp_path: Path
) -> None:
    policy = Policy.load(directory, device="cpu")
    with serving(FakeServer(policy.model, policy.tokenizer)) as server:
        settings = SamplerSettings("server", urls=(server.url,), attempts=2)
        with open_sampler(directory, settings) as sampler:
            assert len(sampler.sample(["1"], 2, PARAMS)[0]) == 2
        other = tiny.save(tmp_path / "other", seed=2)
        said = r"does not draw from the weights.*by up to [\d.]+ nats"
        with pytest.raises(RecError, match=said), open_sampler(other, settings):
            pass


def test_settings_that_contradict_each_other_are_refused() -> None:
    for wrong, said in (
        ({"engine": "vlm"}, "unknown engine 'vlm'"),
        ({"engine": "server"}, "either the addresses"),
        ({"engine": "server", "urls": ("http://a",), "launch": True}, "either the addresses"),
        ({"engine": "hf", "urls": ("http://a",)}, "asks no server"),
        ({"concurrency": 0}, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            SamplerSettings(**wrong)  # type: ignore[arg-type]


def test_without_vllm_the_error_names_the_extra(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match="vllm"), open_sampler(directory, SamplerSettings("vllm")):
        pass


def test_vllm_is_not_given_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for settings in (SamplerSettings("vllm"), SamplerSettings("server", launch=True)):
        with pytest.raises(ConfigError, match="holds an adapter"):
            open_sampler(tmp_path, settings)


def test_arguments_of_a_command_line_become_those_of_a_function() -> None:
    given = "--max-num-seqs 32 --enforce-eager --gpu-memory-utilization=0.5 --quantization fp8"
    assert as_keywords(given.split()) == {
        "max_num_seqs": 32,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.5,
        "quantization": "fp8",
    }
    with pytest.raises(ConfigError, match="'32' is no argument"):
        as_keywords(("32",))


def test_a_head_that_is_tied_is_told_from_one_of_its_own(directory: Path, tmp_path: Path) -> None:
    assert has_own_head(directory)
    assert not has_own_head(tiny.save(tmp_path / "tied", tied=True))


def test_what_ends_a_response_is_read_from_the_directory(directory: Path) -> None:
    loaded = Vocabulary.load(directory)
    policy: Any = Policy.load(directory, device="cpu")
    in_memory = Vocabulary.of(policy.model, policy.tokenizer)
    assert loaded.stop_ids == in_memory.stop_ids == {3}
    assert (loaded.size, loaded.context) == (in_memory.size, in_memory.context)
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    assert Vocabulary.load(directory).stop_ids == {3, 5}
