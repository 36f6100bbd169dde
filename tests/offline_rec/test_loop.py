"""`loop`: the regimes of the examples, exactly, by the lineage; and a kill in any phase changes nothing."""

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import data_tools
from data_tools.errors import ConfigError, DataError, Interrupted
from offline_rec.cards.write import card
from offline_rec.looping import loop as loop_module
from offline_rec.looping.config import LoopConfig
from offline_rec.looping.loop import loop
from offline_rec.looping.records import add_lineage
from offline_rec.models.policy import Policy
from offline_rec.sampling import refresh as refresh_module
from offline_rec.sampling.choose import open_sampler
from offline_rec.sampling.hf_sampler import HFSampler
from offline_rec.sampling.journal import Journal
from offline_rec.tracing.trace import trace
from offline_rec.training import checkpoint
from offline_rec.training import loop as fit_loop_module
from offline_rec.training import run_data as run_data_module
from tests.offline_rec import loops
from tests.offline_rec.fitting import furthest, records, weights
from tests.offline_rec.loops import ROWS, SIGNAL, example
from tests.offline_rec.test_fit_resume import before

LINEAGE = """SELECT step, list_sort(list(DISTINCT policy_version)) AS versions, count(*) AS rows
    FROM lineage GROUP BY step ORDER BY step"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return loops.world(tmp_path_factory.mktemp("world"))


REGIMES = {
    "on-policy": ("rounds=3", [0, 1, 2]),
    "interval-20": ("rounds=2", [0] * 20 + [1] * 20),
    "lag-10": ("rounds=13", [0] * 11 + [1, 2]),
    "offline": ("rounds=5", [0] * 5),
}


@pytest.mark.parametrize("name", REGIMES)
def test_the_lineage_of_each_example_matches_its_regime_exactly(name, world, tmp_path):
    rounds, expected = REGIMES[name]
    extra = ["fit.algorithm=raft"] if name == "offline" else SIGNAL  # the log here has no log-probs
    config = example(name, world, tmp_path, rounds, *extra)
    done = loop(config)
    run = data_tools.open(tmp_path / "run")
    found = run.sql(LINEAGE).to_pylist()
    assert [row["step"] for row in found] == list(range(1, len(expected) + 1))
    assert [row["versions"] for row in found] == [[version] for version in expected]
    assert done.steps == len(expected)
    recorded = run.sql("SELECT step, lr FROM metrics ORDER BY step").to_pylist()
    assert [row["step"] for row in recorded] == list(range(1, len(expected) + 1))
    falling = [3e-4 * (1 - i / len(expected)) for i in range(len(expected))]
    assert [row["lr"] for row in recorded] == pytest.approx(falling)
    if not config.offline:
        assert {row["rows"] for row in found} == {3 * 2}  # every batch once, and whole
        ds = data_tools.open(tmp_path / "ds")
        counted = "SELECT count(*) AS n, count(DISTINCT response_id) AS ids FROM rollouts"
        assert ds.sql(counted).to_pylist() == [{"n": 6 * len(expected), "ids": 6 * len(expected)}]
        batches = ds.sql(
            "SELECT DISTINCT extra->>'loop_step' AS b, policy_version AS v FROM rollouts"
        ).to_pylist()
        assert sorted((int(row["b"]), row["v"]) for row in batches) == list(enumerate(expected, 1))
    assert Policy.load(done.model).fingerprint() != Policy.load(world / "base").fingerprint()


@pytest.fixture(scope="module")
def on_policy(tmp_path_factory, world):
    """A loop of three rounds that keeps them all, and its dataset."""
    folder = tmp_path_factory.mktemp("on_policy")
    loop(example("on-policy", world, folder, "rounds=3", "keep_rounds=5", *SIGNAL))
    return folder


def test_a_loop_is_traced_over_its_rounds_and_its_card_tells_of_them(on_policy):
    run = on_policy / "run"
    found = trace(run, step=2)
    assert [(one["policy"], one["policy_version"], one["rows"]) for one in found.policies] == [
        ("policy", 1, 6)
    ]
    logged = data_tools.open(on_policy / "ds").sql("SELECT response_id, reward FROM rollouts").to_pylist()
    rewards = {row["response_id"]: row["reward"] for row in logged}
    assert all(row["advantage"] is not None for row in found.rows)
    assert sum(row["advantage"] for row in found.rows) == pytest.approx(0, abs=1e-12)
    row = trace(run, row=found.rows[0]["response_id"])
    assert (row.first_step, row.last_step, row.reward) == (2, 2, rewards[row.row])
    places = [Path(path).relative_to(run).parts for path in row.holding]
    assert {part[1][:6] for part in places if part[0] == "rounds"} == {"000002", "000003"}
    assert ("model",) in places
    text = (run / "model" / "README.md").read_text()
    assert "| updates | 3 |" in text
    assert "| steps per round | 1 |" in text
    assert [f"| policy | {v} | 6 | {v + 1} | {v + 1} |" in text for v in range(3)] == [True] * 3
    judged = text.replace("\\", "").split("## Rewards")[1]
    assert "| regex(pattern='(1|3|5|7|9)$') | 6 |" in judged  # the rows of the last round
    assert [one.text for one in card(run, write=False)] == [text]


def test_samples_of_a_version_are_from_the_weights_that_its_card_names(world, on_policy):
    tmp_path = on_policy
    versions = data_tools.open(tmp_path / "ds").policies()["policy"].model_extra["versions"]
    rounds = sorted((tmp_path / "run" / "rounds").iterdir())
    models = [world / "base", *(folder / "model" for folder in rounds[:-1])]
    found = [Policy.load(model).fingerprint() for model in models]
    assert [versions[str(v)]["weights"] for v in range(3)] == found
    assert len(set(found)) == 3
    # On-policy: the ratio to who sampled is 1 at every update.
    ratios = [record["ratio_mean"] for record in records(tmp_path / "run")]
    assert ratios == pytest.approx([1.0] * 3, abs=1e-5)


def test_who_sampled_is_noted_as_the_dataset_tells_it(on_policy, tmp_path):
    run, ds = on_policy / "run", data_tools.open(on_policy / "ds")
    for folder in sorted((run / "rounds").iterdir()):
        add_lineage(folder, tmp_path, ds, where=None)  # looked up row by row
    found = [pq.read_table(path / "lineage") for path in (tmp_path, run)]
    assert found[0].num_rows == 18
    assert found[0].equals(found[1])


def test_replayed_versions_are_trained_on_again_with_weights_of_their_age(world, tmp_path):
    config = example(
        "on-policy", world, tmp_path, "rounds=4", "replay=1", "replay_weight=staleness_halflife(1)", *SIGNAL
    )
    loop(config)
    query = """SELECT step, policy_version AS v, count(*) AS n, min(weight) AS low, max(weight) AS high
        FROM lineage GROUP BY ALL ORDER BY ALL"""
    found = [tuple(row.values()) for row in data_tools.open(tmp_path / "run").sql(query).to_pylist()]
    fresh = [(step, step - 1, 6, 1.0, 1.0) for step in range(1, 5)]
    replayed = [(step, step - 2, 6, 0.5, 0.5) for step in range(2, 5)]
    assert found == sorted(fresh + replayed)


MOMENTS = {
    "before the prompts are kept": lambda: before(loop_module, "write_task"),
    "while the first version is sampled": lambda: before(Journal, "add"),
    "while the second version is sampled": lambda: before(Journal, "add", count=4),
    "before a batch is committed": lambda: before(refresh_module._Refreshing, "collect", count=2),
    "between the batch and its journal": lambda: before(Journal, "remove", count=2),
    "between the journal and the state": lambda: before(loop_module, "write_state", count=4),
    "before the configuration of a fit": lambda: before(run_data_module, "begun", count=2),
    "while a fit is indexed": lambda: before(run_data_module, "build_index", count=2),
    "in the middle of a fit": lambda: before(fit_loop_module, "update", count=4),
    "in the middle of a checkpoint": lambda: before(checkpoint, "commit", count=2),
    "before the model of a fit": lambda: before(shutil, "copytree", count=2),
    "between records and state": lambda: before(loop_module, "write_state", count=5),
    "before old fits are cleaned up": lambda: before(shutil, "rmtree", count=20),
    "before the model of the loop": lambda: before(shutil, "copytree", count=4),
}


def killed_config(world: str, folder: str) -> LoopConfig:
    return example(
        "interval-20", Path(world), Path(folder), "rounds=3", "steps_per_round=2", "keep_rounds=1", *SIGNAL
    )


def run_and_die(world: str, folder: str, moment: str) -> None:
    refresh_module.TOGETHER = 2 * 2
    MOMENTS[moment]()
    loop(killed_config(world, folder))


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.offline_rec.test_loop"])
    return context


@pytest.fixture(scope="module")
def whole(tmp_path_factory, world):
    """A loop that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refresh_module, "TOGETHER", 2 * 2)
        loop(killed_config(str(world), str(folder)))
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_9_in_any_phase_changes_nothing_in_the_end(
    world, whole, tmp_path, processes, moment, monkeypatch
):
    process = processes.Process(target=run_and_die, args=(str(world), str(tmp_path), moment))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    monkeypatch.setattr(refresh_module, "TOGETHER", 2 * 2)
    config = killed_config(str(world), str(tmp_path))
    begun = (tmp_path / "run" / "state.json").exists()
    if not begun:
        with pytest.raises(ConfigError, match="no loop to resume"):
            loop(config, resume=True)
        shutil.rmtree(tmp_path / "run")
    done = loop(config, resume=begun)
    assert furthest(weights(tmp_path / "run"), weights(whole / "run")) == 0
    assert data_tools.open(tmp_path / "ds").sql(ROWS).equals(data_tools.open(whole / "ds").sql(ROWS))
    assert records(tmp_path / "run") == records(whole / "run")
    ours, theirs = (data_tools.open(f / "run").sql("FROM lineage ORDER BY ALL") for f in (tmp_path, whole))
    assert ours.equals(theirs)
    assert (done.steps, done.rows) == (6, 36)
    left = [p.name for p in tmp_path.rglob("*") if p.name.startswith(".") and p.name != ".commit.lock"]
    assert not left


def test_an_engine_that_serves_old_weights_ends_the_loop_before_a_row_of_theirs_is_added(
    world, whole, tmp_path, monkeypatch
):
    config = killed_config(str(world), str(tmp_path))
    monkeypatch.setattr(refresh_module, "TOGETHER", 2 * 2)
    with monkeypatch.context() as patch:
        old = lambda model, settings: open_sampler(world / "base", settings)  # noqa: E731
        patch.setattr(refresh_module, "open_sampler", old)
        with pytest.raises(DataError, match=r"not from the weights in .*000001-000002/model"):
            loop(config)
    versions = data_tools.open(tmp_path / "ds").sql("SELECT DISTINCT policy_version AS v FROM rollouts")
    assert versions["v"].to_pylist() == [0]
    loop(config, resume=True)
    assert furthest(weights(tmp_path / "run"), weights(whole / "run")) == 0
    assert data_tools.open(tmp_path / "ds").sql(ROWS).equals(data_tools.open(whole / "ds").sql(ROWS))


def test_a_sampler_that_is_kept_changes_nothing_and_one_that_keeps_its_weights_is_replaced(
    world, whole, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(refresh_module, "TOGETHER", 2 * 2)
    given = []
    original = HFSampler.update_weights

    def lies_at_first(sampler, directory):
        given.append(directory)
        if len(given) > 1:
            original(sampler, directory)

    monkeypatch.setattr(HFSampler, "update_weights", lies_at_first)
    opened = []
    monkeypatch.setattr(
        "offline_rec.sampling.kept.open_sampler",
        lambda model, settings: (opened.append(model), open_sampler(model, settings))[1],
    )
    config = killed_config(str(world), str(tmp_path))
    loop(config.model_copy(update={"keep_sampler": True}))
    assert furthest(weights(tmp_path / "run"), weights(whole / "run")) == 0
    assert data_tools.open(tmp_path / "ds").sql(ROWS).equals(data_tools.open(whole / "ds").sql(ROWS))
    rounds = [
        str(tmp_path / "run" / "rounds" / name / "model") for name in ("000001-000002", "000003-000004")
    ]
    assert given == rounds
    assert opened == [str(world / "base"), rounds[0]]
    assert "version 1: the responses are not from the weights in" in caplog.text


def test_a_loop_may_be_made_longer(world, tmp_path):
    short = example("on-policy", world, tmp_path, "rounds=2", "fit.schedule=constant", *SIGNAL)
    loop(short)
    longer = short.model_copy(update={"rounds": 3})
    done = loop(longer, resume=True)
    (tmp_path / "other").mkdir()
    once = example("on-policy", world, tmp_path / "other", "rounds=3", "fit.schedule=constant", *SIGNAL)
    assert furthest(weights(done.out), weights(loop(once).out)) == 0
    with pytest.raises(ConfigError, match=r"n: 2 -> 3"):
        loop(longer.model_copy(update={"n": 3}), resume=True)
    with pytest.raises(ConfigError, match=r"exists already\n.*--resume"):
        loop(longer)


def test_an_interrupted_loop_says_how_it_is_resumed(world, tmp_path):
    config = killed_config(str(world), str(tmp_path))

    def interrupt(event):
        if event["event"] == "step" and event["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match=r"\n.*rec loop .*config\.yaml --resume"):
        loop(config, progress=interrupt)
    assert loop(config, resume=True).steps == 6


def test_a_guard_ends_the_loop_with_the_weights_before_the_drift(world, tmp_path):
    # In the second round the first update is on-policy, the second one no more.
    config = example(
        "interval-20",
        world,
        tmp_path,
        "rounds=2",
        "steps_per_round=2",
        "fit.max_kl=1e-9",
        "fit.lr=0.01",
        *SIGNAL,
    )
    done = loop(config)
    assert "kl" in done.stopped
    assert done.steps < 4
    assert Policy.load(done.model).fingerprint()


def test_what_cannot_be_looped_is_refused_before_anything_is_sampled(world, tmp_path):
    with pytest.raises(ConfigError, match=r"fit\.steps is set by the loop"):
        example("on-policy", world, tmp_path, "fit.steps=3")
    with pytest.raises(ConfigError, match="offline samples nothing"):
        example("offline", world, tmp_path, "lag=3")
    with pytest.raises(ConfigError, match="did you mean 'rounds'"):
        example("on-policy", world, tmp_path, "round=3")
    with pytest.raises(ConfigError, match="holds prompts out of training"):
        loop(example("on-policy", world, tmp_path, f"dataset={world / 'dataset'}"))
    with pytest.raises(ConfigError, match="rows of the policy 'base' already"):
        loop(
            example(
                "on-policy", world, tmp_path, f"dataset={world / 'dataset'}", "prompts=null", "policy=base"
            )
        )
    with pytest.raises(ConfigError, match=r"sampler: .*unexpected keyword"):
        loop(example("on-policy", world, tmp_path / "a", "sampler.nothing=1"))
    with pytest.raises(ConfigError, match=r"asks no server"):
        loop(example("on-policy", world, tmp_path / "c", "sampler.urls=[http://127.0.0.1:1]"))
    with pytest.raises(DataError, match="no prompts"):
        loop(example("on-policy", world, tmp_path / "b", "where=false"))
    with pytest.raises(
        ConfigError, match="side_by_side has nothing to do: the loop trains on a batch as soon"
    ):
        example("on-policy", world, tmp_path, "side_by_side=true")
    with pytest.raises(ConfigError, match="side_by_side has nothing to do: the loop samples nothing"):
        example("offline", world, tmp_path, "side_by_side=true")
    with pytest.raises(ConfigError, match="sampler_devices are those of side_by_side"):
        example("lag-10", world, tmp_path, "sampler_devices=1")
