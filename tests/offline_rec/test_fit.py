"""The whole fit: it learns, whatever way the work is cut; and what it writes."""

import json

import numpy as np
import pytest
import torch
import yaml

import data_tools
from offline_rec.data.rows import RowStore
from offline_rec.models.policy import Policy
from offline_rec.objectives.objective import objective
from offline_rec.training.fit import fit
from tests import tiny
from tests.offline_rec.fitting import config, furthest, lineage, records, weights, world
from tests.offline_rec.logged import dataset, rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def result(folder):
    return fit(config(folder))


def mean_logprob(folder, model, reward):
    """Mean log-prob of the responses with that reward, by a model directory."""
    ds = data_tools.open(str(folder / "ds"))
    chosen = ds.sql(f"SELECT file, file_row FROM rollouts WHERE reward = {reward} AND split = 'train'")
    taken = RowStore(ds).take(chosen["file"].to_pylist(), chosen["file_row"].to_numpy())
    with torch.no_grad():
        return float(Policy.load(model, device="cpu").logprobs(taken).sum() / len(taken))


@pytest.mark.parametrize("algorithm", ["raft", "rec-oneside-nois", "red-weight"])
def test_good_responses_become_likelier(folder, algorithm):
    # The step is small enough for the clip of the second algorithm to leave most tokens alone.
    done = fit(
        config(folder, algorithm, algorithm=algorithm, steps=12, lr=1e-3, groups_per_step=9, eval_every=None)
    )
    gained = {
        reward: mean_logprob(folder, done.model, reward) - mean_logprob(folder, folder / "m", reward)
        for reward in (0, 1)
    }
    assert gained[1] > 1
    assert gained[1] > gained[0] + 1


def test_the_run_directory_holds_what_a_reader_needs(folder, result):
    names = {path.name for path in result.out.iterdir()}
    assert names == {
        "checkpoints",
        "config.yaml",
        "index",
        "lineage",
        "metrics.jsonl",
        "model",
        "snapshot.json",
    }
    assert yaml.safe_load((result.out / "config.yaml").read_text())["lr"] == 3e-3
    snapshot = json.loads((result.out / "snapshot.json").read_text())
    assert [file["name"].split("/")[0] for file in snapshot["files"]] == ["rollouts", "rollouts"]
    assert all(file["bytes"] > 0 and len(file["footer"]) == 64 for file in snapshot["files"])
    assert snapshot["rows"] == result.rows == 4 * result.groups
    assert "FROM rollouts" in snapshot["sql"]
    assert {"hash", "now", "split", "left_out", "model"} <= snapshot.keys()


def test_metrics_hold_a_record_a_step_with_held_out_ones_in_between(result):
    made = records(result.out)
    assert [record["step"] for record in made] == list(range(7))
    assert [record["step"] for record in made if "heldout" in record] == [0, 2, 3, 4, 6]
    assert {"loss", "lr", "grad_norm", "epoch", "kept_share", "ratio_mean", "kl_k3", "ess_response"} <= made[
        3
    ].keys()
    assert {"logprob", "reward_weighted_logprob", "kl", "ess", "value", "value_logged"} <= made[3][
        "heldout"
    ].keys()
    assert made[1]["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert made[0]["heldout"]["kl"] == pytest.approx(0, abs=1e-6)


def test_the_model_is_a_plain_directory_that_transformers_opens(result):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(result.model)
    assert AutoTokenizer.from_pretrained(result.model)("1+1=")["input_ids"]
    assert model.num_parameters() > 0
    assert "rec-oneside-nois" in (result.model / "README.md").read_text()


def test_lineage_names_the_rows_of_every_step(result):
    made = lineage(result.out)
    steps = [record for record in records(result.out) if record["step"]]
    assert len(made) == sum(record["rows"] for record in steps)
    for record in steps:
        shares = [row[4] for row in made if row[0] == record["step"]]
        assert np.mean(shares) == pytest.approx(record["kept_share"], abs=0.2)
    assert {row[2] for row in made} == {1.0}
    assert all(row[3] > 0 for row in made)


@pytest.mark.parametrize(
    "algorithm", ["rec-oneside-is", "grpo", "opmd-pairwise", "m2po", "red-weight-adaptive"]
)
def test_the_size_of_micro_batches_changes_nothing(folder, algorithm):
    # One algorithm a scope at least: token, sequence mean, group, step.
    small = fit(config(folder, f"{algorithm}-1", algorithm=algorithm, tokens_per_micro_batch=20, lr=1e-4))
    large = fit(config(folder, f"{algorithm}-2", algorithm=algorithm, tokens_per_micro_batch=10_000, lr=1e-4))
    # A tenth of a step: where a gradient is almost 0, Adam makes a step of its rounding.
    assert furthest(weights(small.out), weights(large.out)) < 1e-5
    for one, other in zip(records(small.out)[1:], records(large.out)[1:], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_epochs_visit_every_group_as_often(folder):
    done = fit(config(folder, "epochs", steps=None, epochs=2, groups_per_step=5, algorithm="asymre"))
    visits = {}
    for _, name, *_ in lineage(done.out):
        visits[name] = visits.get(name, 0) + 1
    assert set(visits.values()) == {2}
    assert len(visits) == done.rows
    assert records(done.out)[-1]["epoch"] == 2


def test_priority_visits_only_what_has_some(folder):
    done = fit(
        config(
            folder, "priority", priority="CASE WHEN group_key < 'g5' THEN 1 ELSE 0 END", epochs=1, steps=None
        )
    )
    assert {name.split("-")[0] < "r5" for _, name, *_ in lineage(done.out)} == {True}


def test_bfloat16_trains_and_saves_in_its_type(folder):
    done = fit(config(folder, "bf16", dtype="bfloat16", steps=2))
    assert {str(tensor.dtype) for tensor in weights(done.out).values()} == {"torch.bfloat16"}


def test_the_objective_takes_its_parameters_from_the_configuration(folder):
    wide = fit(config(folder, "wide", objective={"epsilon_low": 0.6, "epsilon_high": 2.0}))
    assert records(wide.out)[3]["kept_share"] > records(fit(config(folder, "narrow")).out)[3]["kept_share"]
    assert objective("rec-oneside-nois").composition.parameters["epsilon_low"] == 0.2


def test_progress_is_told_and_nothing_is_printed(tmp_path, capfd):
    events = []
    world(tmp_path, columns={"top_p": 0.9, "logprob_kind": "unknown"})
    capfd.readouterr()
    fit(config(tmp_path, steps=2), progress=events.append)
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [0, 1, 2]
    assert {event["total"] for event in steps} == {2}
    assert {"tokens_per_second", "seconds"} <= steps[-1]["timing"].keys()
    notes = " ".join(event["text"] for event in events if event["event"] == "note")
    assert "rows have log-probs of unknown kind, read as raw (policies: tiny): `rec check`" in notes
    assert "were sampled with top-p or top-k (policies: tiny)" in notes
    assert capfd.readouterr() == ("", "")


def test_rows_that_cannot_be_trained_on_are_left_out_by_reason(tmp_path):
    made = rows(12)
    for row in made:
        if row["response_id"].endswith("-1"):
            row["temperature"] = 0.0
        if row["response_id"].endswith("-2"):
            row["response_ids"] = row["response_ids"][:1] * 40
            row["response"] = row["response"][:1] * 40
            row["behavior_logprobs"] = [-1.0] * 40
    tiny.save(tmp_path / "m")
    dataset(tmp_path / "ds", made)
    weight = "CASE WHEN response_id LIKE '%-3' THEN 0 ELSE 1 END"
    done = fit(config(tmp_path, weight=weight, max_tokens=30, steps=2))
    assert done.left_out == {"zero_weight": done.rows, "too_long": done.rows, "temperature_0": done.rows}
    assert {name[-2:] for _, name, *_ in lineage(done.out)} == {"-0"}
