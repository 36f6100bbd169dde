"""`loop` with vLLM: one engine for all rounds, and one in a process beside the fit."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import data_tools
from offline_rec.looping.config import LoopConfig
from offline_rec.looping.loop import loop
from offline_rec.models.policy import Policy
from offline_rec.sampling.vllm_server import VLLMServer
from tests.offline_rec.fitting import furthest, weights
from tests.offline_rec.loops import ROWS
from tests.offline_rec.sessions import processes
from tests.vllm.conftest import ARGUMENTS

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def config(model: Path, folder: Path, sampler: dict[str, Any], **changes: Any) -> LoopConfig:
    """Three updates on samples of a policy that is to say more than `b`."""
    folder.mkdir()
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("ab", "c", "abcabcabc", "ba"))
    )
    return LoopConfig(
        model=str(model),
        dataset=str(folder / "ds"),
        out=str(folder / "run"),
        prompts=str(prompts),
        reward="regex(pattern='b')",
        rounds=3,
        n=4,
        max_tokens=6,
        sampler={"dtype": "float32", "arguments": list(ARGUMENTS)} | sampler,
        fit={"groups_per_step": 4, "lr": 1e-2, "device": "cpu"},
        keep_rounds=3,
        **changes,
    )


def test_a_server_is_kept_over_the_rounds_and_started_again_where_it_has_died(
    models: dict[str, Path], vllm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[VLLMServer] = []
    reloads: list[str] = []
    start, reload = VLLMServer.start_process, VLLMServer.reload
    monkeypatch.setattr(VLLMServer, "start_process", lambda self: (starts.append(self), start(self))[1])
    monkeypatch.setattr(VLLMServer, "reload", lambda self, m: (reloads.append(str(m)), reload(self, m))[1])

    def kill(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 2:
            assert len(starts) == 1
            keeper = starts[0].pid
            assert keeper is not None
            for pid, _ in processes(keeper):
                os.kill(pid, signal.SIGKILL)

    server = {"engine": "server", "launch": True, "python": vllm_python}
    done = loop(config(models["old"], tmp_path / "a", server), progress=kill)
    made = [tmp_path / "a" / "run" / "rounds" / f"00000{k}-00000{k}" / "model" for k in (1, 2)]
    assert reloads == [str(model) for model in made]  # the second one found nobody
    assert len(starts) == 2
    assert (done.versions, done.rows) == (3, 48)
    told = data_tools.open(tmp_path / "a" / "ds").policies()["policy"].model_extra
    assert told is not None
    used = [models["old"], *made]
    assert [told["versions"][str(v)]["weights"] for v in range(3)] == [
        Policy.load(model, device="cpu", dtype="float32").fingerprint() for model in used
    ]


def test_an_engine_beside_the_fit_gives_the_rows_and_weights_of_one_in_this_process(
    models: dict[str, Path], tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    engine = {"engine": "vllm"}
    loop(config(models["old"], here, engine, lag=1))
    loop(config(models["old"], there, engine, lag=1, side_by_side=True))
    assert furthest(weights(here / "run"), weights(there / "run")) == 0
    ours, theirs = (data_tools.open(folder / "ds").sql(ROWS) for folder in (here, there))
    assert ours.equals(theirs)
    assert set(ours["policy_version"].to_pylist()) == {0, 1}
