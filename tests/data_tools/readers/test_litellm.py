"""LiteLLM's spend logs and payloads: attempts, caches, texts that were cut or taken out. Values by hand."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.data_tools.logged import collected, lines, reason_of, rejects_of, rollouts, row_of, rows_of

CASES = Path(__file__).parents[2] / "cases"
LITELLM = CASES / "litellm"
JARS = [{"role": "user", "content": "A crate holds 6 jars. How many jars are in 7 crates?"}]


def attempt(**fields):
    """A record of the spend log, unless said otherwise."""
    body = {
        "id": "c1",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}
        ],
    }
    record = {
        "request_id": "r1",
        "call_type": "acompletion",
        "startTime": "2026-01-05T12:00:00+00:00",
        "model": "demo",
        "litellm_call_id": "call-1",
        "messages": [{"role": "user", "content": "Say yes."}],
        "response": body,
        "status": "success",
    }
    return record | fields


def test_payloads_of_one_call_a_file_and_of_a_batch_are_the_same_calls(tmp_path):
    report = collected(tmp_path, LITELLM / "litellm_s3", LITELLM / "litellm_s3_batch.jsonl")
    assert (report.total.read, report.total.kept, report.total.duplicate) == (6, 3, 2)
    assert report.total.rejected == {"failed_call": 1}
    first, tool, second = rollouts(tmp_path)
    assert json.loads(first["prompt"]) == json.loads(second["prompt"]) == JARS
    assert [first["response"], second["response"]] == [
        "Seven crates of 6 make 42 jars.",
        "7 plus 6 gives 13 jars.",
    ]
    assert tool["response"] == "An Allen key."
    assert first["group_id"] == second["group_id"] == first["prompt_hash"] != tool["group_id"]
    assert first["sampled_at"] == datetime(2025, 11, 24, 17, 6, 40, 120000, UTC)
    assert first["temperature"] == pytest.approx(0.7)
    assert (first["policy"], first["finish_reason"], first["reward"]) == (
        "demo-model-2026-01-01",
        "stop",
        None,
    )
    assert tool["behavior_logprobs"] == pytest.approx([-0.011, -0.617557, -1.224115])
    assert tool["response_ids"] is tool["behavior_logprob"] is None
    extra = json.loads(first["extra"])
    assert (extra["trace_id"], extra["session_id"], extra["litellm_call_id"]) == ("tr0", "s0", "call-00")
    assert extra["metadata"]["requester_metadata"] == {"group": "g0"}
    assert collected(tmp_path, LITELLM / "litellm_s3").total.kept == 0


def test_a_spend_log_holds_failures_and_answers_from_the_cache_beside_calls(tmp_path):
    report = collected(tmp_path, LITELLM / "litellm_spend_logs.jsonl")
    assert (report.total.read, report.total.kept) == (4, 2)
    assert report.total.rejected == {"cache_hit": 1, "failed_call": 1}
    rows = rollouts(tmp_path)
    assert [json.loads(row["prompt"]) for row in rows] == [JARS, JARS]
    assert [row["sampled_at"] for row in rows] == [
        datetime(2026, 1, 5, 12, 0, 0, 120000, UTC),
        datetime(2026, 1, 5, 12, 0, 1, 120000, UTC),
    ]
    assert rows[0]["temperature"] == pytest.approx(0.7)
    assert len(rows[0]["behavior_logprobs"]) == 7
    assert json.loads(rows[0]["extra"])["metadata"]["max_retries"] == 2
    assert collected(tmp_path, LITELLM / "litellm_spend_logs.jsonl").total.kept == 0


def test_a_call_in_payloads_and_spend_log_counts_once_and_payloads_go_first(tmp_path):
    report = collected(tmp_path, LITELLM / "litellm_spend_logs.jsonl", LITELLM / "litellm_s3")
    assert [log.kept for log in report.logs] == [1, 1, 1]
    assert report.logs[2].source.endswith("litellm_spend_logs.jsonl")
    assert report.logs[2].duplicate == 1  # call-00; call-01 is in the spend log alone


def test_retries_failures_duplicates_and_cache_hits_are_told_apart(tmp_path, troubles):
    report = collected(tmp_path, troubles / "A12_retries_and_duplicates.jsonl")
    assert (report.total.kept, report.total.duplicate) == (2, 1)
    assert report.total.rejected == {"failed_call": 2, "cache_hit": 1}
    rows = rollouts(tmp_path)
    assert [row["source_row"] for row in rows] == [3, 5]
    assert [row["response"] for row in rows] == ["Packed.", "Packed."]
    assert rows[0]["response_id"] != rows[1]["response_id"]
    assert json.loads(rows[0]["extra"])["metadata"]["attempted_retries"] == 2


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        (
            "truncated_by_proxy",
            {"messages": [{"role": "user", "content": "a (litellm_truncated 9 chars) b"}]},
        ),
        ("truncated_by_proxy", {"response": '{"choices": [{"mess (litellm_truncated 9 chars) e"}]}'}),
        ("truncated_by_proxy", {"messages": "{}", "proxy_server_request": '{"mess litellm_truncated es"}'}),
        ("redacted", {"messages": [{"role": "user", "content": "redacted-by-litellm"}]}),
        ("redacted", {"response": {"text": "redacted-by-litellm"}}),
        ("failed_call", {"status": "failure"}),
        ("failed_call", {"error_str": "RateLimitError", "response": None}),
        ("cache_hit", {"cache_hit": True}),
        ("cache_hit", {"request_id": "r1_cache_hit1764.2"}),
        ("no_response", {"response": "{}"}),
        ("no_prompt", {"messages": "{}"}),
    ],
)
def test_what_is_no_whole_draw_is_refused_under_its_own_reason(reason, fields):
    assert reason_of(attempt(**fields)) == reason


def test_a_response_may_be_a_text_or_a_body_of_another_api():
    assert row_of(attempt(response="Yes."))["response"] == "Yes."
    blocks = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}]
    anthropic = {"type": "message", "role": "assistant", "content": blocks, "stop_reason": "end_turn"}
    row = row_of(attempt(response=anthropic))
    assert (row["response"], row["finish_reason"]) == ("Yes.", "stop")
    assert json.loads(row["response_messages"])[0]["reasoning_content"] == "Hm."
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
    made = {"object": "response", "status": "completed", "output": [item]}
    asked = attempt(messages="Say yes.", response=made)
    assert (row_of(asked)["prompt"], row_of(asked)["response"]) == ("Say yes.", "Yes.")


def test_the_choices_of_a_call_are_one_group_and_a_text_prompt_is_never_ids():
    choices = [{"index": at, "message": {"role": "assistant", "content": str(at)}} for at in (1, 0)]
    record = attempt(response={"choices": choices}, messages="[1, 2]", model_parameters={"n": 3})
    rows = rows_of(lines(record))
    assert [row["response"] for row in rows] == ["0", "1"]
    assert {row["prompt"] for row in rows} == {"[1, 2]"}
    assert len({row["group_id"] for row in rows}) == 1
    assert all("incomplete_group" in row["flags"] for row in rows)


def test_tags_of_the_requester_name_columns_only_by_their_very_names():
    tags = {"group_id": "g", "policy_version": "v7", "group": "treatment", "step": 3}
    row = row_of(attempt(metadata={"requester_metadata": tags}))
    other = row_of(attempt(metadata={"requester_metadata": tags}, messages="Say no."))
    assert row["policy_version"] == 7
    assert row["group_id"] == other["group_id"] != row["prompt_hash"]


def test_one_broken_record_costs_no_other():
    good = json.dumps(attempt()).encode()
    data = good + b"\n" + good[:200] + b"\n" + json.dumps(attempt(litellm_call_id="call-2")).encode()
    assert [row["source_row"] for row in rows_of(data)] == [1, 3]
    assert [reject.reason for reject in rejects_of(data)] == ["torn_line"]
