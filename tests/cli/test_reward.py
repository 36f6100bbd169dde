"""`rec reward`: later rewards, from a file or by a rule."""

import json

import pytest


@pytest.fixture
def rewards(run, dataset):
    """The rewards of the dataset's rows, by their line in the log."""

    def read():
        query = "SELECT source_row, reward FROM rollouts ORDER BY source_row"
        return [row["reward"] for row in json.loads(run("sql", dataset, query, "--json").stdout)]

    return read


def test_a_file_gives_rewards_by_an_id_of_the_log(run, dataset, rewards, tmp_path):
    assert rewards()[4] is None
    file = tmp_path / "later.csv"
    file.write_text("answer,thumbs\n3,0.25\n2,\n99,1\n")
    told = run(
        *("reward", dataset, file, "--id", "answer", "--value", "thumbs"),
        *("--on", "CASE WHEN source_row = 5 THEN '3' WHEN source_row = 6 THEN '2' END", "--json"),
    )
    assert told.exit_code == 0, told.output
    report = json.loads(told.stdout)
    assert (report["read"], report["applied"], report["empty"], report["unknown"]) == (3, 1, 1, 1)
    assert rewards()[4] == 0.25


def test_a_value_that_is_no_number_is_told_with_its_row(run, dataset, tmp_path):
    file = tmp_path / "later.csv"
    file.write_text("answer,thumbs\n5,up\n6,1\n999,1\n")
    told = run(
        "reward", dataset, file, "--id", "answer", "--value", "thumbs", "--on", "source_row::VARCHAR"
    ).stdout
    assert told.splitlines() == [
        "3 read, 1 applied, 0 empty, 1 unknown, 1 unusable; 1 responses have a new reward",
        "  1 unknown (row 3): no response has this id",
        "  1 unusable (row 1): the value is no finite number, and not true or false",
    ]


def test_a_field_that_is_no_number_is_told_with_the_first_value(run, dataset):
    told = run("reward", dataset, "--reward", "tier").stdout.splitlines()
    assert told[0] == "40 judged: 0 rewards are new, 0 unchanged, 40 not judged"
    assert told[1].startswith("  40 reward_unreadable: the reward is no number")
    assert told[1].endswith("(the first is 'free')")


def test_a_file_comes_through_stdin(run, dataset, rewards, shell):
    ids = run("sql", dataset, "SELECT response_id FROM rollouts WHERE source_row = 5", "--format", "csv")
    line = ids.stdout.split()[1]
    result = shell(f"printf 'response_id,reward\\n{line},1\\n' | rec reward {dataset} -")
    assert result.returncode == 0, result.stderr
    assert rewards()[4] == 1


def test_a_rule_judges_rows_that_are_there(run, dataset, rewards):
    misspelt = run("reward", dataset, "--reward", "n_chars")
    assert misspelt.exit_code == 2, misspelt.output
    assert "error: --reward 'n_chars' is no reward" in misspelt.stderr
    told = run("reward", dataset, "--reward", "length(response) / 4", "--where", "reward IS NULL", "--json")
    assert json.loads(told.stdout)["rewarded"] == 8
    assert rewards()[4] == 0.25


def test_a_reward_by_name_judges_at_collect(run, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "1+1=", "response": "2", "answers": "2"}\n')
    result = run("collect", log, "--into", tmp_path / "ds", "--reward", "exact")
    assert result.exit_code == 0, result.output
    rows = run("sql", tmp_path / "ds", "SELECT reward FROM rollouts", "--format", "csv")
    assert rows.stdout == "reward\n1.0\n"


def test_either_a_file_or_a_rule_is_given(run, dataset, tmp_path):
    assert run("reward", dataset).exit_code == 2
    assert run("reward", dataset, tmp_path / "later.csv", "--reward", "1").exit_code == 2


def test_a_column_that_the_file_lacks_is_named(run, dataset, tmp_path):
    (tmp_path / "later.csv").write_text("id,thumbs\n1,1\n")
    result = run("reward", dataset, tmp_path / "later.csv")
    assert result.exit_code == 2
    assert "response_id" in result.stderr
