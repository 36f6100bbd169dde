"""From vLLM's samples to a better policy, by the commands that a user types; and a server killed midway."""

import itertools
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.nn.functional import cross_entropy

import data_tools
from cli.main import rec
from data_tools.errors import RecError
from offline_rec import rewards
from offline_rec.models.policy import Policy
from offline_rec.sampling.choose import SamplerSettings
from offline_rec.sampling.refresh import journal_folder, refresh
from offline_rec.sampling.sampler import Sample, SamplingParams
from offline_rec.sampling.vllm_server import VLLMServer
from tests import tiny
from tests.offline_rec.drawn import by_plain_forward
from tests.offline_rec.sessions import processes
from tests.vllm.conftest import ARGUMENTS

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

LETTERS = "abc"
COUNT, N = 40, 8
HOT, CUT = SamplingParams(max_tokens=4), SamplingParams(temperature=0.7, top_p=0.9, max_tokens=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers any text with one letter at random; the answer is the letter it begins with."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("e2e") / "base"
    tokenizer = tiny.tokenizer(LETTERS)
    tokenizer.chat_template = None
    model = tiny.model(len(tokenizer), seed=2, std=0.1, head_dim=32)
    optimizer, chance = torch.optim.AdamW(model.parameters(), lr=3e-3), random.Random(0)
    for _ in range(100):
        texts = ["".join(chance.choices(LETTERS, k=5)) for _ in range(32)]
        ids = torch.tensor([[*tokenizer(t)["input_ids"], 3] for t in texts])
        # Of five letters the last is the response.
        logits = model(ids, use_cache=False).logits[:, 3:-1]
        cross_entropy(logits.flatten(0, 1), ids[:, 4:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Prompts to sample, and others for the exam."""
    texts = ["".join(letters) for letters in itertools.product(LETTERS, repeat=4)]
    random.Random(1).shuffle(texts)
    folder = tmp_path_factory.mktemp("prompts")
    for name, part in (("log", texts[:COUNT]), ("exam", texts[COUNT : 2 * COUNT])):
        rows = [json.dumps({"prompt": text, "answers": text[0]}) for text in part]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return folder / "log.jsonl", folder / "exam.jsonl"


def run(*arguments: Any) -> None:
    """A command of `rec`, which must succeed."""
    done = CliRunner().invoke(rec, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output


def drawing(params: SamplingParams) -> list[Any]:
    """Options for how tokens are drawn."""
    cut = ["--temperature", params.temperature, "--top-p", params.top_p]
    return [*cut, "--max-tokens", params.max_tokens, "--seed", params.seed]


def assert_log_is_of(ds: Path, base: Path, params: SamplingParams) -> None:
    """`rec check` finds no fault, and every log-prob is that of a plain forward pass."""
    done = CliRunner().invoke(rec, ["check", str(ds), "--model", str(base), "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == 0
    found = {one["code"] for one in report["findings"] if one["severity"] != "info"}
    assert found <= {"truncated"}
    (compared,) = report["logprobs"]
    assert compared["mean_difference"] < 1e-4
    assert max(-compared["p01"], compared["p99"]) < 1e-3
    assert compared["outside_cut"] == 0
    rows = data_tools.open(str(ds)).sql(
        "SELECT prompt_ids, response_ids, behavior_logprobs, temperature, top_p FROM rollouts"
    )
    assert rows.num_rows == COUNT * N
    model = Policy.load(base, device="cpu", dtype="float32").model
    for row in rows.to_pylist():
        assert (row["temperature"], row["top_p"]) == pytest.approx((params.temperature, params.top_p))
        sample = Sample(row["prompt_ids"], row["response_ids"], row["behavior_logprobs"], "stop", "")
        plain = by_plain_forward(model, sample, params)
        np.testing.assert_allclose(row["behavior_logprobs"], plain, atol=1e-3)


def assert_fit_helps(ds: Path, base: Path, exam: Path, params: SamplingParams) -> None:
    """A fit on the log is better on other prompts: the interval of the difference is above 0."""
    folder = ds.parent
    options = "--lr 3e-3 --epochs 10 --groups-per-step 8 --set objective.epsilon_high=4 --eval-every 1000"
    run("fit", ds, "--model", base, "--out", folder / "run", *options.split())
    asked = ["--prompts", exam, "--reward", "exact", "-n", 8, *drawing(params)]
    run("eval", base, folder / "run", *asked, "--out", folder / "eval")
    found = json.loads((folder / "eval" / "eval.json").read_text())
    (difference,) = [one for one in found["differences"] if one["measure"] == "accuracy"]
    assert difference["second"] == "run"
    assert difference["low"] > 0.05


@pytest.mark.parametrize(
    ("by_server", "params"), [(False, HOT), (False, CUT), (True, HOT)], ids=["plain", "cut", "server"]
)
def test_samples_of_vllm_make_a_better_policy(
    base: Path,
    files: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: str,
    by_server: bool,
    params: SamplingParams,
) -> None:
    log, exam = files
    asked = ["--prompts", log, "--reward", "exact", "-n", N, *drawing(params)]
    engine = ["--launch-vllm", "--vllm-python", vllm_python] if by_server else ["--engine", "vllm"]
    engine += ["--dtype", "float32", "--vllm-args", " ".join(ARGUMENTS)]
    run("refresh", tmp_path / "ds", "--model", base, *asked, *engine)
    assert_log_is_of(tmp_path / "ds", base, params)
    assert_fit_helps(tmp_path / "ds", base, exam, params)


def test_a_server_killed_in_the_middle_costs_nothing_and_its_samples_make_a_better_policy(
    base: Path, files: tuple[Path, Path], tmp_path: Path, vllm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, exam = files
    ds = data_tools.open(str(tmp_path / "ds"), create=True)
    started: list[VLLMServer] = []
    start = VLLMServer.start
    monkeypatch.setattr(VLLMServer, "start", lambda self: (started.append(self), start(self)))
    engine = SamplerSettings(
        "server", launch=True, python=vllm_python, dtype="float32", arguments=ARGUMENTS, concurrency=2
    )

    def kill_midway(event: dict[str, Any]) -> None:
        session = started[0].pid if started else None
        if event["stage"] == "sample" and event["done"] == 10 and session is not None:
            for pid, _ in processes(session):
                if pid != session:
                    os.kill(pid, signal.SIGKILL)

    given = {"prompts": log, "n": N, "params": CUT, "reward": rewards.get("exact")}
    with pytest.raises(RecError, match=r"the vLLM server of .* has ended with exit code") as told:
        refresh(ds, base, **given, sampler=engine, progress=kill_midway)
    kept = int(told.value.hint.split("answers to ")[1].split()[0])
    assert 10 <= kept < COUNT
    assert ds.sql("SELECT count(*) AS n FROM rollouts")["n"].to_pylist() == [0]
    launch = ["--launch-vllm", "--vllm-python", vllm_python, "--dtype", "float32", "--concurrency", 2]
    asked = ["--reward", "exact", "-n", N, *drawing(CUT), "--resume", "--vllm-args", " ".join(ARGUMENTS)]
    run("refresh", ds.path, "--model", base, *asked, *launch)
    counted = "SELECT count(*) AS n, count(DISTINCT (group_id, response_id)) AS ids FROM rollouts"
    assert ds.sql(counted).to_pylist() == [{"n": COUNT * N, "ids": COUNT * N}]
    per_prompt = "SELECT DISTINCT n FROM (SELECT count(*) AS n FROM rollouts GROUP BY prompt)"
    assert ds.sql(per_prompt)["n"].to_pylist() == [N]
    assert not journal_folder(ds, "base").exists()
    assert_log_is_of(tmp_path / "ds", base, CUT)
    assert_fit_helps(tmp_path / "ds", base, exam, CUT)
