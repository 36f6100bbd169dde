"""Samples of lm-eval-harness. Values by hand."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from data_tools import readers
from tests.data_tools.logged import (
    collected,
    lines,
    log_of,
    processed,
    reason_of,
    rejects_of,
    rollouts,
    row_of,
    rows_of,
)

CASES = Path(__file__).parents[2] / "cases" / "lm_eval"
JARS = CASES / "samples_jars_2026-01-05T12-00-00.000000.jsonl"
CHOICE = CASES / "samples_choice_2026-01-05T12-00-00.000000.jsonl"
NEAR = pytest.approx


def sample(*responses, doc=0, filter="strict-match", **fields):
    settings = {"until": ["Q:"], "do_sample": True, "temperature": 0.8}
    made = {
        "doc_id": doc,
        "doc": {"q": "1+1"},
        "target": "2",
        "arguments": {"gen_args_0": {"arg_0": f"Q: 1+{doc}\nA:", "arg_1": settings}},
        "resps": [list(responses)],
        "filtered_resps": [responses[0]],
        "filter": filter,
        "metrics": ["exact_match"],
        "doc_hash": f"d{doc}",
        "exact_match": 1.0,
    } | fields
    return {name: value for name, value in made.items() if value is not ...}


def test_responses_are_rows_once_however_many_filters_judge_them(tmp_path):
    report = collected(tmp_path, JARS)
    assert (report.total.input_rows, report.total.read, report.total.kept) == (4, 4, 4)
    assert report.total.notes == {"merged_filter": 2, "shared_reward": 4}
    rows = rollouts(tmp_path, order="file_row")
    assert [(row["source_row"], row["response"]) for row in rows] == [
        (1, "Seven crates of 6 make 42 jars."),
        (1, "7 plus 6 gives 13 jars."),
        (2, "An Allen key."),
        (2, "A spoon."),
    ]
    assert rows[0]["prompt"] == "Question: A crate holds 6 jars. How many jars are in 7 crates?\nAnswer:"
    assert rows[0]["group_id"] == rows[1]["group_id"] != rows[2]["group_id"] == rows[3]["group_id"]
    assert [(row["reward"], row["temperature"], row["flags"]) for row in rows] == [
        (None, NEAR(0.8), ["shared_reward"])
    ] * 4
    assert rows[0]["sampled_at"] == datetime(2026, 1, 5, 12, tzinfo=UTC)
    extra = json.loads(rows[0]["extra"])
    assert extra["shared_scores"] == {"exact_match_strict_match": 0.0, "exact_match_flexible_extract": 1.0}
    assert extra["filtered_resps"] == {"strict-match": ["[invalid]"], "flexible-extract": ["42"]}
    assert (extra["task"], extra["target"], extra["generation"]["until"]) == ("jars", "42", ["Question:"])
    assert collected(tmp_path, JARS).total.kept == 0


def test_scoring_given_texts_is_no_sampling():
    assert readers.detect(log_of(CHOICE.read_bytes())).name == "lm-eval"
    [reject] = rejects_of(CHOICE.read_bytes())
    assert (reject.row, reject.reason) == (1, "not_sampled")
    assert reason_of(sample("x", arguments={"gen_args_0": {"arg_0": "a whole text"}})) == "not_sampled"


def test_the_only_score_of_a_single_response_is_its_reward():
    rows = rows_of(lines(sample("2"), sample("3", doc=1, exact_match=0.0)))
    assert [row["reward"] for row in rows] == [1.0, 0.0]
    assert json.loads(rows[0]["extra"])["scores"] == {"exact_match": 1.0}


def test_of_several_scores_none_is_the_reward_until_one_is_named(tmp_path):
    log = tmp_path / "samples.jsonl"
    strict = [sample("2"), sample("3", doc=1, exact_match=0.0)]
    flexible = [{**one, "filter": "flexible-extract", "exact_match": 1.0} for one in strict]
    log.write_bytes(lines(*strict, *flexible))
    report = collected(tmp_path, log)
    assert (report.total.kept, report.total.notes) == (2, {"merged_filter": 2, "several_scores": 2})
    assert (
        report.logs[0].details["several_scores"] == "exact_match_flexible_extract, exact_match_strict_match"
    )
    assert [row["reward"] for row in rollouts(tmp_path)] == [None, None]
    collected(tmp_path / "named", log, reward="exact_match_strict_match")
    assert [row["reward"] for row in rollouts(tmp_path / "named")] == [1.0, 0.0]


def test_equal_responses_of_a_log_that_was_appended_to_are_other_draws(tmp_path):
    log = tmp_path / "samples.jsonl"
    both = [sample("2"), sample("2", filter="flexible-extract")]
    log.write_bytes(lines(*both))
    assert collected(tmp_path, log).total.kept == 1
    log.write_bytes(lines(*both, *both))
    report = collected(tmp_path, log).total
    assert (report.kept, report.duplicate, report.notes["merged_filter"]) == (1, 1, 2)


def test_older_files_have_lists_of_arguments_and_no_filter():
    old = sample("2", arguments=[["Q: 1+1\nA:", {"do_sample": False}]], filter=..., metrics=...)
    row = row_of(old)
    assert (row["prompt"], row["reward"], row["temperature"], row["flags"]) == (
        "Q: 1+1\nA:",
        1.0,
        0.0,
        ["greedy"],
    )


def test_a_chat_that_was_asked_is_a_chat():
    chat = json.dumps([{"role": "user", "content": "1+1="}])
    row = row_of(sample("2", arguments={"gen_args_0": {"arg_0": [chat], "arg_1": {}}}))
    assert (json.loads(row["prompt"]), row["temperature"]) == ([{"role": "user", "content": "1+1="}], None)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"resps": []}, "bad_record"),
        ({"resps": [[]]}, "no_response"),
        ({"resps": "2"}, "bad_record"),
        ({"arguments": None}, "bad_record"),
        ({"resps": [[["2"]]]}, "no_response"),
    ],
)
def test_malformed_samples_are_refused(fields, reason):
    assert reason_of(sample("2", **fields)) == reason


def test_a_torn_line_costs_only_itself():
    data = lines(sample("2"))[:60] + b"\n" + lines(sample("3", doc=1))
    [chunk] = processed(data)
    assert [reject.reason for reject in chunk.rejects] == ["torn_line"]
    assert chunk.rows.table.column("source_row").to_pylist() == [2]
