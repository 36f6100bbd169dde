"""`rec fit --processes`: ranks are started, interrupted and killed, and the run goes on to the same end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offline_rec.config import fit_config, to_yaml
from offline_rec.training import checkpoint
from offline_rec.training.fit import fit
from offline_rec.training.metrics import read_metrics
from tests.offline_rec.fitting import assert_same_run, config, world

STEPS = 60
FIELDS = {"steps": STEPS, "lr": 1e-4, "save_every": 5, "eval_every": 20, "zero_stage": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def whole(folder):
    """The run of one process that nothing stopped."""
    return fit(config(folder, "whole", **FIELDS | {"zero_stage": None})).out


def start(folder, *arguments):
    """`rec fit` in two processes, once it has made a few more steps than it found."""
    out = folder / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "fit", *arguments, "--out", str(out), "--processes", "2"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    enough = steps(out) + 7
    limit = time.monotonic() + 120
    while steps(out) < enough:
        if process.poll() is not None or time.monotonic() > limit:
            process.kill()
            raise AssertionError(process.communicate())
        time.sleep(0.02)
    return process


def steps(out):
    return max((record["step"] for record in read_metrics(out)), default=0)


def ranks(process):
    """Process ids of its ranks, in order."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in found]


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds ranks through /proc")
def test_a_killed_rank_is_named_and_the_run_goes_on_through_an_interrupt_to_the_same_end(folder, whole):
    (folder / "fit.yaml").write_text(to_yaml(config(folder, "run", **FIELDS)))
    process = start(folder, "--config", str(folder / "fit.yaml"))
    os.kill(ranks(process)[1], signal.SIGKILL)
    began = time.monotonic()
    _, told = process.communicate(timeout=60)
    assert time.monotonic() - began < 60
    assert process.returncode == 1
    assert "error: rank 1 of 2 was ended by SIGKILL" in told
    assert "--resume" in told

    process = start(folder, "--resume")
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "note: stopping after this step" in told
    assert "error: interrupted after step" in told
    assert max(checkpoint.steps(folder / "run" / "checkpoints")) == steps(folder / "run") < STEPS

    done = fit(config(folder, "run", **FIELDS | {"zero_stage": None}), resume=True)
    assert_same_run(done.out, whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "2", "--gpus", "2"], "--processes and --gpus are both given"),
        (["--gpus", "2", "--device", "cpu"], "--gpus and --device are both given"),
        (["--set", "engine=ddp", "--set", "offload=true"], "offload is for DeepSpeed, and engine is ddp"),
        (["--set", "zero_stage=0", "--set", "offload=true"], "ZeRO stage 0 offloads nothing"),
        (["--set", "zero_stage=4"], "zero_stage: "),
    ],
)
def test_what_does_not_go_together_is_refused(run, folder, arguments, message):
    result = run("fit", folder / "ds", "--model", folder / "m", "--out", folder / "no", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert not (folder / "no").exists()


def test_a_rank_starts_no_ranks(run, folder, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = ("fit", folder / "ds", "--model", folder / "m", "--out", folder / "no")
    assert "RANK is set" in run(*arguments, "--processes", "2").stderr
    assert "engine torch is one process, and there are 2" in run(*arguments, "--set", "engine=torch").stderr


def test_without_deepspeed_the_error_names_the_extra(run, folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    result = run(
        "fit", folder / "ds", "--model", folder / "m", "--out", folder / "no", "--set", "zero_stage=3"
    )
    assert "deepspeed is not installed" in result.stderr
    assert "offline-rec[deepspeed]" in result.stderr


def test_a_run_of_processes_may_go_on_with_gpus(run, folder, monkeypatch):
    started = []
    monkeypatch.setattr("cli.fit.launch", lambda command, count: started.append((read(command), count)) or 0)

    def read(command):
        return fit_config(command[command.index("--config") + 1]).device

    (folder / "fit.yaml").write_text(to_yaml(config(folder, "later", device="cpu")))
    assert run("fit", "--config", folder / "fit.yaml", "--gpus", "2").exit_code == 0
    assert run("fit", "--config", folder / "fit.yaml", "--processes", "3").exit_code == 0
    assert started == [("cuda", 2), ("cpu", 3)]
