"""Trackers: told all that a run measures, and never able to end it."""

import sys
import types

import pytest

from cli.main import rec
from data_tools.errors import ConfigError, MissingExtra
from offline_rec.config import FitConfig
from offline_rec.training import trackers
from offline_rec.training.fit import fit
from offline_rec.training.metrics import read_metrics
from offline_rec.training.trackers import numbers
from tests.offline_rec.fitting import Killed, config, killer, records, world
from tests.offline_rec.team import run_team


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return world(tmp_path_factory.mktemp("world"))


class Calls(list):
    """What a fake module was asked, in order."""

    def of(self, name):
        return [call for call in self if call[0] == name]


def fake_wandb(calls):
    class Run:
        def __init__(self, id):
            self.id = id or "w1"

        def log(self, data, step=None, commit=None):
            calls.append(("log", data, step))

        def finish(self, exit_code=None):
            calls.append(("finish",))

    def init(*, project=None, dir=None, id=None, name=None, config=None, resume=None):
        calls.append(("init", {"project": project, "id": id, "name": name, "resume": resume}))
        assert config["algorithm"] == "rec-oneside-nois"
        return Run(id)

    return {"init": init}


def fake_mlflow(calls):
    def start_run(run_id=None, experiment_id=None, run_name=None):
        calls.append(("init", {"id": run_id, "name": run_name}))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "m1"))

    def log_metrics(metrics, step=None, synchronous=None, run_id=None):
        assert run_id == "m1"
        calls.append(("log", metrics, step))

    return {
        "start_run": start_run,
        "log_metrics": log_metrics,
        "set_experiment": lambda experiment_name: calls.append(("experiment", experiment_name)),
        "log_params": lambda params: calls.append(("params", params)),
        "end_run": lambda status="FINISHED": calls.append(("finish",)),
    }


def fake_trackio(calls):
    class Run:
        def log(self, metrics, step=None):
            calls.append(("log", metrics, step))

        def finish(self):
            calls.append(("finish",))

    def init(project, name=None, *, config=None, resume="never"):
        print("* Trackio project initialized: offline-rec")
        calls.append(("init", {"id": name, "resume": resume}))
        return Run()

    return {"init": init}


FAKES = {"wandb": fake_wandb, "mlflow": fake_mlflow, "trackio": fake_trackio}


@pytest.fixture
def installed(monkeypatch):
    """Puts a fake module of that name in place; returns the calls that it gets."""

    def install(name, **changes):
        calls = Calls()
        module = types.ModuleType(name)
        vars(module).update(FAKES[name](calls) | changes)
        monkeypatch.setitem(sys.modules, name, module)
        real = trackers.find_spec
        monkeypatch.setattr(trackers, "find_spec", lambda package: package == name or real(package))
        return calls

    return install


@pytest.mark.parametrize("name", FAKES)
def test_a_tracker_gets_every_number_of_every_step(folder, installed, name, capsys):
    calls = installed(name)
    done = fit(config(folder, f"told-{name}", trackers=(name,)))
    kept = read_metrics(done.out)
    assert [call[2] for call in calls.of("log")] == [record["step"] for record in kept]
    for (_, told, _), record in zip(calls.of("log"), kept, strict=True):
        assert told == numbers(record)
    assert "heldout/value" in calls.of("log")[0][1]
    assert calls.of("log")[1][1]["loss"] == kept[1]["loss"]
    assert [call[0] for call in calls].count("finish") == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", FAKES)
def test_a_resume_goes_on_with_the_run_of_the_tracker(folder, installed, name):
    calls = installed(name)
    changed = config(folder, f"resumed-{name}", trackers=(name,))
    with pytest.raises(Killed):
        fit(changed, progress=killer(3))
    fit(changed, resume=True)
    first, second = (call[1] for call in calls.of("init"))
    known = {"wandb": "w1", "mlflow": "m1"}.get(name, first["id"])
    assert second["id"] == known
    assert len(calls.of("finish")) == 2
    assert [call[2] for call in calls.of("log")] == [0, 1, 2, 3, 3, 4, 5, 6]
    assert len(calls.of("params")) == (name == "mlflow"), "parameters of a run are logged once"


@pytest.mark.parametrize("moment", ["open", "log", "close"])
def test_a_tracker_that_fails_is_left_out_with_one_note(folder, installed, moment):
    def fail(*_, **__):
        raise ConnectionError("the server is gone\nand more")

    broken = {"open": {"start_run": fail}, "log": {"log_metrics": fail}, "close": {"end_run": fail}}
    installed("mlflow", **broken[moment])
    notes = []
    changed = config(folder, f"failed-{moment}", trackers=("mlflow",))
    done = fit(changed, progress=lambda event: notes.append(event.get("text")))
    said = [text for text in notes if text and "mlflow" in text]
    assert said == ["tracker mlflow failed and is left out: the server is gone; metrics.jsonl has everything"]
    plain = fit(config(folder, f"plain-{moment}", trackers=()))
    assert records(done.out) == records(plain.out)


def test_only_rank_0_has_trackers(folder, installed):
    calls = installed("wandb")
    many = config(folder, "ranks", trackers=("wandb",))
    run_team(2, lambda engine: fit(many, engine=engine))
    assert len(calls.of("init")) == 1
    assert len(calls.of("log")) == 7


def test_a_missing_tracker_names_the_extra_and_leaves_nothing_behind(folder, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(MissingExtra, match=r"wandb is not installed\n.*offline-rec\[trackers\]"):
        fit(config(folder, "missing", trackers=("wandb",)))
    assert not (folder / "missing").exists()


def test_an_unknown_tracker_is_refused(folder):
    with pytest.raises(ConfigError, match="unknown tracker 'comet'\nknown: tensorboard, wandb"):
        fit(config(folder, "unknown", trackers=("comet",)))


def test_without_a_word_tensorboard_is_used_where_it_is_installed(monkeypatch):
    plain = FitConfig(dataset="d", model="m", out="o")
    for there, expected in ((True, ["tensorboard"]), (False, [])):
        monkeypatch.setattr(trackers, "find_spec", lambda package, there=there: there or None)
        assert trackers.chosen(plain) == expected


def test_the_flag_may_be_repeated():
    from click.testing import CliRunner

    line = ["fit", "d", "--model", "m", "--out", "o", "--tracker", "wandb", "--tracker", "mlflow"]
    result = CliRunner().invoke(rec, [*line, "--print-config"])
    assert "trackers:\n- wandb\n- mlflow\n" in result.stdout


def test_tensorboard_files_hold_the_steps_once_after_a_resume(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changed = config(folder, "board", trackers=("tensorboard",))
    with pytest.raises(Killed):
        fit(changed, progress=killer(3))
    done = fit(changed, resume=True)
    read = EventAccumulator(str(done.out / "tensorboard")).Reload()
    seen = [(event.step, event.value) for event in read.Scalars("loss")]
    kept = [(record["step"], record["loss"]) for record in read_metrics(done.out) if "loss" in record]
    assert seen == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in kept]
