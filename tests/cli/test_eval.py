"""`rec eval`: what it prints, keeps and refuses."""

import json

import pytest

from tests import tiny


@pytest.fixture
def asked(tmp_path):
    """A model, and a file of prompts with their answers."""
    tiny.save(tmp_path / "base")
    rows = [{"question": f"{n}+{n}=", "answer": f"so\n#### {2 * n}"} for n in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def arguments(folder, *more):
    prompts = ("--prompts", folder / "prompts.jsonl", "--max-tokens", 5)
    return ("eval", folder / "base", *prompts, *more)


def test_it_tells_a_line_a_policy_and_the_difference(run, asked):
    told = run(
        *arguments(asked, folder_model := asked / "base", "--reward", "regex(pattern='[a-m]')", "-n", 4)
    )
    assert told.exit_code == 0, told.output
    assert folder_model.name in told.stdout
    header, _, first, second, *rest = told.stdout.splitlines()
    assert header.split()[:4] == ["policy", "prompts", "samples", "accuracy"]
    assert first.split()[:3] == ["base", "6", "24"]
    assert second.split()[:3] == ["base-2", "6", "24"]
    assert any("difference" in line for line in rest)


def test_the_facts_are_json_and_the_samples_a_dataset(run, asked):
    told = run(
        *arguments(asked, "--reward", "0.5*math + 0.5*regex(pattern='[a-m]')", "--pass-at", "1,2", "-n", "2"),
        *("--log", asked / "ds", "--out", asked / "out", "--json", "--temperature", "0.7", "--seed", "5"),
    )
    assert told.exit_code == 0, told.output
    facts = json.loads(told.stdout)
    assert facts["asked"]["temperature"] == 0.7
    assert set(facts["policies"][0]["pass_at"]) == {"1", "2"}
    assert facts["collected"] == 12
    assert facts["kept"] == [str(asked / "out")]
    rows = run(
        "sql", asked / "ds", "SELECT count(*) AS n, max(temperature) AS t FROM rollouts", "--format", "json"
    )
    assert json.loads(rows.stdout) == [{"n": 12, "t": pytest.approx(0.7)}]
    again = run(
        "eval", asked / "base", "--data", asked / "ds", "--where", "true", "--reward", "math", "--json"
    )
    assert json.loads(again.stdout)["asked"]["prompts"] == 6


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--reward", "mth"), "unknown reward 'mth'"),
        (("--reward", "exact", "--pass-at", "x"), "no list of numbers"),
        (("--reward", "exact", "--pass-at", "2"), "pass@k needs k from 1"),
        (("--reward", "exact", "--where", "true"), "--where chooses rows of --data"),
        (("--reward", "exact", "--data", "ds"), "either --prompts FILE or --data"),
        (("--reward", " "), "--reward is empty"),
        (("--reward", "exact(column=gold)"), "needs a column 'gold'"),
    ],
)
def test_what_cannot_be_asked_is_wrong_usage(run, asked, more, message):
    told = run(*arguments(asked, *more))
    assert told.exit_code == 2, told.output
    assert message in told.stderr


def test_a_model_that_is_not_there_fails(run, asked):
    told = run("eval", asked / "none", "--prompts", asked / "prompts.jsonl", "--reward", "exact")
    assert told.exit_code == 1
    assert "none does not exist" in told.stderr
