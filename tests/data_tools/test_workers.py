"""Several processes read what one would, in the same order, and leave nothing behind."""

import fcntl
import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

import data_tools
from data_tools import readers
from data_tools.collecting import workers
from data_tools.collecting.identity import Scope
from data_tools.collecting.pipeline import Settings, process
from data_tools.errors import DataError
from data_tools.logs.lines import line_blocks, spans
from data_tools.logs.log import Log
from data_tools.processes import PIPE_BYTES, helpers
from data_tools.readers.base import BlockReader, RecordReader
from data_tools.readers.rows import RowsReader
from tests.data_tools.logged import dataset

ROOT = Path(__file__).parents[2]
CASES = sorted((ROOT / "tests" / "cases").rglob("*.jsonl"))
SCRIPT = """
import sys
import data_tools
from data_tools.collecting import workers

workers.BLOCKS_ALONE = 0
if __name__ == "__main__":
    import multiprocessing
    def tick(*_):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        sys.stdin.read()
    data_tools.collect([sys.argv[1]], sys.argv[2], workers=2, progress=tick)
"""


@pytest.fixture
def big_log(tmp_path, monkeypatch):
    """Ten blocks of lines, some of them torn or repeated."""
    monkeypatch.setattr(workers, "BLOCKS_ALONE", 1)
    monkeypatch.setattr(workers, "line_blocks", partial(line_blocks, block_bytes=1))
    monkeypatch.setattr(workers, "spans", partial(spans, block_bytes=1))
    rows = [
        {
            "group": n // 4,
            "prompt": f"What is {n // 4}?",
            "response": f"{n} " * 900,
            "token_ids": [n, 2],
            "logprobs": [-0.5, -0.25 if n % 7 else None],
            "reward": n % 3,
        }
        for n in range(2400)
    ]
    written = [json.dumps(row) for row in rows]
    written[5] = written[5][:40]
    written[2000] = written[1]
    written[2200] = '{"prompt": "a"}'
    path = tmp_path / "big.jsonl"
    path.write_text("\n".join(written), encoding="utf-8")
    return path


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "compressed"])
def test_two_processes_collect_what_one_does(big_log, tmp_path, plain):
    if not plain:
        big_log.write_bytes(gzip.compress(big_log.read_bytes()))
    one = data_tools.collect([str(big_log)], tmp_path / "one" / "ds")
    two = data_tools.collect([str(big_log)], tmp_path / "two" / "ds", workers=2)
    assert replace(one, batch=None) == replace(two, batch=None)
    assert one.total.rejected
    assert one.total.notes["missing_logprobs"]
    queries = ("FROM rollouts ORDER BY source_row", "FROM rejects ORDER BY source_row")
    for query in queries:
        rows = [dataset(tmp_path / name).sql(query).drop_columns("file") for name in ("one", "two")]
        assert rows[0].num_rows
        assert rows[0].equals(rows[1])
    assert not multiprocessing.active_children()


def test_a_process_that_dies_ends_the_collect_with_nothing_written(big_log, tmp_path):
    def kill(*_):
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(DataError, match=r"ended from outside") as error:
        data_tools.collect([str(big_log)], tmp_path / "ds", workers=2, progress=kill)
    assert "--workers 1" in error.value.hint
    assert dataset(tmp_path).batches() == []


def test_a_log_cut_short_while_it_is_read_ends_the_collect_with_nothing_written(big_log, tmp_path):
    def cut(*_):
        os.truncate(big_log, 5000)

    with pytest.raises(DataError, match="became shorter"):
        data_tools.collect([str(big_log)], tmp_path / "ds", workers=2, progress=cut)
    assert dataset(tmp_path).batches() == []


def test_processes_end_with_a_parent_that_was_killed(big_log, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(script), str(big_log), str(tmp_path / "ds")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as parent:
        children = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert children
    deadline = time.monotonic() + 30
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, children))


def alive(pid):
    """Whether a process runs; one that ended and waits to be asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not hasattr(fcntl, "F_GETPIPE_SZ"), reason="a system without sizes of pipes")
def test_results_come_through_a_wide_pipe(elsewhere):
    # The pool keeps its pipe to itself: this tells when a later Python has it in another place.
    ends = os.pipe()
    with suppress(OSError):  # a system may give less
        fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    result = elsewhere._result_queue._reader.fileno()
    assert fcntl.fcntl(result, fcntl.F_GETPIPE_SZ) == fcntl.fcntl(ends[0], fcntl.F_GETPIPE_SZ)
    for end in ends:
        os.close(end)


def test_a_format_that_adds_to_its_chunks_is_never_read_block_by_block():
    for reader in readers.READERS:
        if isinstance(reader, BlockReader) and reader.by_block:
            assert type(reader).chunks in (RecordReader.chunks, RowsReader.chunks)


@pytest.fixture(scope="module")
def elsewhere():
    """A process that shares nothing with this one."""
    with helpers(1) as pool:
        yield pool


def task_of(log, reader, settings):
    scope = Scope(reader.name, reader.fingerprint(log), log.name)
    return workers.Workers(2, settings)._task(log, reader, scope)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_block_is_read_elsewhere_as_it_is_read_here(path, elsewhere):
    log = Log.at(str(path))
    reader = readers.detect(log)
    if reader is None:
        pytest.skip("no log of its own")
    [log] = reader.plan([log]) or [log]
    task = task_of(log, reader, Settings())
    if task is None:
        assert not isinstance(reader, BlockReader) or not reader.by_block or log.companions or log.shared
        return
    blocks = line_blocks((line + b"\n" for line in path.read_bytes().splitlines()), block_bytes=1)
    there = list(elsewhere.map(task, blocks))
    here = [process(chunk, task.scope, Settings()) for chunk in reader.chunks(log)]
    assert pa.concat_tables([made.rows.table for made in there]).equals(
        pa.concat_tables([made.rows.table for made in here])
    )
    assert [reject for made in there for reject in made.rejects] == [x for made in here for x in made.rejects]
    assert counted(there) == counted(here)
    assert sum(made.input_rows for made in there) == sum(made.input_rows for made in here)


def counted(chunks):
    return sum((made.notes.counts for made in chunks), Counter())
