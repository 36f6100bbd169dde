"""Helicone's export: both bodies, a rating, scores. Values by hand."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.data_tools.logged import collected, reason_of, rollouts, row_of

SAMPLE = Path(__file__).parents[2] / "cases" / "helicone" / "helicone_export.jsonl"


def call(**fields):
    record = {
        "request_id": "q1",
        "request_created_at": "2026-01-05 12:00:00.120",
        "request_body": {"model": "demo", "messages": [{"role": "user", "content": "Say yes."}]},
        "response_body": {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Yes."}}]},
        "response_status": 200,
    }
    return record | fields


def test_calls_with_both_bodies_are_rows_and_a_failed_one_is_refused(tmp_path):
    report = collected(tmp_path, SAMPLE)
    assert (report.total.read, report.total.kept, report.total.format) == (4, 3, "helicone")
    assert report.total.rejected == {"failed_call": 1}
    assert report.total.details["several_scores"] == "correct, feedback_rating"
    rows = rollouts(tmp_path)
    assert [row["response"] for row in rows] == [
        "Seven crates of 6 make 42 jars.",
        "Seven crates of 6 make 42 jars.",
        "An Allen key.",
    ]
    assert len({row["response_id"] for row in rows}) == 3  # the server gave two calls the same id
    assert rows[0]["group_id"] == rows[1]["group_id"] != rows[2]["group_id"]
    assert [row["reward"] for row in rows] == [None, None, None]
    assert rows[0]["sampled_at"] == datetime(2026, 1, 5, 12, 0, 0, 120000, UTC)
    assert (rows[0]["policy"], rows[0]["temperature"]) == ("demo-model-2026-01-01", None)
    assert rows[2]["behavior_logprobs"] == pytest.approx([-0.011, -0.617557, -1.224115])
    extra = json.loads(rows[1]["extra"])
    assert extra["scores"] == {"feedback_rating": False, "correct": 0}
    assert extra["request_properties"] == {"group": "g0"}
    assert collected(tmp_path, SAMPLE).total.kept == 0


@pytest.mark.parametrize(
    ("reward", "expected"),
    [("feedback_rating", [1.0, 0.0, 1.0]), ("correct", [100.0, 0.0, 100.0])],
)
def test_the_rating_or_a_score_is_chosen_by_name(tmp_path, reward, expected):
    collected(tmp_path, SAMPLE, reward=reward)
    assert [row["reward"] for row in rollouts(tmp_path)] == expected


def test_a_rating_alone_is_the_reward():
    assert row_of(call(feedback_rating=True))["reward"] == 1.0
    assert row_of(call(feedback_rating=None, scores=None))["reward"] is None


def test_bodies_of_other_apis_are_read():
    asked = {"model": "m", "system": "Be brief.", "messages": [{"role": "user", "content": "Lift it."}]}
    blocks = [{"type": "tool_use", "id": "u1", "name": "lift", "input": {"to": 2}}]
    made = {
        "type": "message",
        "role": "assistant",
        "content": blocks,
        "stop_reason": "tool_use",
        "model": "m-1",
    }
    row = row_of(call(request_body=asked, response_body=made))
    assert [message["role"] for message in json.loads(row["prompt"])] == ["system", "user"]
    [message] = json.loads(row["response_messages"])
    assert message["tool_calls"][0]["function"] == {"name": "lift", "arguments": '{"to":2}'}
    assert row["policy"] == "m-1"


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("no_response", {"response_body": None}),
        ("failed_call", {"response_body": {"error": {"message": "overloaded"}}}),
        ("failed_call", {"response_status": -3, "response_body": None}),
        ("failed_call", {"response_status": "-3", "response_body": None}),
        ("cache_hit", {"cache_reference_id": "7c9e6679-7425-40de-944b-e07fc1f90ae7"}),
        ("no_response", {"response_body": {"object": "list", "data": []}}),
        ("no_prompt", {"request_body": None}),
    ],
)
def test_what_is_no_whole_draw_is_refused(reason, fields):
    assert reason_of(call(**fields)) == reason
