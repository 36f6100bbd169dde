"""Collects that are killed at random moments, starved of disk, or two at once: the dataset stays whole."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import data_tools
from tests.data_tools.logged import collected, dataset, draw, lines

ROOT = Path(__file__).parents[2]

FORKS = """
import json, os, sys
import data_tools
from data_tools.collecting import collect as _  # what a fork needs is loaded, but has not started a thread

for line in sys.stdin:
    arguments = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    try:
        data_tools.collect(*arguments)
    finally:
        os._exit(0)
"""


@pytest.fixture
def start():
    """Start a collect in a process of its own, at once; returns its process id."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", FORKS], cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def fork(log, into):
        print(json.dumps([[str(log)], str(into)]), file=process.stdin, flush=True)
        return int(process.stdout.readline())

    with process:
        yield fork


def gone(child, seconds=30.0):
    """Wait until a process has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.005)
    return False


def record(number):
    """A new row; or one that stands in the log again and again; or one that cannot be used."""
    if number % 10 == 7:
        return b'{"torn\n'
    return lines(draw(response="the same" if number % 10 == 3 else str(number)))


def facts(folder):
    """Rows and rejects, after a look whether an id is there twice."""
    query = """SELECT count(*) AS rows, count(DISTINCT response_id) AS ids,
        (SELECT count(*) FROM rejects) AS rejects FROM rollouts"""
    [found] = dataset(folder).sql(query).to_pylist()
    assert found["rows"] == found["ids"]
    return found["rows"], found["rejects"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="tells by /proc when a process has ended")
def test_a_collect_killed_at_any_moment_did_all_or_nothing_and_a_second_one_completes_it(tmp_path, start):
    moments, log = random.Random(0), tmp_path / "log.jsonl"
    data_tools.open(str(tmp_path / "ds"), create=True)
    done, killed, number = (0, 0), 0, 0
    took = 0.3
    for _ in range(20):
        with log.open("ab") as file:
            file.writelines(map(record, range(number, number + 30)))
        number += 30
        whole = (number * 9 // 10, number // 10)
        child = start(log, tmp_path / "ds")
        time.sleep(moments.uniform(0.0, 1.2 * took))
        os.kill(child, signal.SIGKILL)
        assert gone(child)
        found = facts(tmp_path)
        assert found in (done, whole)
        killed += found == done
        began = time.monotonic()
        report = collected(tmp_path, log)
        took = time.monotonic() - began
        assert facts(tmp_path) == whole
        assert report.total.kept == whole[0] - found[0]
        assert report.total.rejected["torn_line"] == whole[1]
        done = whole
    assert killed


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="tells by /proc when a process has ended")
def test_collects_of_the_same_logs_at_once_keep_each_row_once(tmp_path, start):
    logs = {tmp_path / "a.jsonl": range(200), tmp_path / "b.jsonl": range(1, 200)}
    for log, numbers in logs.items():
        log.write_bytes(b"".join(map(record, numbers)))
    children = [start(log, tmp_path / "ds") for log in (*logs, *logs)]
    assert all(map(gone, children))
    assert facts(tmp_path) == (180 + 179, 20 + 20)
    for log in logs:
        assert collected(tmp_path, log).batch is None


STARVED = """
import resource, signal, sys
from cli.main import rec

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
rec(["collect", sys.argv[2], "--into", sys.argv[3]])
"""


@pytest.mark.parametrize("limit", [1000, 40_000])
def test_a_full_disk_is_one_clear_error_and_a_second_collect_completes_it(tmp_path, limit):
    log = tmp_path / "log.jsonl"
    letters = random.Random(0)
    log.write_bytes(
        lines(*(draw(response="".join(letters.choices("abcdefghijklmnop", k=300))) for _ in range(500)))
    )
    collected_before = tmp_path / "small.jsonl"
    collected_before.write_bytes(lines(draw()))
    collected(tmp_path, collected_before)
    command = [sys.executable, "-c", STARVED, str(limit), str(log), str(tmp_path / "ds")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: could not write ")
    assert "make room" in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert facts(tmp_path) == (1, 0)
    assert not list((tmp_path / "ds").rglob("*.tmp"))
    assert collected(tmp_path, log).total.kept == 500
    assert facts(tmp_path) == (501, 0)
