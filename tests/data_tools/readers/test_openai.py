"""Calls of OpenAI's API and its like: pairs in every spelling, choices, echoes, failures. Values by hand."""

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

CASES = Path(__file__).parents[2] / "cases"
ASKED = {"model": "demo", "messages": [{"role": "user", "content": "Say yes."}]}
NEAR = pytest.approx


def case(name):
    return (CASES / name).read_bytes()


def body(*contents, **fields):
    choices = [
        {"index": at, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        for at, content in enumerate(contents)
    ]
    return {"id": "c1", "created": 1764000000, "model": "demo-1", "choices": choices} | fields


def legacy(text, **choice):
    choice = {"index": 0, "text": text, "finish_reason": "stop"} | choice
    return {"id": "t1", "object": "text_completion", "created": 1764000000, "model": "m", "choices": [choice]}


def entries(*pairs):
    return {"content": [{"token": token, "logprob": value} for token, value in pairs]}


def test_every_choice_of_a_pair_is_a_row_of_one_group():
    first, second, *_ = rows_of(case("openai_chat_request_response_pairs.jsonl"))
    assert [first["response"], second["response"]] == [
        "Seven crates of 6 make 42 jars.",
        "7 plus 6 gives 13 jars.",
    ]
    assert first["group_id"] == second["group_id"] == first["prompt_hash"]
    assert first["response_id"] != second["response_id"]
    assert json.loads(first["prompt"]) == [
        {"role": "user", "content": "A crate holds 6 jars. How many jars are in 7 crates?"}
    ]
    assert first["behavior_logprobs"] == NEAR(
        [-0.011, -0.617557, -1.224115, -0.240508, -0.847066, -1.453623, -0.470016]
    )
    assert (first["temperature"], first["top_p"], first["finish_reason"]) == (NEAR(0.7), 1.0, "stop")
    assert first["policy"] == "demo-model-2026-01-01"
    assert first["sampled_at"] == datetime(2025, 11, 24, 16, 0, tzinfo=UTC)
    extra = json.loads(second["extra"])
    assert (extra["index"], extra["usage"]["completion_tokens"], extra["n"]) == (1, 13, 2)
    assert extra["request_model"] == "demo-model"
    assert "reward" not in extra
    assert first["reward"] is None


def test_a_tool_call_without_content_keeps_its_message_and_the_tools_of_the_request():
    *_, row = rows_of(case("openai_chat_request_response_pairs.jsonl"))
    assert row["response"] == ""
    [message] = json.loads(row["response_messages"])
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == '{"row": 3, "shelf": "B"}'
    assert json.loads(row["tools"])[0]["function"]["name"] == "lookup_bin"
    assert json.loads(row["prompt"])[1]["content"] == [{"type": "text", "text": "Where is bin 9?"}]
    assert (row["finish_reason"], row["behavior_logprobs"]) == ("tool_calls", None)


def test_a_body_without_its_request_is_refused_with_a_way_out():
    rejects = rejects_of(case("openai_chat_completion.jsonl"))
    assert [(reject.row, reject.reason) for reject in rejects] == [(n, "no_prompt") for n in (1, 2, 3)]
    assert "join the requests" in rejects[0].detail
    assert '"id":"chatcmpl-inv0000"' in rejects[0].raw


def test_an_echo_in_a_lone_body_gives_the_prompt_where_usage_agrees():
    rows = rows_of(case("openai_completions_legacy.jsonl"))
    assert [(row["source_row"], row["prompt"], row["response"]) for row in rows] == [
        (2, "Name one tool that tightens a hex bolt.", "An Allen key."),
        (2, "Name one tool that tightens a hex bolt.", "A spoon."),
    ]
    assert rows[0]["behavior_logprobs"] == NEAR([-0.092967, -0.699525, -1.306082])
    assert rows[1]["behavior_logprobs"] == NEAR([-0.158541, -0.765098])
    rejects = rejects_of(case("openai_completions_legacy.jsonl"))
    assert [(reject.row, reject.reason) for reject in rejects] == [(1, "no_prompt"), (3, "no_prompt")]


def test_an_echo_that_usage_does_not_confirm_is_no_prompt():
    record = json.loads(case("openai_completions_legacy.jsonl").splitlines()[1])
    record["usage"]["completion_tokens"] = 9
    assert reason_of(record) == "no_prompt"


def test_a_null_at_the_start_of_an_echo_belongs_to_the_prompt():
    rows = rows_of(case("troubles/A02_echo_null_first_logprob.jsonl"))
    assert [(row["prompt"], row["response"], row["behavior_logprobs"]) for row in rows] == [
        ("red blue", " green end", [0.0, -0.25]),
        ("red blue", " mauve", [-3.0]),
    ]
    assert [row["finish_reason"] for row in rows] == ["stop", "length"]
    assert "truncated" in rows[1]["flags"]


def test_an_echo_is_cut_by_token_texts_where_offsets_are_missing():
    tokens = {
        "tokens": ["red", " blue", " green"],
        "token_logprobs": [None, -1.5, -0.5],
        "text_offset": [-1] * 3,
    }
    row = row_of({"prompt": "red blue", **legacy("red blue green", logprobs=tokens)})
    assert (row["response"], row["behavior_logprobs"]) == (" green", [-0.5])


def test_an_echo_whose_log_probs_cannot_be_cut_loses_them_and_says_so():
    row = row_of(
        {
            "request": {"prompt": "red blue", "echo": True},
            "response": legacy("red blue green", logprobs={"token_logprobs": [None, -1.5, -0.5]}),
        }
    )
    assert (row["response"], row["behavior_logprobs"], row["flags"]) == (" green", None, ["logprob_length"])


def test_a_missing_first_log_prob_without_an_echo_stays_missing():
    tokens = {"tokens": ["a", "b"], "token_logprobs": [None, -0.5], "text_offset": [0, 1]}
    row = row_of({"prompt": "red", **legacy("ab", logprobs=tokens)})
    assert (row["response"], row["behavior_logprobs"]) == ("ab", [None, -0.5])
    assert "missing_logprobs" in row["flags"]


def test_a_call_that_only_scored_its_prompt_has_no_response():
    asked = {"prompt": "red blue", "echo": True, "max_tokens": 0}
    assert reason_of({"request": asked, "response": legacy("red blue")}) == "no_response"


def test_text_comes_from_the_message_and_token_texts_never_become_ids():
    rows = rows_of(case("troubles/A03_multibyte_split_tokens.jsonl"))
    assert [row["response"] for row in rows] == ["🎉!"] * 3
    assert [row["response_ids"] for row in rows] == [None, None, [7001, 7002, 33]]
    assert [row["behavior_logprob"] for row in rows] == [None, None, NEAR(-0.6)]
    assert all(row["behavior_logprobs"] == NEAR([-0.1, -0.2, -0.3]) for row in rows)
    assert "logprobs_without_ids" in rows[1]["flags"]


def test_temperature_and_what_log_probs_mean_are_kept_per_row():
    rows = rows_of(case("troubles/A06_temperature_semantics.jsonl"))
    assert [row["logprob_kind"] for row in rows] == ["raw", "processed", "unknown", "unknown"]
    assert [row["temperature"] for row in rows] == NEAR([0.6, 0.6, 0.6, 0.0])
    assert [row["top_p"] for row in rows] == [None, NEAR(0.9), None, None]
    assert [row["reward"] for row in rows] == [1.0, 1.0, 0.0, 1.0]
    flagged = [{"raw_at_temperature", "greedy"} & set(row["flags"]) for row in rows]
    assert flagged == [{"raw_at_temperature"}, set(), {"raw_at_temperature"}, {"greedy"}]


def test_choices_come_by_index_and_missing_ones_flag_the_group():
    chunk_rows = rows_of(case("troubles/A13_n_choices.jsonl"))
    assert [(row["source_row"], row["response"]) for row in chunk_rows] == [
        (1, "first"),
        (1, "second"),
        (2, "only"),
        (4, "p"),
        (4, "q"),
    ]
    assert [row["behavior_logprobs"] for row in chunk_rows[:2]] == [NEAR([-0.1]), None]
    assert ["incomplete_group" in row["flags"] for row in chunk_rows] == [False, False, True, False, False]
    [reject] = rejects_of(case("troubles/A13_n_choices.jsonl"))
    assert (reject.row, reject.reason) == (3, "no_response")


SPELLINGS = {
    "request and response": {"request": ASKED, "response": body("Yes.")},
    "http messages": {
        "request": {"url": "/v1/chat/completions", "body": ASKED},
        "response": {"status_code": 200, "body": body("Yes.")},
    },
    "body and response": {"custom_id": "7", "body": ASKED, "response": {"body": body("Yes.")}},
    "request_body and response_body": {"request_body": ASKED, "response_body": body("Yes.")},
    "input and output": {"input": ASKED, "output": body("Yes.")},
    "messages in and a message out": {
        "input": ASKED["messages"],
        "output": body("Yes.")["choices"][0]["message"],
    },
    "flat": {**ASKED, "response": body("Yes.")},
    "flat in one body": {"messages": ASKED["messages"], **body("Yes.")},
    "flat, request apart": {"request": ASKED, **body("Yes.")},
    "as JSON text": {"request": json.dumps(ASKED), "response": json.dumps(body("Yes."))},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_pair_gives_the_same_prompt_and_response(spelling):
    anchor = {"request": ASKED, "response": body("No.")}  # so that every spelling is in a log of calls
    *_, row = rows_of(lines(anchor, SPELLINGS[spelling]))
    assert json.loads(row["prompt"]) == ASKED["messages"]
    assert (row["response"], row["response_messages"]) == ("Yes.", None)


@pytest.mark.parametrize("spelling", [name for name in SPELLINGS if "messages in" not in name])
def test_a_log_of_any_spelling_is_told_by_its_content(spelling):
    found = readers.detect(log_of(lines(SPELLINGS[spelling])))
    assert found is not None
    assert found.name == "openai"


@pytest.mark.parametrize(
    "record",
    [
        {"question": "2+2?", "choices": [{"label": "A", "text": "4"}], "response": "A"},
        {"prompt": "Say yes.", "response": "Yes."},
        {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "Yes"}}]},
        {"custom_id": "7", "url": "/v1/chat/completions", "body": ASKED},
    ],
)
def test_rows_quizzes_requests_and_pieces_of_streams_are_no_calls(record):
    found = readers.detect(log_of(lines(record)))
    assert found is None or found.name not in ("openai", "vllm")


def test_sampling_parameters_beside_the_request_are_found():
    asked = {"messages": ASKED["messages"], "extra_body": {"top_k": 20, "seed": 3}}
    record = {"request": asked, "model_parameters": {"temperature": 0.5}, "response": body("Yes.")}
    row = row_of(record)
    assert (row["top_k"], row["temperature"], json.loads(row["extra"])["seed"]) == (20, 0.5, 3)


@pytest.mark.parametrize(
    ("record", "detail"),
    [
        ({"request": ASKED, "response": {"status_code": 429, "body": {}}}, "status_code 429"),
        ({"request": ASKED, "response": None, "error": {"message": "overloaded"}}, "overloaded"),
        ({"request": ASKED, "response": {"error": {"code": "too_long"}}}, "too_long"),
        ({"request": ASKED, "response": body("Yes."), "status": "failure"}, "status failure"),
    ],
)
def test_a_failed_call_is_refused_with_what_the_server_said(record, detail):
    [reject] = rejects_of(lines(record))
    assert (reject.reason, reject.detail) == ("failed_call", detail)


def test_failed_lines_of_a_batch_are_told_apart_from_lost_requests():
    rejects = rejects_of(case("openai_batch_errors.jsonl"))
    assert [(reject.reason, reject.detail) for reject in rejects] == [
        ("failed_call", "invented error text"),
        ("failed_call", "invented expiry text"),
    ]


def test_an_error_of_null_is_no_failure_and_an_answer_from_a_cache_no_draw():
    assert row_of({"request": ASKED, "response": body("Yes."), "error": None, "status": 200})["response"]
    assert reason_of({"request": ASKED, "response": body("Yes."), "cache_hit": True}) == "cache_hit"


def test_one_broken_choice_does_not_cost_the_others():
    broken = body("Yes.", "No.", "Maybe.")
    broken["choices"][1] = {"index": 1, "delta": {"content": "N"}}
    data = lines({"request": ASKED, "response": broken})
    assert [row["response"] for row in rows_of(data)] == ["Yes.", "Maybe."]
    assert [reject.reason for reject in rejects_of(data)] == ["bad_record"]


def test_a_refusal_is_the_response_and_keeps_its_message():
    message = {"role": "assistant", "content": None, "refusal": "I cannot."}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": None, "refusal": [{"token": "I cannot.", "logprob": -0.5}]},
    }
    row = row_of({"request": ASKED, "response": body(choices=[choice])})
    assert (row["response"], row["behavior_logprobs"]) == ("I cannot.", [-0.5])
    assert json.loads(row["response_messages"]) == [message]


def test_a_message_that_says_nothing_is_no_empty_response():
    assert reason_of({"request": ASKED, "response": body(None)}) == "no_response"
    assert row_of({"request": ASKED, "response": body("")})["response"] == ""


def test_functions_of_the_older_api_become_tools():
    row = row_of({"request": {**ASKED, "functions": [{"name": "f"}]}, "response": body("Yes.")})
    assert json.loads(row["tools"]) == [{"type": "function", "function": {"name": "f"}}]


def test_several_prompts_of_one_legacy_call_are_several_groups():
    answers = legacy("a")
    answers["choices"] = [
        {"index": at, "text": text, "finish_reason": "stop"} for at, text in enumerate("abcd")
    ]
    rows = rows_of(lines({"request": {"prompt": ["x", "y"], "n": 2}, "response": answers}))
    assert [(row["prompt"], row["response"]) for row in rows] == [
        ("x", "a"),
        ("x", "b"),
        ("y", "c"),
        ("y", "d"),
    ]
    assert not any("incomplete_group" in row["flags"] for row in rows)


def test_a_prompt_of_ids_is_kept_as_ids():
    row = row_of({"request": {"prompt": [5, 6]}, "response": legacy("a")})
    assert (row["prompt"], row["prompt_ids"]) == (None, [5, 6])


def test_one_reward_for_several_responses_is_none_of_theirs():
    data = lines({"request": ASKED, "response": body("Yes.", "No."), "reward": 1.0})
    for row in rows_of(data):
        assert (row["reward"], row["flags"]) == (None, ["shared_reward"])
        assert json.loads(row["extra"])["reward"] == 1.0


def test_rewards_per_choice_follow_the_index():
    two = body("Yes.", "No.")
    two["choices"].reverse()
    assert [
        row["reward"] for row in rows_of(lines({"request": ASKED, "response": two, "score": [1, 0]}))
    ] == [
        1.0,
        0.0,
    ]
    two["choices"][1]["reward"] = 0.25
    rows = rows_of(lines({"request": ASKED, "response": two}))
    assert [row["reward"] for row in rows] == [0.25, None]


def test_fields_beside_the_call_name_group_policy_and_version():
    record = {
        "request": ASKED,
        "response": body("Yes."),
        "task_id": 3,
        "policy": "mine",
        "weight_version": "step-12",
        "tier": "gold",
    }
    row = row_of(record)
    assert (row["policy"], row["policy_version"]) == ("mine", 12)
    assert row["group_id"] != row["prompt_hash"]
    assert json.loads(row["extra"])["tier"] == "gold"


def test_a_call_logged_twice_is_one_draw_and_equal_answers_of_two_calls_are_two(tmp_path):
    log = tmp_path / "calls.jsonl"
    call = {"request": ASKED, "response": body("Yes.")}
    other = {"request": ASKED, "response": body("Yes.", id="c2")}
    log.write_bytes(lines(call, call, other, {"request": ASKED, "response": None, "error": "timeout"}))
    report = collected(tmp_path, log).total
    assert (report.read, report.kept, report.duplicate) == (4, 2, 1)
    assert report.rejected == {"failed_call": 1}
    assert [row["response"] for row in rollouts(tmp_path)] == ["Yes.", "Yes."]


def test_equal_fields_at_two_levels_are_kept_once_and_different_ones_side_by_side():
    record = {
        "request": {**ASKED, "user": "u"},
        "response": body("Yes.", metadata={"a": 1}),
        "metadata": {"b": 2},
    }
    extra = json.loads(row_of(record)["extra"])
    assert (extra["metadata"], extra["response_metadata"], extra["user"]) == ({"b": 2}, {"a": 1}, "u")


def test_records_that_are_no_calls_are_refused_among_calls():
    data = lines({"request": ASKED, "response": body("Yes.")}, {"request": ASKED}, {"hello": 1}) + b"[7]\n"
    reasons = [reject.reason for reject in rejects_of(data)]
    assert reasons == ["no_response", "no_response", "not_an_object"]
    [chunk] = processed(data)
    assert chunk.rows.table.num_rows == 1
