"""`rec refresh` and `rec loop`: what they are told and what they say."""

import json

import pytest
import yaml

from tests.tiny import save

SAMPLING = ("--n", "2", "--max-tokens", "4", "--reward", "contains", "--column", "answers=extra->>'tier'")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "tiny")


def test_a_refresh_tells_what_was_added_and_that_it_was_verified(run, dataset, model):
    result = run("refresh", dataset, "--model", model, *SAMPLING)
    assert result.exit_code == 0, result.output
    assert "tiny version 0: 20 responses to 10 prompts, 20 kept, 0 duplicate, 0 rejected" in result.stdout
    assert "verified: log-probs of 8 responses differ by" in result.stdout
    told = json.loads(run("refresh", dataset, "--model", model, *SAMPLING, "--json").stdout)
    assert (told["version"], told["kept"], told["unjudged"]) == (1, 20, 0)


def test_the_planner_shows_its_statement_and_scores_and_samples_nothing(run, dataset, model):
    result = run("refresh", dataset, "--model", model, "--explain")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("WITH rated AS")
    assert "'0 + 1 ='" in result.stdout
    told = run("refresh", dataset, "--model", model, "--budget", "8", "--n", "4", "--explain", "--json")
    planned = json.loads(told.stdout)
    assert len(planned["prompts"]) == 2
    again = run(
        "sql",
        dataset,
        planned["statement"].replace("scores s", "(SELECT NULL::VARCHAR response_id, 1.0 logprob) s"),
        "--json",
    )
    assert [row["prompt_hash"] for row in json.loads(again.stdout)][:2] == [
        row["prompt_hash"] for row in planned["prompts"]
    ]
    rows = run("sql", dataset, "SELECT count(*) AS n FROM rollouts", "--json")
    assert json.loads(rows.stdout) == [{"n": 40}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "no unfinished refresh of tiny"),
        (["--score", "n"], "--score says what --budget is spent on"),
        (["--column", "answers"], "--column"),
        (["--engine", "abacus"], "abacus"),
        (["--reward", "exactly"], "did you mean 'exact'"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_a_wrong_refresh_is_wrong_usage(run, dataset, model, arguments, message):
    result = run("refresh", dataset, "--model", model, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


@pytest.fixture
def file(tmp_path, model):
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("prompt,answers\n1+1=,2\n2+2=,4\n3+3=,6\n")
    path = tmp_path / "loop.yaml"
    values = {
        "model": str(model),
        "dataset": str(tmp_path / "ds"),
        "out": str(tmp_path / "out"),
        "prompts": str(prompts),
        "reward": "regex",
        "reward_options": {"pattern": "[a-m]"},
        "rounds": 2,
        "n": 2,
        "max_tokens": 4,
        "fit": {"groups_per_step": 2, "device": "cpu"},
    }
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_loop_runs_from_its_file_and_goes_on_from_its_directory(run, file, tmp_path):
    told = run("loop", file, "--json")
    assert told.exit_code == 0, told.output
    facts = json.loads(told.stdout)
    assert (facts["steps"], facts["versions"], facts["rows"]) == (2, 2, 8)
    assert run("loop", file).exit_code == 2
    longer = run("loop", tmp_path / "out" / "config.yaml", "--resume", "--set", "rounds=3")
    assert "after 3 updates, on 12 responses of 3 versions" in longer.stdout
    query = "SELECT step, policy_version AS v, count(*) AS n FROM lineage GROUP BY ALL ORDER BY ALL"
    found = json.loads(run("sql", tmp_path / "out", query, "--json").stdout)
    assert found == [{"step": v + 1, "v": v, "n": 4} for v in range(3)]


def test_set_reaches_the_loop_its_fit_and_what_is_below(run, file):
    changes = [
        "lag=3",
        "fit.lr=1e-4",
        "fit.objective.epsilon_low=0.5",
        "fit.where=reward >= 0",
        "columns=null",
    ]
    arguments = [argument for change in changes for argument in ("--set", change)]
    shown = yaml.safe_load(run("loop", file, *arguments, "--print-config").stdout)
    assert (shown["lag"], shown["fit"]["lr"], shown["fit"]["where"]) == (3, 1e-4, "reward >= 0")
    assert shown["fit"]["objective"] == {"epsilon_low": 0.5}
    assert shown["fit"]["groups_per_step"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("round=3", "did you mean 'rounds'"),
        ("fit.lrr=3", "did you mean 'lr'"),
        ("fit.steps=3", "fit.steps is set by the loop"),
        ("fit.algorithm=grpoo", "grpo"),
        ("rounds=0", "rounds"),
        ("reward=null", "reward is missing"),
        ("n", "KEY=VALUE"),
    ],
)
def test_a_wrong_loop_is_wrong_usage_and_names_the_key(run, file, change, message):
    result = run("loop", file, "--set", change)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
