"""`rec collect`: what is read, what the result line counts, and that nothing half-written stays."""

import gzip
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def total(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["total"]


def test_the_result_line_counts_what_became_of_every_row(run, log, tmp_path):
    result = run("collect", log, "--into", tmp_path / "ds")
    assert result.exit_code == 0, result.output
    assert "40 read, 40 kept, 0 duplicate, 0 rejected" in result.stdout


def test_collecting_again_keeps_nothing(run, log, dataset):
    told = total(run("collect", log, "--into", dataset, "--json"))
    assert (told["read"], told["kept"], told["duplicate"]) == (40, 0, 40)


def test_stdin_and_a_compressed_copy_are_the_same_log(run, shell, log, dataset, tmp_path):
    copy = tmp_path / "copy.bin"
    copy.write_bytes(gzip.compress(log.read_bytes()))
    assert total(run("collect", copy, "--into", dataset, "--json"))["duplicate"] == 40
    piped = shell(f"rec collect - --into {dataset} --json < {log}")
    assert json.loads(piped.stdout)["total"]["duplicate"] == 40, piped.stderr


def test_rows_that_cannot_be_used_are_counted_and_kept_with_their_reason(run, log, tmp_path):
    log.write_text(log.read_text() + '{"prompt": "torn\n7\n{"prompt": "no answer"}\n')
    told = total(run("collect", log, "--into", tmp_path / "ds", "--json"))
    assert told["read"] == told["kept"] + told["duplicate"] + sum(told["rejected"].values()) == 43
    rejects = run("sql", tmp_path / "ds", "SELECT source_row FROM rejects ORDER BY ALL", "--format", "csv")
    assert rejects.stdout.split() == ["source_row", "41", "42", "43"]


def test_strict_writes_nothing_when_a_row_cannot_be_used(run, log, tmp_path):
    log.write_text(log.read_text() + "{torn\n")
    result = run("collect", log, "--into", tmp_path / "ds", "--strict")
    assert result.exit_code == 1
    assert "row 41" in result.stderr
    assert not list(tmp_path.glob("ds/rollouts/*"))


def test_a_dry_run_counts_and_writes_nothing(run, log, tmp_path):
    assert total(run("collect", log, "--into", tmp_path / "ds", "--dry-run", "--json"))["kept"] == 40
    assert not (tmp_path / "ds").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--reward", " "), "error: --reward is empty"),
        (("--select", ""), "error: the SQL is empty"),
        (("--select", "empty.sql"), "error: empty.sql is empty"),
        (("--policy-version", str(2**63)), "'--policy-version': 9223372036854775808"),
        (("--map", "reward=true) or (false"), "error: --map reward: syntax error"),
    ],
)
def test_a_value_that_says_nothing_or_too_much_is_wrong_usage(
    run, log, tmp_path, monkeypatch, given, message
):
    monkeypatch.chdir(tmp_path)
    Path("empty.sql").write_text(" \n")
    result = run("collect", log, "--into", "ds", *given)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not Path("ds").exists()


def test_sql_that_is_no_text_is_said_to_be_none(run, log, tmp_path):
    (tmp_path / "query.sql").write_bytes("SELECT 'é'".encode("utf-16"))
    result = run("collect", log, "--into", tmp_path / "ds", "--select", tmp_path / "query.sql")
    assert result.exit_code == 1
    assert "query.sql is not UTF-8 text" in result.stderr


def test_what_must_not_be_stored_is_kept_out(run, tmp_path):
    log = tmp_path / "log.jsonl"
    row = {"prompt": "I am jane@example.com", "response": "Hi", "user_id": 7, "meta": {"session": "s1"}}
    log.write_text(f"{json.dumps(row)}\n{json.dumps(row | {'response': 'x' * 100})}\n")
    options = ("--redact", "--hash-columns", "user_id, meta.session", "--max-response-chars", 50)
    result = run("collect", log, "--into", tmp_path / "ds", *options)
    assert result.exit_code == 0, result.output
    assert "2 replaced: 2 email" in result.stdout
    assert "1 rejected too_long (row 2)" in result.stdout
    assert "looked for e-mail addresses" in result.stdout
    query = "SELECT prompt, length(extra->>'user_id') FROM rollouts"
    assert run("sql", tmp_path / "ds", query, "--format", "csv").stdout.splitlines()[1] == "I am [EMAIL],32"
    misspelt = run("collect", log, "--into", tmp_path / "ds", "--hash-columns", "usr_id")
    assert misspelt.exit_code == 2
    assert "did you mean user_id?" in misspelt.stderr


def test_a_select_from_a_file_turns_a_line_into_several_rows(run, tmp_path):
    log = ROOT / "tests" / "cases" / "gsm8k_excerpt.jsonl"
    lines = len(log.read_text().splitlines())
    told = total(
        run("collect", log, "--into", tmp_path / "ds", "--select", ROOT / "docs" / "gsm8k.sql", "--json")
    )
    assert (told["input_rows"], told["kept"]) == (lines, 4 * lines)
    groups = run("sql", tmp_path / "ds", "SELECT count(*), min(n), max(n) FROM groups", "--format", "csv")
    assert groups.stdout.splitlines()[1] == f"{lines},4,4"


def test_map_names_columns_of_a_log_with_other_names(run, tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("frage,antwort,note\nx,y,7\n")
    result = run(
        *("collect", log, "--into", tmp_path / "ds", "--map", "prompt=frage", "--map", "response=antwort"),
        *("--map", "reward=note / 10"),
    )
    assert result.exit_code == 0, result.output
    rows = run("sql", tmp_path / "ds", "SELECT prompt, response, reward FROM rollouts", "--format", "csv")
    assert rows.stdout.splitlines()[1] == "x,y,0.7"


def test_policy_and_version_fill_what_the_log_does_not_say(run, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "a", "response": "b"}\n')
    run("collect", log, "--into", tmp_path / "ds", "--policy", "sampler", "--policy-version", 3)
    rows = run("sql", tmp_path / "ds", "SELECT policy, policy_version FROM rollouts", "--format", "csv")
    assert rows.stdout.splitlines()[1] == "sampler,3"


@pytest.mark.parametrize(
    ("content", "arguments", "code"),
    [
        (b"\x00\x01\x02" * 100, [], 1),
        (b'{"a": 1}\n', [], 1),
        (b'{"prompt": "a"}\n', ["--select", "SELECT nope FROM source"], 2),
        (b'{"prompt": "a"}\n', ["--select", "DROP TABLE source"], 2),
        (b'{"prompt": "a"}\n', ["--map", "prompt"], 2),
        (b'{"prompt": "a"}\n', ["--format", "jsonll"], 2),
    ],
)
def test_bad_input_is_an_error_in_a_few_lines_and_leaves_nothing(run, tmp_path, content, arguments, code):
    log = tmp_path / "log"
    log.write_bytes(content)
    result = run("collect", log, "--into", tmp_path / "ds", *arguments)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ")
    assert "unexpected" not in result.stderr
    assert not list(tmp_path.glob("ds/rollouts/*"))


def test_an_empty_file_is_skipped_by_name(run, tmp_path):
    (tmp_path / "log.jsonl").touch()
    result = run("collect", tmp_path / "log.jsonl", "--into", tmp_path / "ds")
    assert result.exit_code == 0
    assert "log.jsonl: the file is empty" in result.stdout


def test_a_source_that_is_not_there_is_named(run, tmp_path):
    result = run("collect", tmp_path / "none.jsonl", "--into", tmp_path / "ds")
    assert result.exit_code == 1
    assert "none.jsonl" in result.stderr
