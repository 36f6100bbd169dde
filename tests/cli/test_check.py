"""`rec check`: what it prints, and how it exits."""

import json

from tests import tiny


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
    assert "  fix: rec collect LOGS --into NEW --map behavior_logprobs=NULL" in result.stdout
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


def test_a_wrong_condition_is_wrong_usage(run, dataset):
    assert run("check", dataset, "--where", "nothing = 1").exit_code == 2
    assert run("check", dataset, "--sample", "0").exit_code == 2
