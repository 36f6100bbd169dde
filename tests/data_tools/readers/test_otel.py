"""OpenTelemetry's GenAI spans in every generation of their conventions. Values by hand."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.data_tools.logged import collected, lines, reason_of, rollouts, row_of, rows_of

SAMPLE = Path(__file__).parents[2] / "cases" / "otel" / "otel_genai_otlp.jsonl"
YES = [{"role": "assistant", "parts": [{"type": "text", "content": "Yes."}], "finish_reason": "stop"}]
ASK = [{"role": "user", "parts": [{"type": "text", "content": "Say yes."}]}]


def value(item):
    """A value as OTLP JSON writes it."""
    if isinstance(item, str):
        return {"stringValue": item}
    if isinstance(item, float):
        return {"doubleValue": item}
    if isinstance(item, int):
        return {"intValue": str(item)}
    if isinstance(item, dict):
        return {"kvlistValue": {"values": pairs(item)}}
    return {"arrayValue": {"values": [value(one) for one in item]}}


def pairs(attributes):
    return [{"key": key, "value": value(item)} for key, item in attributes.items()]


def span(identity="s1", events=(), parent="", status=None, **attributes):
    known = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "demo"}
    known |= {f"gen_ai.{name}": item for name, item in attributes.items()}
    return {
        "traceId": "t1",
        "spanId": identity,
        "parentSpanId": parent,
        "name": "chat demo",
        "startTimeUnixNano": "1764005000120000000",
        "attributes": pairs(known),
        "events": [{"name": name, "attributes": pairs(body)} for name, body in events],
        "status": status or {},
    }


def exported(*spans):
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def spoken(**attributes):
    return span(**{"input.messages": json.dumps(ASK), "output.messages": json.dumps(YES), **attributes})


def evaluation(name="good", score=1.0):
    return (
        "gen_ai.evaluation.result",
        {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": score},
    )


def test_three_generations_of_spans_are_read(tmp_path):
    report = collected(tmp_path, SAMPLE)
    assert (report.total.input_rows, report.total.read, report.total.kept) == (3, 5, 4)
    assert report.total.rejected == {"no_response": 1}  # its output was not recorded
    rows = rollouts(tmp_path)
    assert [row["response"] for row in rows] == [
        "Seven crates of 6 make 42 jars.",
        "7 plus 6 gives 13 jars.",
        "An Allen key.",
        "A spoon.",
    ]
    assert json.loads(rows[0]["prompt"]) == [
        {"role": "user", "content": "A crate holds 6 jars. How many jars are in 7 crates?"}
    ]
    assert rows[0]["group_id"] == rows[1]["group_id"] != rows[2]["group_id"] == rows[3]["group_id"]
    assert [row["finish_reason"] for row in rows] == ["stop"] * 4
    assert rows[0]["sampled_at"] == datetime(2025, 11, 24, 17, 23, 20, 120000, UTC)
    assert rows[0]["temperature"] == pytest.approx(0.7)
    assert (rows[0]["policy"], rows[0]["reward"], rows[0]["flags"]) == ("demo-model", None, [])
    assert json.loads(rows[0]["extra"])["gen_ai.response.id"] == "chatcmpl-o0"
    assert collected(tmp_path, SAMPLE).total.kept == 0


def test_structured_messages_say_what_their_json_text_says():
    structured = spoken(**{"input.messages": ASK, "output.messages": YES})
    for record in (exported(structured), exported(spoken())):
        row = row_of(record)
        assert (json.loads(row["prompt"])[0]["content"], row["response"]) == ("Say yes.", "Yes.")


def test_parts_become_tool_calls_results_and_reasoning():
    call = {"type": "tool_call", "id": "c1", "name": "lift", "arguments": {"to": 2}}
    asked = [
        *ASK,
        {"role": "assistant", "parts": [call]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "done"}]},
    ]
    said = [{"type": "reasoning", "content": "Hm."}, call]
    answer = [{"role": "assistant", "parts": said, "finish_reason": "tool_call"}]
    row = row_of(
        exported(
            spoken(
                **{
                    "system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
                    "input.messages": json.dumps(asked),
                    "output.messages": json.dumps(answer),
                }
            )
        )
    )
    prompt = json.loads(row["prompt"])
    assert [message["role"] for message in prompt] == ["system", "user", "assistant", "tool"]
    assert (prompt[3]["tool_call_id"], prompt[3]["content"]) == ("c1", "done")
    [message] = json.loads(row["response_messages"])
    assert message["reasoning_content"] == "Hm."
    assert message["tool_calls"][0]["function"]["name"] == "lift"
    assert row["finish_reason"] == "tool_calls"


def test_messages_in_events_or_flat_attributes_are_read():
    events = [
        ("gen_ai.system.message", {"content": "Be brief."}),
        ("gen_ai.user.message", {"content": "Say yes."}),
        ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": '{"content": "Yes."}'}),
        ("gen_ai.choice", {"index": 1, "finish_reason": "length", "message": {"content": "Y"}}),
    ]
    first, second = rows_of(lines(exported(span(events=events))))
    assert [message["role"] for message in json.loads(first["prompt"])] == ["system", "user"]
    assert [(row["response"], row["finish_reason"]) for row in (first, second)] == [
        ("Yes.", "stop"),
        ("Y", "length"),
    ]
    details = {"gen_ai.input.messages": ASK, "gen_ai.output.messages": YES}
    event = ("gen_ai.client.inference.operation.details", details)
    assert row_of(exported(span(events=[event])))["response"] == "Yes."
    flat = {
        "prompt.0.role": "user",
        "prompt.0.content": "Say yes.",
        "completion.0.role": "assistant",
        "completion.0.content": "Yes.",
        "completion.0.finish_reason": "stop",
        "completion.0.tool_calls.0.name": "lift",
        "completion.0.tool_calls.0.arguments": "{}",
    }
    row = row_of(exported(span(**flat)))
    assert (json.loads(row["prompt"])[0]["content"], row["response"], row["finish_reason"]) == (
        "Say yes.",
        "Yes.",
        "stop",
    )
    assert json.loads(row["response_messages"])[0]["tool_calls"][0]["function"]["name"] == "lift"


def test_evaluations_in_a_span_or_in_log_records_are_rewards(tmp_path):
    inside = {**spoken(), "events": span(events=[evaluation(score=0.5)])["events"]}
    beside = {**spoken(), "spanId": "s2"}
    name, body = evaluation(score=0.25)
    records = [
        {"eventName": name, "traceId": "t1", "spanId": "s2", "attributes": pairs(body)},
        {"eventName": name, "traceId": "t1", "spanId": "gone", "attributes": pairs(body)},
        {"eventName": "other"},
    ]
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}
    (tmp_path / "log.jsonl").write_bytes(lines(logs, exported(inside, beside)))
    report = collected(tmp_path, tmp_path / "log.jsonl")
    assert [row["reward"] for row in rollouts(tmp_path, order="reward")] == [0.25, 0.5]
    assert report.total.rejected == {"unmatched_score": 1}
    assert (report.total.notes["joined_score"], report.total.notes["not_a_call"]) == (1, 1)


def test_an_evaluation_of_a_span_with_several_choices_is_none_of_theirs():
    made = {
        **spoken(**{"output.messages": json.dumps(YES * 2)}),
        "events": span(events=[evaluation()])["events"],
    }
    for row in rows_of(lines(exported(made))):
        assert (row["reward"], row["flags"]) == (None, ["shared_reward"])
        assert json.loads(row["extra"])["scores"] == {"good": 1.0}


def test_spans_of_agents_tools_and_failed_calls_are_no_responses(tmp_path):
    tool = {**spoken(**{"operation.name": "execute_tool"}), "spanId": "s2"}
    failed = {**spoken(), "spanId": "s3", "status": {"code": 2, "message": "429"}}
    (tmp_path / "log.jsonl").write_bytes(lines(exported(spoken(), tool, failed)))
    report = collected(tmp_path, tmp_path / "log.jsonl")
    assert (report.total.kept, report.total.rejected) == (1, {"failed_call": 1})
    assert report.total.notes["not_a_call"] == 1


def test_spans_of_openinference_are_read_too():
    attributes = {
        "openinference.span.kind": "LLM",
        "llm.model_name": "demo",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "Say yes.",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": "Yes.",
    }
    row = row_of(exported({**span(), "attributes": pairs(attributes)}))
    assert (json.loads(row["prompt"])[0]["content"], row["response"], row["policy"]) == (
        "Say yes.",
        "Yes.",
        "demo",
    )


def test_a_call_without_its_prompt_is_refused():
    assert reason_of(exported(span(**{"output.messages": json.dumps(YES)}))) == "no_prompt"
