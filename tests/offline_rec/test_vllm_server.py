"""A server of one's own, with a stand-in for vLLM: started, given weights, ended, and what goes wrong."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data_tools.errors import RecError
from offline_rec.models.policy import Policy
from offline_rec.sampling.choose import SamplerSettings, open_sampler
from offline_rec.sampling.sampler import SamplingParams
from offline_rec.sampling.verify import verify
from offline_rec.sampling.vllm_server import LaunchSettings, VLLMServer
from tests import tiny
from tests.offline_rec.fake_vllm import interpreter
from tests.offline_rec.openai_server import wait_until
from tests.offline_rec.sessions import processes

PARAMS = SamplingParams(max_tokens=6, seed=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    return {
        name + kind: tiny.save(folder / (name + kind), seed=seed, tied=bool(kind), alphabet="abc")
        for name, seed in (("old", 1), ("new", 2))
        for kind in ("", "-tied")
    }


@pytest.fixture(scope="module")
def sampler(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    python = interpreter(tmp_path_factory.mktemp("python"))
    with open_sampler(models["old"], SamplerSettings("server", launch=True, python=python)) as opened:
        yield opened
        session = opened.server.pid
    assert wait_until(lambda: not processes(session), 20)


def policy(directory: Path) -> Policy:
    return Policy.load(directory, device="cpu", dtype="float32")


def test_a_launched_server_samples_and_takes_weights_without_a_restart(
    sampler: Any, models: dict[str, Path]
) -> None:
    assert len(sampler.sample(["ab", "c"], 3, PARAMS)[1]) == 3
    before = sampler.server.pid
    sampler.update_weights(models["new"])
    assert sampler.server.pid == before
    assert verify(sampler, policy(models["new"])).good
    assert not verify(sampler, policy(models["old"])).good


def test_a_head_that_is_tied_is_restarted_for_and_one_thought_not_to_be_is_found_out(
    sampler: Any, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = sampler.server.pid
    sampler.update_weights(models["old-tied"])
    second = sampler.server.pid
    assert second != first
    assert not processes(first)
    assert not caplog.records
    monkeypatch.setattr("offline_rec.sampling.verify.has_own_head", lambda directory: True)
    sampler.update_weights(models["new-tied"], policy=policy(models["new-tied"]))
    assert "has reloaded other weights" in caplog.text
    assert sampler.server.pid != second
    assert verify(sampler, policy(models["new-tied"])).good


def test_an_engine_that_stays_wrong_is_an_error(sampler: Any, models: dict[str, Path]) -> None:
    with pytest.raises(RecError, match="the engine does not draw from the weights that it should"):
        sampler.update_weights(models["old"], policy=policy(models["new"]))


def script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_server_without_vllm_says_so_and_leaves_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    python = script(tmp_path, f"exec {sys.executable} -c \"raise ImportError('no vllm here')\"")
    server = VLLMServer(models["old"], LaunchSettings(python))
    with pytest.raises(RecError, match="has ended with exit code 1: ImportError: no vllm here"):
        server.start()
    server.close()
    assert server.pid is None
    missing = VLLMServer(models["old"], LaunchSettings("/nopython"))
    with pytest.raises(RecError, match="No such file or directory: '/nopython'"):
        missing.start()
    missing.close()


def test_a_server_that_is_never_ready_is_given_up(models: dict[str, Path], tmp_path: Path) -> None:
    server = VLLMServer(models["old"], LaunchSettings(script(tmp_path, "exec sleep 60"), wait=1))
    with pytest.raises(RecError, match="is not ready after 1 s"):
        server.start()
    server.close()


HOST = """
import sys, time
from offline_rec.sampling.vllm_server import LaunchSettings, VLLMServer
server = VLLMServer(sys.argv[1], LaunchSettings(sys.argv[2]))
server.start_process()
print(server.pid, flush=True)
time.sleep(600)
"""


def test_a_server_ends_with_the_process_that_started_it(models: dict[str, Path], tmp_path: Path) -> None:
    python = script(tmp_path, "sleep 60 & exec sleep 60")
    command = [sys.executable, "-c", HOST, str(models["old"]), python]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        session = int(host.stdout.readline())
        assert wait_until(lambda: len(processes(session)) == 3)
        time.sleep(0.2)
        host.kill()
    assert wait_until(lambda: not processes(session), 20)
