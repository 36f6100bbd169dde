"""A run killed at any moment goes on to the same weights, metrics and lineage; another run is refused."""

import errno
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest

from data_tools.errors import ConfigError, DataError, Interrupted
from offline_rec.training import checkpoint
from offline_rec.training import loop as loop_module
from offline_rec.training import run_data as run_data_module
from offline_rec.training.fit import fit
from offline_rec.training.lineage import LineageWriter
from offline_rec.training.metrics import MetricsLog
from offline_rec.training.run_folder import held
from tests.offline_rec import fitting
from tests.offline_rec.datasets import rollouts
from tests.offline_rec.fitting import Killed, config, furthest, killer, lineage, records, weights, world
from tests.offline_rec.logged import rows

SETTINGS = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def whole(folder):
    """A run that nothing interrupted."""
    return fit(config(folder, "whole", **SETTINGS))


def same(one: Path, other: Path) -> bool:
    return (
        furthest(weights(one), weights(other)) == 0
        and records(one) == records(other)
        and lineage(one) == lineage(other)
    )


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5])
def test_a_run_that_crashed_goes_on_to_the_same_end(folder, whole, step):
    changed = config(folder, f"crashed-{step}", **SETTINGS)
    with pytest.raises(Killed):
        fit(changed, progress=killer(step))
    done = fit(changed, resume=True)
    assert same(done.out, whole.out)
    assert done.best_step == whole.best_step


@pytest.mark.parametrize("step", [0, 1, 2, 3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_its_step_and_goes_on_to_the_same_end(folder, whole, step, number):
    changed = config(folder, f"interrupted-{step}-{number}", **SETTINGS)
    heard = []

    def interrupt(event):
        heard.append(event.get("text", ""))
        if event["event"] == "step" and event["step"] == step:
            os.kill(os.getpid(), number)

    handler = signal.getsignal(number)
    with pytest.raises(Interrupted, match=rf"after step {step} of 6\n.*--resume"):
        fit(changed, progress=interrupt)
    assert signal.getsignal(number) == handler
    assert any(text.startswith("stopping after this step") for text in heard)
    assert max([0, *checkpoint.steps(folder / changed.out / "checkpoints")]) == step
    done = fit(changed, resume=True)
    assert same(done.out, whole.out)
    assert done.best_step == whole.best_step


def before(place, name, *, count=1, act=lambda *_: None):
    """Replace a function by one that, at its n-th call, does `act` and dies as by kill -9."""
    original, calls = getattr(place, name), []

    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            act(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(place, name, dying)


def half_a_line(log, record):
    with log.path.open("a") as file:
        file.write('{"step": 4, "loss": 0.1')


MOMENTS = {
    "while the index is written": lambda: before(run_data_module, "build_index", count=2),
    "before the snapshot": lambda: before(run_data_module.Snapshot, "write"),
    "in the middle of an update": lambda: before(loop_module, "update", count=4),
    "in the middle of a line of metrics": lambda: before(MetricsLog, "append", count=5, act=half_a_line),
    "after metrics, before lineage": lambda: before(LineageWriter, "flush", count=2),
    "after lineage, before a checkpoint": lambda: before(checkpoint, "staging_folder", count=2),
    "in the middle of a checkpoint": lambda: before(checkpoint, "commit", count=2),
    "before old checkpoints go": lambda: before(checkpoint, "prune", count=3),
    "before the final model": lambda: before(shutil, "copytree"),
}


def run_and_die(folder: str, out: str, moment: str) -> None:
    MOMENTS[moment]()
    fit(config(Path(folder), out, **SETTINGS))


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    # The server imports torch once; every process is forked from it, with no thread running.
    context.set_forkserver_preload(["tests.offline_rec.test_fit_resume"])
    return context


@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_9_at_any_moment_changes_nothing_in_the_end(folder, whole, processes, moment):
    out = f"killed {moment}"
    process = processes.Process(target=run_and_die, args=(str(folder), out, moment))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    done = fit(config(folder, out, **SETTINGS), resume=True)
    assert same(done.out, whole.out)
    assert not [path.name for path in done.out.rglob("*") if path.name.startswith(".")]


def test_a_torn_checkpoint_is_skipped_with_a_note(folder, whole):
    changed = config(folder, "torn", **SETTINGS)
    with pytest.raises(Killed):
        fit(changed, progress=killer(5))
    file = folder / "torn" / "checkpoints" / "step-4" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    notes = []
    done = fit(changed, resume=True, progress=lambda event: notes.append(event.get("text", "")))
    assert any(text.startswith("checkpoint skipped, step-4: optimizer.safetensors") for text in notes)
    assert same(done.out, whole.out)


def test_a_finished_run_may_be_made_longer_where_the_rate_is_constant(folder):
    short = fit(config(folder, "longer", steps=3))
    longer = fit(config(folder, "longer", steps=6), resume=True)
    once = fit(config(folder, "at-once", steps=6))
    assert short.steps == 3
    assert furthest(weights(longer.out), weights(once.out)) == 0


def test_an_existing_directory_is_not_written_to(folder, whole):
    with pytest.raises(ConfigError, match=r"exists already\n.*--resume"):
        fit(config(folder, "whole", **SETTINGS))


def test_a_directory_without_a_run_is_not_resumed(folder):
    with pytest.raises(ConfigError, match="holds no run to resume"):
        fit(config(folder, "absent"), resume=True)
    assert not (folder / "absent").exists()


def test_a_resume_with_another_configuration_is_refused_by_field(folder, whole):
    with pytest.raises(ConfigError, match=r"lr: 0\.003 -> 0\.1"):
        fit(config(folder, "whole", **SETTINGS | {"lr": 0.1}), resume=True)


def test_two_processes_do_not_write_to_one_run(folder, whole):
    with held(whole.out), pytest.raises(ConfigError, match="another process is writing"):
        fit(config(folder, "whole", **SETTINGS), resume=True)
    assert fit(config(folder, "whole", **SETTINGS), resume=True).steps == whole.steps


@pytest.fixture
def interrupted(tmp_path):
    """A run that crashed, on a dataset of its own."""
    own = world(tmp_path)
    with pytest.raises(Killed):
        fit(config(own), progress=killer(3))
    return own


def test_a_resume_on_a_dataset_that_has_grown_is_refused_unless_told(interrupted):
    import data_tools

    whole = fit(config(interrupted, "whole"))
    with data_tools.open(str(interrupted / "ds")).writer() as writer:
        writer.rollouts(rollouts(rows(3, seed=9)))
        writer.commit()
    with pytest.raises(DataError, match=r"has grown since .*: 1 more files.*\n.*on_new_data=ignore"):
        fit(config(interrupted), resume=True)
    done = fit(config(interrupted, on_new_data="ignore"), resume=True)
    assert furthest(weights(done.out), weights(whole.out)) == 0


def test_a_resume_on_data_that_has_changed_is_refused_by_file(interrupted):
    file = min((interrupted / "ds" / "rollouts").iterdir())
    file.write_bytes(max((interrupted / "ds" / "rollouts").iterdir()).read_bytes())
    with pytest.raises(DataError, match=rf"rollouts/{file.name} is another or gone"):
        fit(config(interrupted, on_new_data="ignore"), resume=True)


def test_a_resume_before_the_first_checkpoint_needs_the_same_start(tmp_path):
    from tests import tiny

    own = world(tmp_path)
    with pytest.raises(Killed):
        fit(config(own), progress=killer(1))
    tiny.save(own / "m", seed=7)
    with pytest.raises(DataError, match="other weights than when the run began"):
        fit(config(own), resume=True)


def test_an_edited_snapshot_is_refused(interrupted):
    file = fitting.config(interrupted).out + "/snapshot.json"
    Path(file).write_text(Path(file).read_text().replace('"rows": ', '"rows": 1'))
    with pytest.raises(DataError, match="does not fit its own hash"):
        fit(config(interrupted), resume=True)


@pytest.mark.parametrize("place", ["shutil.copytree", "offline_rec.training.metrics.MetricsLog.append"])
def test_a_full_disk_is_said_to_be_one_and_the_run_goes_on_once_there_is_room(folder, monkeypatch, place):
    full = OSError(errno.ENOSPC, "No space left on device", "/a/file")
    copied = shutil.Error([("/from", "/a/file", str(full))])

    def fail(*_, **__):
        raise copied if place.startswith("shutil") else full

    out = f"full-{place}"
    with monkeypatch.context() as patched:
        patched.setattr(place, fail)
        with pytest.raises(DataError, match=r"could not write /a/file: No space left on device\n.*--resume"):
            fit(config(folder, out, steps=2, eval_every=None))
    assert fit(config(folder, out, steps=2, eval_every=None), resume=True).model_step == 2
