"""`rec collect --reward`: a named reward, a field, SQL, a function, and what the result says of them."""

import json

import pytest


@pytest.fixture
def answered(tmp_path):
    path = tmp_path / "answered.jsonl"
    records = [
        {"prompt": "6*7", "response": "42", "answers": "42", "graded": "True"},
        {"prompt": "6*7", "response": "x", "answers": "42", "graded": 0},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "judge.py").write_text(
        "def number(responses):\n    return [float(r) / 42 for r in responses]\n"
    )
    return path


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("exact", ["1.0", "0.0"]),
        ("graded", ["1.0", "0.0"]),
        ("(response = extra->>'answers')::INT - 0.5", ["0.5", "-0.5"]),
        ("judge:number", ["1.0", ""]),
    ],
)
def test_every_kind_of_reward_judges_rows(run, answered, tmp_path, monkeypatch, reward, expected):
    monkeypatch.chdir(tmp_path)
    assert run("collect", answered, "--into", tmp_path / "ds", "--reward", reward).exit_code == 0
    query = "SELECT reward FROM rollouts ORDER BY source_row"
    shown = run("sql", tmp_path / "ds", query, "--format", "csv").stdout.splitlines()
    assert [line.strip('"') for line in shown[1:]] == expected


def test_the_result_names_the_first_failure_of_a_reward(run, answered, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = run("collect", answered, "--into", tmp_path / "ds", "--reward", "judge:number")
    assert "1 reward_failed (row 2)" in told.stdout
    assert "judge:number: ValueError: could not convert string to float: 'x'" in told.stdout


def test_a_reward_that_cannot_be_is_wrong_usage(run, answered, tmp_path):
    for reward in ("no_such_column + 1", "nowhere:function", "regex"):
        result = run("collect", answered, "--into", tmp_path / "ds", "--reward", reward)
        assert (result.exit_code, result.stdout) == (2, "")
    assert not (tmp_path / "ds").exists()
