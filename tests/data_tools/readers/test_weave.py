"""Weave's calls and feedback. Values by hand."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.data_tools.logged import collected, lines, reason_of, rollouts, row_of

SAMPLE = Path(__file__).parents[2] / "cases" / "weave" / "weave_calls.jsonl"


def call(identity="c1", **fields):
    record = {
        "id": identity,
        "project_id": "team/demo",
        "op_name": "weave:///team/demo/op/openai.chat.completions.create:x",
        "trace_id": "t1",
        "parent_id": None,
        "started_at": "2026-01-05T12:00:00Z",
        "inputs": {"model": "demo", "messages": [{"role": "user", "content": "Say yes."}]},
        "output": {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Yes."}}]},
    }
    return record | fields


def test_calls_of_models_are_rows_with_their_feedback(tmp_path):
    report = collected(tmp_path, SAMPLE)
    assert (report.total.read, report.total.kept, report.total.format) == (4, 4, "weave")
    rows = rollouts(tmp_path)
    assert [row["response"] for row in rows] == [
        "Seven crates of 6 make 42 jars.",
        "7 plus 6 gives 13 jars.",
        "An Allen key.",
        "A spoon.",
    ]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, 0.0]
    assert rows[0]["group_id"] == rows[1]["group_id"] != rows[2]["group_id"] == rows[3]["group_id"]
    assert rows[3]["behavior_logprobs"] == pytest.approx([-0.076574, -0.683131])
    assert rows[0]["sampled_at"] == datetime(2026, 1, 5, 12, 0, 0, 120000, UTC)
    assert (rows[0]["policy"], rows[0]["finish_reason"]) == ("demo-model-2026-01-01", "stop")
    assert rows[0]["temperature"] == pytest.approx(0.7)
    extra = json.loads(rows[0]["extra"])
    assert extra["scores"] == {"correct": 1.0, "reaction": "\N{THUMBS UP SIGN}"}
    assert (extra["trace_id"], extra["request_model"]) == ("0199-t0", "demo-model")
    assert collected(tmp_path, SAMPLE).total.kept == 0


def test_feedback_from_a_query_of_its_own_is_joined(tmp_path):
    ref = "weave:///team/demo/call/"
    feedback = [
        {
            "id": "f1",
            "weave_ref": f"{ref}c1",
            "feedback_type": "wandb.annotation.good",
            "payload": {"value": True},
        },
        {"id": "f2", "weave_ref": f"{ref}c1", "feedback_type": "wandb.note.1", "payload": {"note": "hm"}},
        {
            "id": "f3",
            "weave_ref": f"{ref}gone",
            "feedback_type": "wandb.annotation.good",
            "payload": {"value": 0},
        },
    ]
    (tmp_path / "calls.jsonl").write_bytes(lines(call()))
    (tmp_path / "a_feedback.jsonl").write_bytes(lines(*feedback))
    report = collected(tmp_path, tmp_path / "a_feedback.jsonl", tmp_path / "calls.jsonl")
    [row] = rollouts(tmp_path)
    assert row["reward"] == 1.0
    assert json.loads(row["extra"])["scores"] == {"good": True, "note": "hm"}
    assert report.total.rejected == {"unmatched_score": 1}


def test_a_scorer_with_several_outputs_gives_several_scores():
    said = [{"feedback_type": "wandb.runnable.judge", "payload": {"output": {"clear": 1, "right": 0.5}}}]
    row = row_of(call(summary={"weave": {"feedback": said}}))
    assert row["reward"] is None
    assert json.loads(row["extra"])["scores"] == {"judge.clear": 1, "judge.right": 0.5}


def test_what_is_no_whole_call_of_a_model_is_passed_over_or_refused(tmp_path):
    plain = call("c0", op_name="weave:///team/demo/op/predict:x", output="Yes.")
    (tmp_path / "calls.jsonl").write_bytes(lines(plain, call()))
    report = collected(tmp_path, tmp_path / "calls.jsonl")
    assert (report.total.kept, report.total.notes["not_a_call"]) == (1, 1)
    assert reason_of(call(exception="RateLimitError")) == "failed_call"
    assert reason_of(call(output="weave:///team/demo/object/Completion:x")) == "no_response"
    assert reason_of(call(deleted_at="2026-01-06T00:00:00Z")) == "deleted"
    embeddings = {"object": "list", "data": [{"embedding": [0.5]}]}
    assert reason_of(call(attributes={"kind": "llm"}, output=embeddings)) == "no_response"
