"""Sampling beside the fit: the same rows and weights as one after the other, also after a kill of either."""

import multiprocessing
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

import data_tools
from data_tools.errors import DataError, RecError
from offline_rec.looping import beside
from offline_rec.looping.loop import loop
from offline_rec.sampling import refresh as refresh_module
from offline_rec.sampling.journal import Journal
from offline_rec.training import loop as fit_loop_module
from tests.offline_rec import loops
from tests.offline_rec.fitting import furthest, records, weights
from tests.offline_rec.loops import ROWS, SIGNAL, example
from tests.offline_rec.openai_server import wait_until
from tests.offline_rec.sessions import processes as in_session
from tests.offline_rec.test_fit_resume import before

LAG = ("steps_per_round=1", "lag=1", "rounds=4", "replay=1", "replay_weight=staleness_halflife(1)", *SIGNAL)
"""Batches 1 and 2 are of version 0, 3 of version 1, 4 of version 2: the last two are sampled beside a fit."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    torch.set_num_threads(1)
    return loops.world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def one_after_the_other(tmp_path_factory, world):
    folder = tmp_path_factory.mktemp("whole")
    loop(example("lag-10", world, folder, *LAG))
    return folder


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.offline_rec.test_loop_beside"])
    return context


class Forked:
    """A process of `multiprocessing`, as one of `subprocess`; it starts faster."""

    def __init__(self, process):
        self.process = process
        self.pid = process.pid

    def wait(self, seconds=60):
        self.process.join(seconds)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("beside", seconds)
        return self.process.exitcode


def starter(processes, act=None, *args):
    """What starts the process beside, which does something before it is at the service of the loop."""

    def start(channel, devices):
        process = processes.Process(target=serve, args=(channel, act, *args))
        process.start()
        return Forked(process)

    return start


def serve(channel, act, *args):
    if act is not None:
        act(*args)
    beside.serve(channel)


def commit_late(folder):
    """Have batches committed no sooner than the update beside which they are sampled has been made."""
    original = refresh_module._Refreshing.collect

    def collect(self, log):
        update = folder / f"update-{self.version + 1}"
        assert not self.version or wait_until(update.exists, 120)
        return original(self, log)

    refresh_module._Refreshing.collect = collect


def side_by_side(world, folder, **changes):
    config = example("lag-10", Path(world), Path(folder), *LAG)
    return config.model_copy(update={"side_by_side": True, **changes})


def assert_same(folder, other):
    assert furthest(weights(folder / "run"), weights(other / "run")) == 0
    ours, theirs = (data_tools.open(f / "ds").sql(ROWS) for f in (folder, other))
    assert ours.equals(theirs)
    assert records(folder / "run") == records(other / "run")
    ours, theirs = (data_tools.open(f / "run").sql("FROM lineage ORDER BY ALL") for f in (folder, other))
    assert ours.equals(theirs)


def test_batches_are_sampled_while_others_are_trained_on_and_nothing_else_changes(
    world, one_after_the_other, tmp_path, processes, monkeypatch
):
    monkeypatch.setattr(beside, "start", starter(processes, commit_late, tmp_path))
    there = []

    def watch(event):
        if event["event"] == "step":
            there.append(len(data_tools.open(tmp_path / "ds").batches()))
            (tmp_path / f"update-{event['step']}").touch()

    done = loop(side_by_side(world, tmp_path), progress=watch)
    # No version but the first was there before the update beside which it is sampled.
    assert there == [1, 1, 2, 3]
    assert_same(tmp_path, one_after_the_other)
    query = "SELECT step, list_sort(list(DISTINCT policy_version)) AS v FROM lineage GROUP BY step ORDER BY 1"
    versions = data_tools.open(tmp_path / "run").sql(query)["v"].to_pylist()
    assert versions == [[0], [0], [0, 1], [1, 2]]
    assert (done.steps, done.versions) == (4, 3)


def test_a_fit_does_not_see_whether_newer_batches_have_come(world, one_after_the_other, tmp_path):
    # The weights of a replay go by staleness, and the sequential loop has sampled version 1 before update 2.
    query = "SELECT DISTINCT step, policy_version AS v, weight FROM lineage ORDER BY ALL"
    found = [tuple(r.values()) for r in data_tools.open(one_after_the_other / "run").sql(query).to_pylist()]
    assert found == [(1, 0, 1.0), (2, 0, 0.5), (3, 0, 0.25), (3, 1, 0.5), (4, 1, 0.5), (4, 2, 1.0)]


MOMENTS = {
    "while the first batches are sampled": lambda: before(Journal, "add"),
    "before batches are committed": lambda: before(refresh_module._Refreshing, "collect", count=2),
}


def die_at(moment):
    MOMENTS[moment]()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_sampling_process_that_is_killed_is_named_and_the_loop_goes_on(
    world, one_after_the_other, tmp_path, processes, monkeypatch, moment
):
    config = side_by_side(world, tmp_path)
    monkeypatch.setattr(beside, "start", starter(processes, die_at, moment))
    with pytest.raises(RecError, match=r"beside the fit has ended \(SIGKILL\).*\n.*rec loop .* --resume"):
        loop(config)
    monkeypatch.setattr(beside, "start", starter(processes))
    loop(config, resume=True)
    assert_same(tmp_path, one_after_the_other)


def run_and_die(world: str, folder: str) -> None:
    start = beside.start

    def noted(channel, devices):
        process = start(channel, devices)
        (Path(folder) / "pid").write_text(str(process.pid))
        return process

    beside.start = noted
    before(fit_loop_module, "update", count=2)
    loop(side_by_side(world, folder))


def test_a_loop_that_is_killed_leaves_no_process_and_goes_on_in_either_way(
    world, one_after_the_other, tmp_path, processes
):
    process = processes.Process(target=run_and_die, args=(str(world), str(tmp_path)))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    session = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not in_session(session), 20)
    loop(side_by_side(world, tmp_path, side_by_side=False), resume=True)
    assert_same(tmp_path, one_after_the_other)


def test_what_goes_wrong_beside_is_told_as_if_it_went_wrong_here(world, tmp_path, processes, monkeypatch):
    monkeypatch.setattr(beside, "start", starter(processes))
    config = side_by_side(world, tmp_path, max_tokens=5000)
    with pytest.raises(DataError, match=r"more than the \d+ positions of the model\n.*lower max_tokens"):
        loop(config)
    assert not [p for p in multiprocessing.active_children() if p.is_alive() and os.getpid() != p.pid]
