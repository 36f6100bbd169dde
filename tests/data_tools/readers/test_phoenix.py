"""Phoenix: OpenInference spans and annotations. Values by hand."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.data_tools.logged import collected, lines, reason_of, rollouts, row_of

PHOENIX = Path(__file__).parents[2] / "cases" / "phoenix"
FLAT, TABLE = PHOENIX / "openinference_spans_flat.jsonl", PHOENIX / "phoenix_spans_dataframe.parquet"
ANNOTATIONS = PHOENIX / "phoenix_span_annotations.jsonl"
RESPONSES = ["Seven crates of 6 make 42 jars.", "7 plus 6 gives 13 jars.", "An Allen key.", "A spoon."]


def span(identity="s1", **attributes):
    said = {
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "Say yes.",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": "Yes.",
    }
    attributes = {name: value for name, value in (said | attributes).items() if value is not None}
    return {
        "name": "ChatCompletion",
        "context": {"trace_id": "t1", "span_id": identity},
        "span_kind": "LLM",
        "parent_id": None,
        "start_time": "2026-01-05T12:00:00+00:00",
        "status_code": "OK",
        "attributes": attributes,
    }


def annotation(of="s1", name="good", score=1.0, **fields):
    return {"span_id": of, "name": name, "annotator_kind": "HUMAN", "result": {"score": score}} | fields


@pytest.mark.parametrize(
    ("path", "first", "finish"),
    [
        (FLAT, datetime(2026, 1, 5, 12, 0, 0, 120000, UTC), "stop"),
        (TABLE, datetime(2025, 11, 24, 17, 23, 20, 120000, UTC), None),
    ],
    ids=["flat", "table"],
)
def test_spans_are_rows_and_annotations_their_rewards(tmp_path, path, first, finish):
    report = collected(tmp_path, path, ANNOTATIONS)
    assert [log.read for log in report.logs] == [4, 0]
    assert report.logs[1].notes == {"joined_score": 4}
    assert report.total.details["reward_of_score"] == "correctness"
    rows = rollouts(tmp_path)
    assert [row["response"] for row in rows] == RESPONSES
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, 0.0]
    assert json.loads(rows[0]["prompt"]) == [
        {"role": "user", "content": "A crate holds 6 jars. How many jars are in 7 crates?"}
    ]
    assert rows[0]["group_id"] == rows[1]["group_id"] != rows[2]["group_id"] == rows[3]["group_id"]
    assert (rows[0]["sampled_at"], rows[0]["finish_reason"]) == (first, finish)
    assert rows[0]["temperature"] == pytest.approx(0.7)
    assert rows[0]["policy"] == "demo-model"
    extra = json.loads(rows[0]["extra"])
    assert (extra["trace_id"], extra["span_id"]) == ("0" * 31 + "1", "0" * 15 + "1")
    assert extra["llm.token_count.total"] == 28
    assert collected(tmp_path, path, ANNOTATIONS).total.kept == 0


def test_a_span_in_both_exports_counts_once(tmp_path):
    report = collected(tmp_path, PHOENIX)
    assert (report.total.kept, report.total.duplicate) == (4, 4)


def test_tool_calls_tools_and_contents_are_gathered_from_flat_attributes():
    at = "llm.output_messages.0.message"
    row = row_of(
        span(
            **{
                "llm.input_messages.0.message.content": None,
                "llm.input_messages.0.message.contents.0.message_content.type": "text",
                "llm.input_messages.0.message.contents.0.message_content.text": "Lift it.",
                "llm.input_messages.0.message.contents.1.message_content.type": "image",
                "llm.input_messages.0.message.contents.1.message_content.image.image.url": "a.png",
                "llm.tools.0.tool.json_schema": '{"type": "function", "function": {"name": "lift"}}',
                f"{at}.content": None,
                f"{at}.tool_calls.0.tool_call.id": "c1",
                f"{at}.tool_calls.0.tool_call.function.name": "lift",
                f"{at}.tool_calls.0.tool_call.function.arguments": '{"to": 2}',
            }
        )
    )
    [asked] = json.loads(row["prompt"])
    assert asked["content"] == [
        {"type": "text", "text": "Lift it."},
        {"type": "image_url", "image_url": {"url": "a.png"}},
    ]
    assert json.loads(row["tools"]) == [{"type": "function", "function": {"name": "lift"}}]
    [message] = json.loads(row["response_messages"])
    assert message["tool_calls"][0]["function"] == {"name": "lift", "arguments": '{"to": 2}'}


def test_nested_attributes_and_plain_values_say_the_same():
    nested = {
        "llm": {
            "input_messages": [{"message": {"role": "user", "content": "Say yes."}}],
            "output_messages": [{"message": {"role": "assistant", "content": "Yes."}}],
        }
    }
    row = row_of({**span(), "attributes": nested})
    assert (json.loads(row["prompt"])[0]["content"], row["response"]) == ("Say yes.", "Yes.")
    row = row_of({**span(), "attributes": {"input.value": "Say yes.", "output.value": "Yes."}})
    assert (row["prompt"], row["response"]) == ("Say yes.", "Yes.")


def test_labels_are_no_rewards_and_annotations_of_the_root_are_of_the_only_call(tmp_path):
    root = {**span("root"), "span_kind": "CHAIN"}
    child = {**span("child"), "parent_id": "root"}
    records = [root, child, annotation("root"), annotation("child", "tone", None, result={"label": "kind"})]
    (tmp_path / "log.jsonl").write_bytes(lines(*records))
    report = collected(tmp_path, tmp_path / "log.jsonl")
    [row] = rollouts(tmp_path)
    assert row["reward"] == 1.0
    assert json.loads(row["extra"])["scores"] == {"tone": "kind", "good": 1.0}
    assert (report.total.notes["not_a_call"], report.total.notes["joined_score"]) == (1, 2)


def test_failed_and_silent_spans_are_refused():
    assert reason_of({**span(), "status_code": "ERROR"}) == "failed_call"
    silent = {"llm.output_messages.0.message.role": None, "llm.output_messages.0.message.content": None}
    assert reason_of(span(**silent)) == "no_response"
