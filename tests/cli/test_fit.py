"""`rec fit`, `rec score`: flags become the configuration, refusals come before training, results are told."""

import json

import pytest
import yaml

from tests.tiny import save


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


def config(result):
    assert result.exit_code == 0, result.output
    return yaml.safe_load(result.stdout)


def test_flags_stand_above_set_and_set_above_the_file(run, tmp_path):
    file = tmp_path / "fit.yaml"
    file.write_text("dataset: ds\nmodel: m\nout: run\nlr: 1\nsteps: 1\nseed: 1\n")
    shown = config(
        run("fit", "--config", file, "--set", "lr=2", "--set", "steps=2", "--steps", "3", "--print-config")
    )
    assert (shown["seed"], shown["lr"], shown["steps"], shown["dataset"]) == (1, 2, 3, "ds")


def test_sql_in_a_flag_is_taken_as_it_stands(run):
    where = "extra->>'tier' = 'gold' and policy_version >= 3"
    shown = config(run("fit", "ds", "--model", "m", "--out", "r", "--where", where, "--print-config"))
    assert shown["where"] == where


def test_null_takes_a_default_away(run):
    shown = config(run("fit", "ds", "--model", "m", "--out", "r", "--eval-every", "null", "--print-config"))
    assert shown["eval_every"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "many"], "steps"),
        (["--anchor", "nowhere"], "anchor"),
        (["--set", "learning_rate=1"], "learning_rate"),
        (["--set", "lr"], "KEY=VALUE"),
        (["--algorithm", "grpoo"], "grpo"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--steps", "1", "--epochs", "1"], "epochs"),
    ],
)
def test_a_wrong_value_is_wrong_usage_and_names_the_key(run, dataset, arguments, message):
    result = run("fit", dataset, "--model", "m", "--out", "r", *arguments, "--explain")
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_missing_model_is_wrong_usage(run, dataset):
    result = run("fit", dataset, "--out", "r")
    assert result.exit_code == 2
    assert "model" in result.stderr


def test_explain_shows_the_statement_and_what_it_keeps(run, dataset):
    result = run("fit", dataset, "--model", "m", "--out", "r", "--algorithm", "asymre", "--explain")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("WITH") == 1
    assert "rows kept" in result.stdout


def test_explain_as_json_holds_the_weight_by_policy(run, dataset):
    weight = ("--weight", "red_weight(1)")
    result = run("fit", dataset, "--model", "m", "--out", "r", "--explain", "--json", *weight)
    mass = json.loads(result.stdout)["shaping"]["mass"]
    assert {row["policy"] for row in mass} <= {"old", "new"}


def test_an_algorithm_that_needs_logprobs_stops_before_training(run, dataset, model, tmp_path):
    result = run("fit", dataset, "--model", model, "--out", tmp_path / "run", "--algorithm", "grpo")
    assert result.exit_code == 1
    assert "32 of 32 rows have no log-probs" in result.stderr
    assert all(way in result.stderr for way in ("rec score", "--anchor start", "--where"))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_fit_writes_a_model_and_metrics_that_sql_reads(run, dataset, model, tmp_path):
    out = tmp_path / "run"
    result = run(
        *("fit", dataset, "--model", model, "--out", out, "--algorithm", "asymre", "--steps", 2),
        *("--groups-per-step", 2, "--lr", "1e-4", "--json"),
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["steps"], told["stopped"]) == (2, None)
    assert (out / "model" / "config.json").exists()
    metrics = run("sql", out, "SELECT step FROM metrics WHERE step > 0 ORDER BY step", "--format", "csv")
    assert metrics.stdout == "step\n1\n2\n"


def test_a_resume_needs_only_the_run(run, dataset, model, tmp_path):
    out = tmp_path / "run"
    settings = ("--algorithm", "asymre", "--groups-per-step", 2, "--lr", "1e-4", "--where", "reward >= 0")
    made = run("fit", dataset, "--model", model, "--out", out, *settings, "--steps", 1)
    assert made.exit_code == 0, made.output
    result = run("fit", "--out", out, "--resume", "--steps", 2, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 2
    absent = run("fit", "--out", tmp_path / "absent", "--resume")
    assert absent.exit_code == 2
    assert "absent holds no run to resume" in absent.stderr
    refused = run("fit", "--out", out, "--resume", "--lr", "1e-3")
    assert refused.exit_code == 2
    assert "lr: 0.0001 -> 0.001" in refused.stderr


def test_help_tells_the_defaults_of_the_configuration(run):
    told = " ".join(run("fit", "--help").stdout.split())
    assert "[default: rec-oneside-nois]" in told
    assert "--lr X Peak learning rate of AdamW. [default: 1e-06]" in told


def test_score_counts_rows_and_keeps_them(run, dataset, model):
    first = run("score", dataset, "--model", model, "--json")
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["scored"] == 40
    assert json.loads(run("score", dataset, "--model", model, "--json").stdout)["kept"] == 40


def test_a_directory_without_a_model_fails_in_two_lines(run, dataset, tmp_path):
    result = run("score", dataset, "--model", tmp_path)
    assert result.exit_code in (1, 2)
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) <= 2
