"""The launcher: ranks are told who they are, end together, and the one to blame is named."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_tools.errors import ConfigError, DataError
from offline_rec.training.engines import launch as launch_module
from offline_rec.training.engines.launch import launch
from offline_rec.training.engines.place import LOST, Place

RANK = "import os, sys, time; rank = int(os.environ['RANK'])\n"
WAIT = "time.sleep(60)\n"


def python(script):
    return [sys.executable, "-c", RANK + script]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(launch_module, "FAREWELL_SECONDS", 0.5)


def test_ranks_are_told_their_numbers_and_where_to_meet(tmp_path):
    names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"
    script = (
        f"open(r'{tmp_path}/' + str(rank), 'w').write(' '.join(os.environ[n] for n in '{names}'.split()))"
    )
    assert launch(python(script), 3) == 0
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [one[:3] for one in told] == [[str(rank), str(rank), "3"] for rank in range(3)]
    assert len({(host, port) for *_, host, port in told}) == 1


def test_rank_0_speaks_for_all(capfd):
    assert launch(python("print(rank); print(rank, file=sys.stderr)"), 3) == 0
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("0\n", "0\n")


def test_an_error_that_rank_0_has_told_is_not_told_again(capfd):
    script = "print('error: no such file', file=sys.stderr); sys.exit(2)"
    assert launch(python(script), 2) == 2
    assert capfd.readouterr().err == "error: no such file\n"


def test_a_killed_rank_is_named_and_the_others_end_too():
    began = time.monotonic()
    with pytest.raises(DataError, match=r"rank 1 of 3 was ended by SIGKILL.*\n.*--resume"):
        launch(python(f"if rank == 1: os.kill(os.getpid(), 9)\n{WAIT}"), 3)
    assert time.monotonic() - began < 10


def test_ranks_that_do_not_listen_are_killed():
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank: {WAIT}else: sys.exit(1)"
    began = time.monotonic()
    assert launch(python(deaf), 2) == 1
    assert time.monotonic() - began < 10


def test_the_error_of_another_rank_is_told_with_its_number():
    script = (
        f"if rank == 1: print('error: out of memory\\nhint: less', file=sys.stderr); sys.exit(1)\n"
        f"time.sleep(0.3); sys.exit({LOST})"
    )
    with pytest.raises(DataError, match=r"^rank 1: out of memory\nless$"):
        launch(python(script), 2)


def test_a_traceback_of_another_rank_is_told_whole():
    script = f"if rank == 1: raise ValueError('odd')\ntime.sleep(0.3); sys.exit({LOST})"
    with pytest.raises(DataError, match=r"rank 1: Traceback[^$]*ValueError: odd"):
        launch(python(script), 2)


LAUNCHER = """
import sys
from offline_rec.training.engines.launch import launch
sys.exit(launch([sys.executable, "-c", sys.argv[1]], 2))
"""
FOLLOWER = """
import os, signal, sys, time
from offline_rec.training.engines.launch import follow_launcher
def say(text):
    open(os.environ["SEEN"] + os.environ["RANK"], "a").write(text)
def stop(number, frame):
    say(f"{number} ")
    sys.exit(0)
signal.signal(signal.SIGINT, stop), signal.signal(signal.SIGTERM, stop)
follow_launcher()
say("ready ")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "received"),
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM), (signal.SIGKILL, signal.SIGTERM)],
)
def test_ranks_hear_of_a_signal_once_also_of_one_that_kills_the_launcher(tmp_path, sent, received):
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, FOLLOWER], env={**os.environ, "SEEN": f"{tmp_path}/"}
    )
    files = [tmp_path / "0", tmp_path / "1"]
    wait_for(lambda: all(file.exists() and file.read_text() == "ready " for file in files))
    process.send_signal(sent)
    assert process.wait(20) == (0 if sent != signal.SIGKILL else -signal.SIGKILL)
    wait_for(lambda: all(file.read_text() == f"ready {received.value} " for file in files))


def wait_for(true, seconds=20):
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_process_without_a_launcher_is_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Place.here() == Place(0, 1, 0, launched=False)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        Place.here()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Place.here() == Place(2, 4, 2, launched=True)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_nothing_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    launch(python(""), 2)
    with pytest.raises(DataError):
        launch(python("os.kill(os.getpid(), 9)"), 2)
    assert len(os.listdir("/proc/self/fd")) == before
