"""`rec check`: what it prints, and how it exits."""

import json
import shlex

import pytest

from tests import tiny
from tests.offline_rec import logged


def test_a_log_of_texts_gets_warnings_and_exit_code_0(run, dataset):
    result = run("check", dataset)
    assert result.exit_code == 0, result.output
    assert "warning missing_finish_reason: 40 of 40 rows" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("verdict: can be used, if")


def test_an_error_is_exit_code_1_and_says_what_to_do(run, tmp_path):
    log = tmp_path / "log.jsonl"
    row = {"prompt": "1+1=", "response": "2222", "response_ids": [7] * 4, "behavior_logprobs": [0.0] * 4}
    log.write_text(json.dumps(row) + "\n")
    run("collect", log, "--into", tmp_path / "ds")
    result = run("check", tmp_path / "ds")
    assert result.exit_code == 1
    assert "error zero_filled: 1 of 1 sampled rows" in result.stdout
    assert "  fix: rec collect LOGS --into NEW --select" in result.stdout
    told = run("check", tmp_path / "ds", "--json")
    facts = json.loads(told.stdout)
    assert told.exit_code == 1
    assert facts["counts"]["error"] == 1
    [finding] = [finding for finding in facts["findings"] if finding["code"] == "zero_filled"]
    assert finding.keys() == {
        *("code", "severity", "what", "count", "of", "unit", "rows", "fix", "detail"),
    }


def test_a_model_adds_what_it_knows(run, dataset, tmp_path):
    result = run("check", dataset, "--model", tiny.save(tmp_path / "model"), "--sample", "8", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["rows"], facts["sampled"], facts["logprobs"]) == (40, 8, [])
    assert facts["model"] == str(tmp_path / "model")


def fixed(run, folder, code, *options):
    """The findings of a log, and those after the fix of one of them."""
    run("collect", folder / "log.jsonl", "--into", folder / "ds")
    found = json.loads(run("check", folder / "ds", "--json", *options).stdout)["findings"]
    [fix] = [finding["fix"] for finding in found if finding["code"] == code]
    places = {"LOGS": folder / "log.jsonl", "NEW": folder / "new"}
    done = run(*(places.get(word, word) for word in shlex.split(fix)[1:]))
    assert done.exit_code == 0, done.output
    after = json.loads(run("check", folder / "new", "--json", *options).stdout)["findings"]
    return {finding["code"] for finding in found}, {finding["code"] for finding in after}


def write_log(folder, rows):
    kept = ("prompt", "response", "prompt_ids", "response_ids", "behavior_logprobs", "reward")
    kept += ("temperature", "logprob_kind", "policy", "finish_reason")
    lines = [json.dumps({name: row[name] for name in kept if name in row}) + "\n" for row in rows]
    (folder / "log.jsonl").write_text("".join(lines))


def test_the_fix_of_filled_logprobs_leaves_them_out(run, tmp_path):
    rows = logged.rows(3, logprob_kind="processed")
    write_log(tmp_path, [row | {"behavior_logprobs": [0.0] * len(row["response_ids"])} for row in rows])
    before, after = fixed(run, tmp_path, "zero_filled")
    assert "zero_filled" in before
    assert "zero_filled" not in after
    assert "no_logprobs" in after


@pytest.mark.parametrize(("code", "logged_as"), [("temperature_differs", 1.0), ("raw_marked_processed", 0.6)])
def test_the_fix_of_a_wrong_temperature_is_right(run, tmp_path, code, logged_as):
    sampled_by = tiny.model(len(logged.tokenizer()), seed=0)
    if code == "temperature_differs":
        sampled_by.lm_head.weight.data /= 0.6  # what an engine does at this temperature
    rows = logged.rows(8, model=sampled_by, temperature=logged_as, logprob_kind="processed")
    write_log(tmp_path, rows)
    before, after = fixed(run, tmp_path, code, "--model", tiny.save(tmp_path / "model"))
    assert before >= {code}
    assert not after & {"temperature_differs", "raw_marked_processed", "other_policy"}


def test_a_wrong_condition_is_wrong_usage(run, dataset):
    assert run("check", dataset, "--where", "nothing = 1").exit_code == 2
    assert run("check", dataset, "--sample", "0").exit_code == 2
