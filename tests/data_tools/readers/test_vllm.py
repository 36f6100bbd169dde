"""Responses of a vLLM server: engine ids, versions, floors, reasoning. Values by hand from the samples."""

import json
from pathlib import Path

import pytest

from data_tools import readers
from tests.data_tools.logged import lines, log_of, rejects_of, row_of, rows_of

CASES = Path(__file__).parents[2] / "cases"
ASKED = {"messages": [{"role": "user", "content": "Say yes."}], "temperature": 1.0}
JARS = [1, 5475, 7157, 4437, 16572, 19715, 19413, 20553, 15155, 14990, 23259, 18106, 4192]
NEAR = pytest.approx


def case(name):
    return (CASES / name).read_bytes()


def call(entries, ids, content="ok", **choice):
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "logprobs": {"content": [{"token": token, "logprob": value} for token, value in entries]},
    } | choice
    body = {"id": "v1", "created": 1764002000, "model": "m", "choices": [choice], "prompt_token_ids": [1, 5]}
    return {"request": ASKED, "response": body}


@pytest.mark.parametrize("path", sorted(CASES.glob("vllm_*.jsonl")), ids=lambda path: path.stem)
def test_logs_of_vllm_are_told_from_others_of_the_same_api(path):
    found = readers.detect(log_of(path.read_bytes()))
    assert found is not None
    assert found.name == "vllm"


def test_what_later_records_hold_does_not_change_the_format_of_a_log():
    plain = {
        "request": ASKED,
        "response": {"id": "1", "choices": [{"index": 0, "message": {"content": "a"}}]},
    }
    found = readers.detect(log_of(lines(plain, call([("ok", -0.5)], [9]))))
    assert found is not None
    assert found.name == "openai"


def test_a_chat_response_with_ids_needs_no_request():
    rows = rows_of(case("vllm_chat_return_token_ids.jsonl"))
    assert [row["response"] for row in rows] == [
        "Seven crates of 6 make 42 jars.",
        "7 plus 6 gives 13 jars.",
        "An Allen key.",
        "A spoon.",
    ]
    first, second, third, _ = rows
    assert (first["prompt"], first["prompt_ids"]) == (None, JARS)
    assert first["response_ids"] == [17040, 13359, 11999, 16572, 5347, 9805, 19715, 26462]
    assert second["behavior_logprobs"] == NEAR(
        [-0.076574, -0.683131, -1.289689, -0.306082, -0.912639, -1.519197, -0.53559]
    )
    assert third["behavior_logprob"] == NEAR(-0.011 - 0.617557 - 1.224115 - 0.240508, rel=1e-6)
    assert first["group_id"] == second["group_id"] != third["group_id"]
    assert {row["logprob_kind"] for row in rows} == {"unknown"}
    assert all(row["flags"] == [] for row in rows)


def test_the_version_of_a_response_is_that_of_its_oldest_token():
    rows = rows_of(case("vllm_chat_return_token_ids.jsonl"))
    assert [row["policy_version"] for row in rows] == [12, 12, 12, 12]
    spans = json.loads(rows[1]["extra"])["weight_versions"]
    assert spans == [
        {"version": "step-12", "start": 0, "end": 2},
        {"version": "step-13", "start": 2, "end": 7},
    ]


@pytest.mark.parametrize(
    ("versions", "oldest"),
    [
        (["w000031", "w000030"], 30),
        (["7"], 7),
        ([8], 8),
        (["default"], None),
        (["step-3", "a1b2"], None),
        ([], None),
    ],
)
def test_versions_are_numbers_or_unknown(versions, oldest):
    spans = [{"version": version, "start": 0, "end": 1} for version in versions]
    assert row_of(call([("ok", -0.5)], [9], weight_versions=spans))["policy_version"] == oldest


def test_completions_carry_prompt_ids_in_each_choice_and_the_stop_token():
    rows = rows_of(case("vllm_completions_return_token_ids.jsonl"))
    assert [row["prompt_ids"] for row in rows[:2]] == [JARS, JARS]
    assert rows[2]["response_ids"] == [13724, 11590, 8728, 2]
    assert rows[3]["behavior_logprobs"] == NEAR([-0.076574, -0.683131, -1.289689])
    assert [row["n_tokens"] for row in rows] == [8, 7, 4, 3]
    assert "prompt_logprobs" not in json.loads(rows[0]["extra"])


def test_token_texts_that_are_ids_give_the_ids():
    record = json.loads(case("vllm_chat_tokens_as_token_ids.jsonl").splitlines()[1])
    for choice in record["choices"]:
        del choice["token_ids"]
    rows = rows_of(lines(record))
    assert [row["response_ids"] for row in rows] == [[13724, 11590, 8728, 26462], [5475, 20244, 26462]]
    assert [row["behavior_logprob"] is None for row in rows] == [False, False]
    assert rows_of(case("vllm_chat_tokens_as_token_ids.jsonl"))[2]["response_ids"] == rows[0]["response_ids"]


def test_one_token_text_that_is_no_id_means_no_ids():
    row = row_of(call([("token_id:9", -0.5), ("ok", -0.25)], None))
    assert (row["response_ids"], row["behavior_logprob"]) == (None, None)
    assert row["flags"] == ["logprobs_without_ids"]


def test_a_trimmed_stop_token_comes_back_with_its_id():
    row = row_of(call([("token_id:9", -0.5), ("token_id:2", -0.25)], [9]))
    assert (row["response_ids"], row["behavior_logprobs"]) == ([9, 2], [-0.5, -0.25])


def test_ids_that_contradict_the_token_texts_have_no_log_probs():
    row = row_of(call([("token_id:9", -0.5), ("token_id:2", -0.25)], [9, 3]))
    assert (row["response_ids"], row["behavior_logprobs"], row["flags"]) == ([9, 3], None, ["logprob_length"])


def test_stop_tokens_trimmed_from_ids_cut_a_surplus_at_the_tail_only():
    rows = rows_of(case("troubles/A04_stop_token_length_mismatch.jsonl"))
    assert [row["response_ids"] for row in rows] == [
        [60, 61, 2],
        [60, 61],
        [60, 61],
        [60, 61],
        [60, 61, 2],
        [60, 61],
    ]
    cut = NEAR([-0.1, -0.2])
    assert [row["behavior_logprobs"] for row in rows] == [
        NEAR([-0.1, -0.2, -0.01]),
        cut,
        cut,
        None,
        None,
        cut,
    ]
    assert [row["flags"] for row in rows] == [
        [],
        ["logprob_tail_cut"],
        ["logprob_tail_cut"],
        ["logprob_length"],
        ["logprob_length"],
        ["truncated"],
    ]
    assert [row["prompt_ids"] for row in rows] == [[1, 50, 51]] * 6


def test_the_floor_of_the_engine_is_a_missing_log_prob_and_zero_is_one():
    row = row_of(call([("o", -9999.0), ("k", 0.0)], [9, 10]))
    assert row["behavior_logprobs"] == [None, 0.0]
    assert (row["behavior_logprob"], row["flags"]) == (None, ["missing_logprobs"])


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept_in_the_message(field):
    message = {"role": "assistant", "content": "ok", field: "think"}
    row = row_of(call([("ok", -0.5)], [9], message=message))
    assert row["response"] == "ok"
    assert json.loads(row["response_messages"]) == [message]


def test_older_builds_without_ids_need_the_request():
    data = case("vllm_chat_reasoning_content_era.jsonl")
    assert [reject.reason for reject in rejects_of(data)] == ["no_prompt", "no_prompt"]
    pairs = [{"request": ASKED, "response": json.loads(line)} for line in data.splitlines()]
    rows = rows_of(lines(*pairs))
    assert len(rows) == 4
    assert json.loads(rows[0]["response_messages"])[0]["reasoning_content"] == "count the jars"
    assert (rows[0]["response_ids"], rows[0]["behavior_logprob"]) == (None, None)


def test_an_echo_is_cut_by_ids_where_they_are_known():
    tokens = {"tokens": ["<s>", "red", " ok"], "token_logprobs": [None, -1.5, -0.5], "text_offset": [0, 0, 3]}
    choice = {"index": 0, "text": "red ok", "token_ids": [9], "prompt_token_ids": [1, 5], "logprobs": tokens}
    record = {"request": {"prompt": "red", "echo": True}, "response": {"id": "v", "choices": [choice]}}
    row = row_of(record)
    assert (row["response"], row["response_ids"], row["behavior_logprobs"]) == (" ok", [9], [-0.5])


def test_a_stop_reason_is_kept_beside_the_finish_reason():
    row = row_of(call([("ok", -0.5)], [9], stop_reason="\n\n"))
    assert (row["finish_reason"], json.loads(row["extra"])["stop_reason"]) == ("stop", "\n\n")


def test_how_log_probs_were_computed_is_taken_from_the_log():
    record = call([("ok", -0.5)], [9]) | {"engine": {"name": "vllm", "logprobs_mode": "processed_logprobs"}}
    assert row_of(record)["logprob_kind"] == "processed"
