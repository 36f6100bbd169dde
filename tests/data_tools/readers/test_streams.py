"""Streamed responses as event streams and as pieces in JSON lines. Values by hand."""

import copy
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_tools import readers
from data_tools.readers.stream_pieces import streamed_body
from data_tools.readers.streams import MAX_FINISHED
from tests.data_tools.logged import (
    collected,
    lines,
    log_of,
    processed,
    rejects_of,
    rollouts,
    row_of,
    rows_of,
)

CASES = Path(__file__).parents[2] / "cases"
NEAR = pytest.approx
ASKED = {"messages": [{"role": "user", "content": "Name one tool."}], "temperature": 0.5}


def text(name):
    return (CASES / name).read_text()


def piece(delta, *, id="s1", index=0, **fields):
    """A piece of a stream whose server returns token ids, as vLLM does."""
    choice = {"index": index, "delta": delta, "finish_reason": fields.pop("finish", None)}
    choice |= {name: fields.pop(name) for name in ("logprobs", "token_ids") if name in fields}
    named = {"id": id, "object": "chat.completion.chunk", "created": 1764000300, "model": "m"}
    return named | {"choices": [choice]} | fields


def entries(*pairs):
    return {"content": [{"token": token, "logprob": value} for token, value in pairs]}


def stream(id="s1"):
    return [
        piece({"role": "assistant", "content": ""}, id=id, prompt_token_ids=[5, 6]),
        piece({"content": "Al"}, id=id, logprobs=entries(("Al", -0.5)), token_ids=[7]),
        piece({"content": "len"}, id=id, logprobs=entries(("len", -0.25)), token_ids=[8]),
        piece({}, id=id, logprobs=entries(("", -0.125)), token_ids=[2], finish="stop"),
    ]


def events(pieces):
    return (
        b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in pieces) + b"data: [DONE]\n\n"
    )


def test_interleaved_choices_of_an_event_stream_are_two_responses_of_one_call():
    first, second = rows_of(lines({"request": ASKED, "response": text("troubles/A14_stream_chunks.sse")}))
    assert (first["response"], first["finish_reason"]) == ("up now", "stop")
    assert first["behavior_logprobs"] == NEAR([-0.1, -0.2, -0.3, -0.01])
    assert (second["response"], second["finish_reason"]) == ("down", "tool_calls")
    [message] = json.loads(second["response_messages"])
    assert message["tool_calls"] == [
        {"id": "c9", "type": "function", "function": {"name": "lift", "arguments": '{"to": 2}'}}
    ]
    assert (second["behavior_logprobs"], second["flags"]) == (None, ["logprob_length"])
    assert first["group_id"] == second["group_id"]
    assert first["temperature"] == NEAR(0.5)
    assert json.loads(first["extra"])["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["openai_chat_stream.sse", "openai_chat_stream_chunks.jsonl"])
def test_text_and_pieces_of_a_stream_give_the_same_response(name):
    logged = text(name)
    response = logged if name.endswith("sse") else list(map(json.loads, logged.splitlines()))
    row = row_of({"request": ASKED, "response": response})
    assert (row["response"], row["finish_reason"], row["policy"]) == (
        "An Allen key.", "stop", "demo-model-2026-01-01",
    )  # fmt: skip
    assert row["behavior_logprobs"] == NEAR([-0.011, -0.617557, -1.224115])
    assert row["sampled_at"] == datetime(2025, 11, 24, 16, 5, tzinfo=UTC)
    assert (row["response_ids"], row["behavior_logprob"], row["reward"]) == (None, None, None)


@pytest.mark.parametrize(
    "name", ["openai_chat_stream.sse", "openai_chat_stream_chunks.jsonl", "troubles/A14_stream_chunks.sse"]
)
def test_a_log_of_a_stream_is_one_response_that_lacks_its_prompt(name):
    data = text(name).encode()
    assert readers.detect(log_of(data)).name == "openai-stream"
    [chunk] = processed(data)
    [reject] = chunk.rejects
    assert reject.reason == "no_prompt"
    assert chunk.rows.table.num_rows == 0


@pytest.mark.parametrize("kind", ["events", "lines"])
def test_a_stream_that_returns_ids_is_complete(kind):
    data = events(stream()) if kind == "events" else lines(*stream())
    row = row_of_log(data)
    assert (row["prompt_ids"], row["response_ids"]) == ([5, 6], [7, 8, 2])
    assert (row["response"], row["behavior_logprobs"]) == ("Allen", [-0.5, -0.25, -0.125])
    assert (row["behavior_logprob"], row["source_row"]) == (-0.875, 1)


def row_of_log(data):
    [row] = rows_of(data)
    return row


def test_streams_of_many_calls_interleave_in_one_log():
    count = 3 * MAX_FINISHED
    streams = [stream(f"s{at}") for at in range(count)]
    pieces = [made[step] for step in range(4) for made in streams]
    rows = rows_of(lines(*pieces))
    assert [row["source_row"] for row in rows] == list(range(1, count + 1))
    assert {row["response"] for row in rows} == {"Allen"}
    assert len({row["response_id"] for row in rows}) == count


def test_what_comes_behind_the_end_still_belongs_to_the_response():
    late = {"id": "s1", "object": "chat.completion.chunk", "choices": [], "usage": {"completion_tokens": 3}}
    row = row_of_log(lines(*stream(), late, *stream("s2")[:0]))
    assert json.loads(row["extra"])["usage"] == {"completion_tokens": 3}


def test_a_stream_that_is_named_late_is_one_stream():
    nameless = {"id": "", "object": "chat.completion.chunk", "created": 0, "choices": []}
    row = row_of_log(lines(nameless, *stream()))
    assert (row["response"], row["source_row"]) == ("Allen", 1)


def test_a_stream_that_breaks_off_is_no_response():
    [reject] = rejects_of(lines(*stream()[:3]))
    assert (reject.row, reject.reason, reject.detail) == (
        1, "torn_stream", "the stream breaks off within choice 0",
    )  # fmt: skip


def test_a_stream_that_may_have_lost_a_piece_is_no_response():
    first, second, *others = events(stream()).split(b"\n\n")
    torn = b"\n\n".join([first, second[:40], *others])
    assert [(reject.row, reject.reason) for reject in rejects_of(torn)] == [
        (3, "torn_line"),
        (1, "torn_stream"),
    ]
    torn = lines(stream()[0]) + lines(stream()[1])[:40] + b"\n" + lines(*stream()[2:])
    assert [(reject.row, reject.reason) for reject in rejects_of(torn)] == [
        (2, "torn_line"),
        (1, "torn_stream"),
    ]


def test_data_of_an_event_may_span_lines():
    data = b"".join(
        b"".join(b"data: " + line + b"\n" for line in json.dumps(value, indent=1).encode().split(b"\n"))
        + b"\n"
        for value in stream()
    )
    assert row_of_log(data)["response"] == "Allen"


def test_tool_calls_without_an_index_are_told_apart_by_their_ids():
    calls = [
        {"id": "a", "function": {"name": "f", "arguments": "{}"}},
        {"id": "b", "function": {"name": "g", "arguments": '{"x":'}},
        {"function": {"arguments": " 1}"}},
    ]
    pieces = [piece({"tool_calls": [call]}) for call in calls] + [piece({}, finish="tool_calls")]
    [choice] = streamed_body(pieces)["choices"]
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "f", "arguments": "{}"},
        {"name": "g", "arguments": '{"x": 1}'},
    ]
    assert choice["message"]["content"] is None


def test_legacy_completions_stream_their_text():
    named = {"id": "t1", "object": "text_completion", "created": 1764000300, "model": "m"}
    pieces = [
        named | {"choices": [{"index": 0, "text": "Al", "logprobs": None, "finish_reason": None}]},
        named | {"choices": [{"index": 0, "text": "len", "logprobs": None, "finish_reason": "length"}]},
    ]
    data = events(pieces)
    assert readers.detect(log_of(data)).name == "openai-stream"
    row = row_of({"request": {"prompt": "Name one tool."}, "response": data.decode()})
    assert (row["response"], row["finish_reason"]) == ("Allen", "length")


def test_collecting_streams_again_adds_nothing_and_a_grown_log_what_is_new(tmp_path):
    log = tmp_path / "stream.sse"
    log.write_bytes(b": keep-alive\n\n" + events(stream()))
    assert collected(tmp_path, log).total.kept == 1
    log.write_bytes(b": keep-alive\n\n" + events(stream()) + events(stream("s2")))
    again = collected(tmp_path, log).total
    assert (again.kept, again.duplicate, again.input_rows) == (1, 1, 8)
    assert len(rollouts(tmp_path)) == 2


PIECES = [*stream(), *stream("s2"), *map(json.loads, text("openai_chat_stream_chunks.jsonl").splitlines())]
STRANGE = st.sampled_from([None, True, 7, -0.75, "", "x", [], [None], {}, {"index": 0}])


@st.composite
def mutated(draw):
    pieces = draw(st.permutations(PIECES)) if draw(st.booleans()) else PIECES
    pieces = [json.loads(json.dumps(value)) for value in pieces]
    for _ in range(draw(st.integers(0, 4))):
        holder = draw(st.sampled_from(pieces))
        for _ in range(draw(st.integers(0, 4))):
            inner = [value for value in children(holder) if isinstance(value, dict | list) and value]
            holder = draw(st.sampled_from(inner)) if inner else holder
        key = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
        holder[key] = copy.deepcopy(draw(STRANGE))
    return pieces


def children(value):
    return value.values() if isinstance(value, dict) else value


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated(), st.booleans(), st.integers(0, 10_000))
def test_mutated_streams_are_counted_and_nothing_is_invented(pieces, as_events, cut):
    data = events(pieces) if as_events else lines(*pieces)
    data = data[: max(40, len(data) - cut)]
    reader = readers.reader("openai-stream")
    for chunk in reader.chunks(log_of(data)):
        assert len(chunk.source_row) == len(chunk.content)
    for chunk in processed(data) if readers.detect(log_of(data)) is reader else []:
        for row in chunk.rows.table.to_pylist():
            values = [value for value in row["behavior_logprobs"] or () if value is not None]
            assert all(f"{value:.6f}".rstrip("0") in data.decode() for value in values)
            assert row["reward"] is None
            if row["behavior_logprob"] is not None:
                assert len(values) == len(row["response_ids"])
