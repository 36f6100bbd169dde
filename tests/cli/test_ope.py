"""`rec ope`: what it prints, and how it exits."""

import json

import pytest

from offline_rec.training.fit import fit
from tests.offline_rec.fitting import config, world


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = world(tmp_path_factory.mktemp("ope"), groups=60, holdout=0.5)
    fit(config(folder, steps=2, eval_every=None))
    return folder


def test_a_run_and_a_model_are_told_side_by_side(run, place):
    result = run("ope", place / "run", place / "m", "--data", place / "ds")
    assert result.exit_code == 0, result.output
    first, *lines = result.stdout.splitlines()
    assert first.startswith("128 responses to 32 prompts of split holdout; mean reward logged 0.250")
    told = result.stdout
    assert all(word in told for word in ("estimate", "95 % interval", "gain", "ESS", "verdict", "difference"))
    assert f"{place / 'm'}: no difference, the gain is negligible" in told
    assert lines[-1] == f"note: {place / 'm'} is no run: what it was trained on is unknown"


def test_facts_are_json_and_kept_in_the_run(run, place):
    result = run("ope", place / "run", "--data", place / "ds", "--seed", "3", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts == json.loads((place / "run" / "ope.json").read_text())
    [judged] = facts["policies"]
    assert judged["verdict"].keys() == {"word", "reason", "rule"}
    assert judged["value"].keys() == {"value", "low", "high"}
    assert {estimate["name"] for estimate in judged["estimates"] if estimate["bias"] is None} == {"dr", "is"}


def test_training_rows_are_wrong_usage_unless_forced(run, place):
    refused = run("ope", place / "run", "--data", place / "ds", "--split", "train")
    assert refused.exit_code == 2
    assert "error: " in refused.stderr
    assert "hint: judge it on the holdout of its dataset" in refused.stderr
    forced = run("ope", place / "run", "--data", place / "ds", "--split", "train", "--force")
    assert forced.exit_code == 0, forced.output
    assert f"warning: {place / 'run'} was trained on the prompts of" in forced.stdout


def test_wrong_usage_is_exit_code_2_and_no_model_1(run, place):
    assert run("ope", place / "run").exit_code == 2
    assert run("ope", "--data", place / "ds").exit_code == 2
    assert run("ope", place / "run", "--data", place / "ds", "--where", "nothing = 1").exit_code == 2
    missing = run("ope", place / "nowhere", "--data", place / "ds", "--where", "false")
    assert missing.exit_code == 1
    assert f"{place / 'nowhere'} does not exist" in missing.stderr  # before anything about the rows
