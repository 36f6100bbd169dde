"""A collect that is killed at any moment leaves the dataset as it was."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data_tools.logged import collected, dataset, draw, lines, rollouts

KILLED_AT = """
import os, signal, sys
from data_tools.collecting import collect as collecting
from data_tools.store import batches
from data_tools.collecting import ledger

def kill_before(owner, name):
    def killed(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, killed)

def kill_after(owner, name):
    run = getattr(owner, name)
    def killed(*args, **kwargs):
        run(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, killed)

moment, owner, name = sys.argv[3:6]
owners = {"Ledger": ledger.Ledger, "BatchWriter": batches.BatchWriter, "Collecting": collecting._Collecting}
{"before": kill_before, "after": kill_after}[moment](owners[owner], name)
collecting.collect([sys.argv[1]], sys.argv[2])
"""


@pytest.mark.parametrize(
    ("moment", "owner", "name"),
    [
        ("before", "Ledger", "settle"),
        ("after", "Collecting", "read"),
        ("before", "BatchWriter", "revise"),
        ("after", "BatchWriter", "revise"),
        ("before", "BatchWriter", "commit"),
    ],
)
def test_a_killed_collect_leaves_no_trace_and_can_be_repeated(tmp_path, moment, owner, name):
    log = tmp_path / "log.jsonl"
    log.write_bytes(lines(draw(), draw(response="3")))
    collected(tmp_path, log)
    before = rollouts(tmp_path), dataset(tmp_path).batches()
    log.write_bytes(lines(draw(), draw(response="3"), draw(response="4")) + b'{"torn\n')
    command = [sys.executable, "-c", KILLED_AT, str(log), str(tmp_path / "ds"), moment, owner, name]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (rollouts(tmp_path), dataset(tmp_path).batches()) == before
    assert dataset(tmp_path).sql("FROM rejects").num_rows == 0
    report = collected(tmp_path, log)
    assert (report.total.kept, report.total.duplicate) == (1, 2)
