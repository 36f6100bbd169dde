"""Writers that are killed, starved of disk, or many at once: what is visible is always whole."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data_tools
from data_tools.errors import DataError
from data_tools.store.storage import LocalStorage
from tests.data_tools.rollout_rows import many

ROWS = 300

WRITES_FOREVER = f"""
import sys
import pyarrow as pa
import data_tools
from tests.data_tools.rollout_rows import many

ds = data_tools.open(sys.argv[1])
start = int(sys.argv[2])
print("ready", flush=True)
while True:
    with ds.writer() as writer:
        writer.rollouts(many({ROWS}, start=start))
        writer.rejects(pa.table({{"reason": ["torn_line"]}}))
        name = writer.commit()
    with ds.sidecar("logprobs", "w").writer(name) as sidecar:
        sidecar.write(ds.parquet(name).read(["response_id"]))
        sidecar.commit()
    start += {ROWS}
"""

REWRITES_FOREVER = """
import sys
import data_tools

ds = data_tools.open(sys.argv[1])
print("ready", flush=True)
number = 0
while True:
    ds.delete(f"response_id = 'r{number}'")
    ds.compact()
    number += 1
"""


def spawn(code, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def kill_after(process, seconds):
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors


def assert_aligned(ds):
    """Every batch opens, and its sidecar has the same rows in the same order."""
    sidecar = ds.sidecar("logprobs", "w")
    for batch in ds.batches():
        ids = ds.parquet(batch).read(["response_id"]).column(0)
        assert not sidecar.exists(batch) or sidecar.parquet(batch).read(["response_id"]).column(0) == ids


def assert_whole(ds):
    """All is aligned and no row is there twice; return the number of rows."""
    assert_aligned(ds)
    (facts,) = ds.sql("SELECT count(*) AS n, count(DISTINCT response_id) AS ids FROM rollouts").to_pylist()
    assert facts["n"] == facts["ids"]
    return facts["n"]


def test_a_writer_killed_at_any_moment_leaves_whole_batches_only(tmp_path):
    ds = data_tools.open(str(tmp_path / "ds"), create=True)
    moments, start = random.Random(0), 0
    for _ in range(4):
        kill_after(spawn(WRITES_FOREVER, ds.path, start), moments.uniform(0.0, 0.25))
        rows = assert_whole(ds)
        assert rows == ROWS * len(ds.batches())
        assert ds.sql("SELECT count(*) AS n FROM rejects").to_pylist() == [{"n": len(ds.batches())}]
        start += 100 * ROWS
    assert ds.batches()
    with ds.writer() as writer:
        writer.rollouts(many(1, start=start))
        writer.commit()


def test_a_rewrite_killed_at_any_moment_loses_and_doubles_nothing(tmp_path):
    ds = data_tools.open(str(tmp_path / "ds"), create=True)
    for start in (0, ROWS, 2 * ROWS):
        with ds.writer() as writer:
            writer.rollouts(many(ROWS, start=start))
            name = writer.commit()
        with ds.sidecar("logprobs", "w").writer(name) as sidecar:
            sidecar.write(ds.parquet(name).read(["response_id"]))
            sidecar.commit()
    moments, least = random.Random(1), 0
    for _ in range(4):
        kill_after(spawn(REWRITES_FOREVER, ds.path), moments.uniform(0.0, 0.4))
        rows = assert_whole(ds)
        gone = 3 * ROWS - rows
        assert gone >= least  # what was once erased never comes back
        assert gone <= len(ds.sql("SELECT * FROM _erased"))
        found = set(ds.sql("SELECT response_id FROM rollouts").column(0).to_pylist())
        assert found == {f"r{i}" for i in range(3 * ROWS)} - {f"r{i}" for i in range(gone)}
        assert ds.sidecar("logprobs", "w").missing() == []
        least = gone
    ds.compact()
    assert assert_whole(ds) == 3 * ROWS - least
    assert all(name.endswith(".done") for name in os.listdir(Path(ds.path, "swaps")))
    seen = [name for name in os.listdir(Path(ds.path, "rollouts")) if not name.startswith(".")]
    assert sorted(name[:-8] for name in seen) == ds.batches()  # hidden leftovers of a kill go after a day


class Killed(BaseException):
    pass


def die_at(monkeypatch, step):
    """Let the process die before the given change of the disk: that one and all later ones fail."""
    steps = []

    def dying(change):
        def maybe(*arguments, **options):
            steps.append(1)
            if len(steps) >= step:
                raise Killed
            return change(*arguments, **options)

        return maybe

    for name in ("publish", "remove"):
        monkeypatch.setattr(LocalStorage, name, dying(getattr(LocalStorage, name)))


def two_scored_batches(path):
    ds = data_tools.open(str(path), create=True)
    for start in (0, 6):
        with ds.writer() as writer:
            writer.rollouts(many(6, start=start))
            writer.rejects(pa.table({"reason": ["torn_line"]}))
            name = writer.commit()
        with ds.sidecar("logprobs", "w").writer(name) as sidecar:
            sidecar.write(ds.parquet(name).read(["response_id"]))
            sidecar.commit()
    with ds.rewards_writer("judge") as writer:
        writer.write(pa.table({"response_id": ["r1", "r7", "r8"], "reward": [9.0, 9.0, 8.0]}))
        writer.commit()
    return ds


def content(ds):
    (found,) = ds.sql(
        """SELECT list((response_id, reward, response_ids) ORDER BY response_id) AS rows,
            (SELECT count(*) FROM rejects) AS n_rejects,
            (SELECT list(response_id ORDER BY response_id) FROM _later_rewards) AS rewarded FROM rollouts"""
    ).to_pylist()
    return found | {"unscored": len(ds.sidecar("logprobs", "w").missing())}


REWRITES = {"delete": lambda ds: ds.delete("reward = 9"), "compact": lambda ds: ds.compact()}


@pytest.mark.parametrize("name", REWRITES)
def test_a_rewrite_that_dies_before_any_change_of_the_disk_did_all_or_nothing(tmp_path, monkeypatch, name):
    rewrite = REWRITES[name]
    ds = two_scored_batches(tmp_path / "fresh")
    shutil.copytree(ds.path, tmp_path / "template")
    before = content(ds)
    rewrite(ds)
    after = content(ds)
    for step in itertools.count(1):
        ds = data_tools.open(shutil.copytree(tmp_path / "template", tmp_path / str(step)))
        with monkeypatch.context() as patch:
            die_at(patch, step)
            try:
                rewrite(ds)
                break
            except Killed:
                pass
        found = content(ds)
        rewarded = found["rewarded"]  # the rewards of erased rows go right after the rows
        assert found in (before | {"rewarded": rewarded}, after | {"rewarded": rewarded})
        assert rewarded in (before["rewarded"], after["rewarded"])
        assert_aligned(ds)
        rewrite(ds)  # the next one finishes or undoes what the dead one left, then does its own work
        assert content(ds) == after
        assert all(name.endswith(".done") for name in os.listdir(Path(ds.path, "swaps")))
        assert sorted(os.listdir(Path(ds.path, "rollouts"))) == [f"{b}.parquet" for b in ds.batches()]
    assert step > 10


FILLS_THE_DISK = """
import resource, signal, sys
import data_tools
from data_tools.errors import DataError
from tests.data_tools.rollout_rows import many

ds = data_tools.open(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    with ds.writer() as writer:
        writer.rollouts(many(20_000))
        writer.commit()
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [10, 1000, 100_000])
def test_a_full_disk_is_a_readable_error_and_changes_nothing(tmp_path, limit):
    ds = data_tools.open(str(tmp_path / "ds"), create=True)
    with ds.writer() as writer:
        writer.rollouts(many(10, start=10**6))
        writer.commit()
    before = sorted(Path(ds.path).rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", FILLS_THE_DISK, ds.path, str(limit)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("could not write ")
    assert "File too large\nnothing became visible" in done.stdout
    assert sorted(Path(ds.path).rglob("*")) == before
    assert assert_whole(ds) == 10


def test_a_disk_that_fills_up_at_the_very_commit_changes_nothing(tmp_path, monkeypatch):
    ds = data_tools.open(str(tmp_path / "ds"), create=True)

    def full(*_):
        raise OSError(28, "No space left on device")

    with ds.writer() as writer:
        writer.rollouts(many(10))
        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(DataError, match="No space left on device"):
            writer.commit()
    monkeypatch.undo()
    assert ds.batches() == []
    assert [path.name for path in Path(ds.path, "rollouts").iterdir()] == []


def test_a_full_disk_during_compaction_keeps_the_old_batches(tmp_path, monkeypatch):
    ds = data_tools.open(str(tmp_path / "ds"), create=True)
    for start in (0, 10):
        with ds.writer() as writer:
            writer.rollouts(many(10, start=start))
            writer.commit()
    before = ds.batches()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(DataError, match="No space left on device"):
        ds.compact()
    monkeypatch.undo()
    assert ds.batches() == before
    assert all(name.endswith(".done") for name in os.listdir(Path(ds.path, "swaps")))
    assert assert_whole(ds) == 20


def test_two_writers_at_once_both_commit(tmp_path):
    ds = data_tools.open(str(tmp_path / "ds"), create=True)
    processes = [spawn(WRITES_FOREVER, ds.path, start) for start in (0, 10**6)]
    for process in processes:
        kill_after(process, 0.3)
    assert assert_whole(ds) == ROWS * len(ds.batches())
    starts = {
        int(r["response_id"][1:]) >= 10**6 for r in ds.sql("SELECT response_id FROM rollouts").to_pylist()
    }
    assert starts == {True, False}


def test_two_creators_at_once_agree_on_the_secret(tmp_path):
    code = (
        "import sys, data_tools; print('ready', flush=True); sys.stdin.readline()\n"
        "print(data_tools.open(sys.argv[1], create=True).info.secret)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "ds")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        process.stdout.readline()
    secrets = [process.communicate("go\n")[0] for process in processes]
    assert len(set(secrets)) == 1


def test_batches_committed_while_others_are_compacted_stay(tmp_path):
    ds = data_tools.open(str(tmp_path / "ds"), create=True)
    process = spawn(WRITES_FOREVER, ds.path, 0)
    while not ds.batches() and process.poll() is None:
        time.sleep(0.01)
    for _ in range(5):
        ds.compact()
    kill_after(process, 0.1)
    rows = assert_whole(ds)
    assert rows % ROWS == 0
    assert rows > 0
    found = set(ds.sql("SELECT response_id FROM rollouts").column(0).to_pylist())
    assert found == {f"r{i}" for i in range(rows)}


def test_a_second_rewriter_is_told_to_wait(tmp_path):
    ds = data_tools.open(str(tmp_path / "ds"), create=True)
    with (
        ds.storage.locked(),
        pytest.raises(DataError, match="another process is deleting from or compacting"),
    ):
        ds.compact()


def test_memory_does_not_grow_with_the_rows_written(tmp_path):
    code = """
import resource, sys
import pyarrow as pa
import data_tools
from tests.data_tools.rollout_rows import many

ds = data_tools.open(sys.argv[1], create=True)
table = many(4096)
with ds.writer() as writer:
    for round in range(int(sys.argv[2])):
        ids = pa.array([f"r{round}-{i}" for i in range(4096)])
        writer.rollouts(table.set_column(0, table.schema.field(0), ids))
    writer.commit()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    peaks = [
        int(
            subprocess.run(
                [sys.executable, "-c", code, tmp_path / str(n), str(n)], capture_output=True, check=True
            ).stdout
        )
        for n in (4, 80)
    ]
    assert peaks[1] < 1.2 * peaks[0]
