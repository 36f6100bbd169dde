"""Messages of model calls that OpenTelemetry logs apart from their spans, joined to them. Values by hand."""

import gc
import json
import weakref
from pathlib import Path

import pytest

from data_tools.readers.otel import OtelReader
from tests.data_tools.logged import collected, lines, log_of, rollouts, rows_of
from tests.data_tools.readers.test_otel import ASK, YES, exported, pairs, span, value

CASES = Path(__file__).parents[2] / "cases" / "otel"
JARS = "A crate holds 6 jars. How many jars are in 7 crates?"
DETAILS = "gen_ai.client.inference.operation.details"


def logged(*records):
    return {"resourceLogs": [{"scopeLogs": [{"logRecords": list(records)}]}]}


def message(name, body=None, span="s1", time=0, **attributes):
    made = {"eventName": name, "traceId": "t1", "spanId": span, "timeUnixNano": str(time)}
    return {**made, "body": value(body or {}), "attributes": pairs(attributes)}


def asked(text, **more):
    return message("gen_ai.user.message", {"content": text}, **more)


def answered(text, index=0, **more):
    return message("gen_ai.choice", {"index": index, "message": {"content": text}}, **more)


def details(identity="s1", **more):
    content = {"gen_ai.input.messages": ASK, "gen_ai.output.messages": YES, "gen_ai.operation.name": "chat"}
    return message(DETAILS, span=identity, **content, **more)


def write(path, *records):
    path.write_bytes(lines(*records))
    return path


def said(row):
    """The contents of a row's prompt, and its response."""
    return [turn["content"] for turn in json.loads(row["prompt"])], row["response"]


def test_messages_in_one_file_with_their_spans_are_joined_in_any_order(tmp_path):
    report = collected(tmp_path, CASES / "otel_messages_otlp.jsonl")
    assert (report.total.read, report.total.kept) == (6, 3)
    assert report.total.rejected == {"no_response": 1, "unmatched_message": 2}
    assert report.total.notes == {"joined_message": 10, "not_a_call": 2}
    first, second, called = rollouts(tmp_path, order="source_row, response DESC")
    assert said(first) == (["Answer in one sentence.", JARS], "Seven crates of 6 make 42 jars.")
    assert said(second) == (["Answer in one sentence.", JARS], "7 plus 6 gives 13 jars.")
    assert first["group_id"] == second["group_id"]
    assert (first["temperature"], first["policy"]) == (pytest.approx(0.7), "demo-model-2026-01-01")
    prompt = json.loads(called["prompt"])
    assert [turn["role"] for turn in prompt] == ["user", "assistant", "tool"]
    assert prompt[1]["tool_calls"][0]["function"]["name"] == "look_up"
    assert prompt[2] == {"role": "tool", "tool_call_id": "c1", "content": "Allen key"}
    [answer] = json.loads(called["response_messages"])  # its calls stood beside the message
    assert (answer["tool_calls"][0]["function"]["name"], called["finish_reason"]) == ("buy", "tool_calls")


def test_messages_in_another_file_of_the_command_are_joined(tmp_path):
    spans, logs = CASES / "two_files" / "traces.jsonl", CASES / "two_files" / "logs.jsonl"
    report = collected(tmp_path, logs, spans)
    assert (report.total.kept, report.total.rejected) == (3, {"no_response": 1})
    assert (report.total.notes["joined_message"], report.total.notes["joined_score"]) == (2, 3)
    rows = rollouts(tmp_path, order="response DESC")
    assert [(row["response"], row["reward"]) for row in rows] == [
        ("Seven crates of 6 make 42 jars.", 1.0),
        ("An Allen key.", 1.0),  # its span was not sampled: the event tells all of it
        ("7 plus 6 gives 13 jars.", 0.0),
    ]
    assert json.loads(rows[0]["extra"])["gen_ai.conversation.id"] == "s0"  # of the span
    assert rows[1]["policy"] == "demo-model-2026-01-01"
    assert collected(tmp_path, logs).total.kept == 0  # the same calls, told by their events alone


def test_spans_and_log_records_that_are_apart_are_counted(tmp_path):
    spans = write(tmp_path / "spans.jsonl", exported(span()))
    logs = write(tmp_path / "logs.jsonl", logged(asked("Say yes."), answered("Yes.")))
    assert collected(tmp_path, spans).total.rejected == {"no_response": 1}
    assert collected(tmp_path, logs).total.rejected == {"unmatched_message": 2}
    assert collected(tmp_path, spans, logs).total.kept == 1


def test_messages_of_a_span_that_is_no_call_are_counted(tmp_path):
    web = {**span(), "attributes": pairs({"http.request.method": "GET"})}
    report = collected(tmp_path, write(tmp_path / "log.jsonl", exported(web), logged(asked("Say yes."))))
    assert report.total.rejected == {"unmatched_message": 1}


def test_messages_stand_in_the_order_of_their_times():
    first, last = asked("Say no.", time=1), asked("Say yes.", time=3)
    between = message("gen_ai.assistant.message", {"content": "No."}, time=2)
    [row] = rows_of(lines(exported(span()), logged(answered("Yes.", time=4), last), logged(between, first)))
    assert said(row) == (["Say no.", "No.", "Say yes."], "Yes.")


def test_an_export_that_was_sent_twice_counts_once_but_a_user_may_repeat_themselves():
    export = logged(asked("Again."), asked("Again."), answered("Yes."))
    [row] = rows_of(lines(exported(span()), export, export))
    assert said(row) == (["Again.", "Again."], "Yes.")


def test_what_logs_share_goes_away_with_them():
    log = log_of(lines(exported(span()), logged(asked("Say yes."), answered("Yes."))))
    assert [row for chunk in OtelReader().chunks(log) for row in chunk.columns["response"]]
    shared = weakref.ref(log.shared)
    gc.disable()  # a database that waits for it may be closed in another thread, which SQLite refuses
    try:
        del log
        assert shared() is None
    finally:
        gc.enable()


def test_a_span_that_holds_its_messages_keeps_them():
    held = span(**{"input.messages": ASK, "output.messages": YES})
    [row] = rows_of(lines(exported(held), logged(asked("Say no."), answered("No."))))
    assert said(row) == (["Say yes."], "Yes.")


def test_messages_without_content_are_no_response(tmp_path):
    silent = logged(message("gen_ai.user.message"), message("gen_ai.choice", {"index": 0, "message": {}}))
    report = collected(tmp_path, write(tmp_path / "log.jsonl", exported(span()), silent))
    assert (report.total.kept, report.total.rejected) == (0, {"no_response": 1})


def test_an_event_that_tells_of_a_failed_call_is_refused(tmp_path):
    failed = message(DETAILS, **{"gen_ai.operation.name": "chat", "error.type": "429"})
    log = write(tmp_path / "log.jsonl", exported(span()), logged(failed), logged(details("s2")))
    report = collected(tmp_path, log)
    assert (report.total.kept, report.total.rejected) == (1, {"no_response": 1})
    log = write(tmp_path / "error.jsonl", exported({**span("s3"), "attributes": failed["attributes"]}))
    assert collected(tmp_path, log).total.rejected == {"failed_call": 1}
