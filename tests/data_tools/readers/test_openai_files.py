"""Fine-tuning files and stored completions of OpenAI. Values by hand."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from data_tools import readers
from tests.data_tools.logged import collected, lines, log_of, reason_of, rejects_of, rollouts, row_of, rows_of

CASES = Path(__file__).parents[2] / "cases"
NEAR = pytest.approx
LIST = CASES / "openai_stored_completions_list.json"
MESSAGES = CASES / "openai_stored_completion_messages.json"


def case(name):
    return (CASES / name).read_bytes()


def turn(role, content, **fields):
    return {"role": role, "content": content, **fields}


@pytest.mark.parametrize("kind", ["sft", "preference", "reinforcement"])
def test_fine_tuning_files_are_told_by_content(kind):
    assert readers.detect(log_of(case(f"openai_finetune_{kind}.jsonl"))).name == "openai-finetune"


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [turn("user", "1+1="), turn("assistant", "2")], "score": 1},
        {"messages": [turn("user", "1+1=")], "response": "2"},
        {"input": "1+1=", "output": "2"},
        {"prompt": [turn("user", "1+1=")], "completion": "2"},
    ],
)
def test_rows_of_conversations_are_left_to_plain_rows(record):
    assert readers.detect(log_of(lines(record))).name not in ("openai-finetune", "openai-stored")


def test_the_last_turns_with_a_weight_are_the_response():
    first, second, third = rows_of(case("openai_finetune_sft.jsonl"))
    assert [turn["role"] for turn in json.loads(first["prompt"])] == ["system", "user", "assistant", "user"]
    assert [row["response"] for row in (first, second, third)] == [
        "Seven crates of 6 make 42 jars.", "An Allen key.", "Aisle 4.",
    ]  # fmt: skip
    assert (first["response_messages"], first["reward"], first["policy"]) == (None, None, None)
    assert [turn["role"] for turn in json.loads(third["response_messages"])] == [
        "assistant",
        "tool",
        "assistant",
    ]
    assert json.loads(third["tools"])[0]["function"]["name"] == "lookup_bin"
    assert json.loads(third["extra"]) == {"parallel_tool_calls": False}


def test_turns_of_weight_0_are_never_part_of_a_response():
    asked, wrong = turn("user", "1+1="), turn("assistant", "3", weight=0)
    right = turn("assistant", "2", weight=1)
    assert row_of({"messages": [asked, right, turn("user", "3+3="), wrong]})["response"] == "2"
    row = row_of({"messages": [asked, wrong, turn("tool", "no"), right]})
    assert ([m["role"] for m in json.loads(row["prompt"])], row["response"]) == (
        ["user", "assistant", "tool"],
        "2",
    )
    assert reason_of({"messages": [asked, wrong]}) == "no_response"
    plain = row_of({"messages": [asked, wrong, right], "score": 1})  # in a log of plain rows
    assert (plain["response"], len(json.loads(plain["prompt"]))) == ("2", 2)


def test_a_weight_does_not_make_another_prompt():
    asked = [turn("user", "1+1="), turn("assistant", "3", weight=0), turn("user", "Again.")]
    rows = rows_of(lines({"messages": [*asked, turn("assistant", "2", weight=1)]}))
    del asked[1]["weight"]
    rows += rows_of(lines({"messages": [*asked, turn("assistant", "2")]}))
    assert rows[0]["prompt_hash"] == rows[1]["prompt_hash"]


def test_both_responses_of_a_preference_are_one_group_without_rewards():
    rows = rows_of(case("openai_finetune_preference.jsonl"))
    assert [(row["response"], json.loads(row["extra"])["preferred"]) for row in rows] == [
        ("Seven crates of 6 make 42 jars.", True),
        ("7 plus 6 gives 13 jars.", False),
        ("An Allen key.", True),
        ("A spoon.", False),
    ]
    assert rows[0]["group_id"] == rows[1]["group_id"] != rows[2]["group_id"] == rows[3]["group_id"]
    assert [(row["reward"], row["tools"]) for row in rows] == [(None, None)] * 4


def test_a_preference_becomes_a_reward_on_demand(tmp_path):
    path = CASES / "openai_finetune_preference.jsonl"
    collected(tmp_path, path, reward="(extra->>'preferred')::BOOL::INT")
    assert [row["reward"] for row in rollouts(tmp_path, order="reward")] == [0.0, 0.0, 1.0, 1.0]
    assert collected(tmp_path, path).total.kept == 0


def test_a_preference_in_older_words_or_without_a_side():
    record = json.loads(case("openai_finetune_preference.jsonl").splitlines()[0])
    record["preferred_completion"] = record.pop("preferred_output")
    record["non_preferred_completion"] = record.pop("non_preferred_output")
    assert len(rows_of(lines(record))) == 2
    record["non_preferred_completion"] = None
    data = lines(record)
    assert [row["response"] for row in rows_of(data)] == ["Seven crates of 6 make 42 jars."]
    assert [reject.reason for reject in rejects_of(data)] == ["no_response"]


def test_prompts_of_reinforcement_fine_tuning_are_no_responses():
    found = [(reject.row, reject.reason, reject.detail[:8]) for reject in
             rejects_of(case("openai_finetune_reinforcement.jsonl"))]  # fmt: skip
    assert found == [(1, "no_response", "a prompt"), (2, "no_response", "a prompt")]


def test_a_stored_completion_finds_its_messages_and_the_reward_that_was_noted(tmp_path):
    report = collected(tmp_path, LIST, MESSAGES)
    assert report.companions == {str(MESSAGES): f"messages of {LIST}"}
    assert (report.total.kept, report.total.rejected) == (1, {"no_prompt": 1})  # one has no messages here
    [row] = rollouts(tmp_path)
    assert json.loads(row["prompt"]) == [turn("user", "A crate holds 6 jars. How many jars are in 7 crates?")]
    assert (row["response"], row["reward"]) == ("Seven crates of 6 make 42 jars.", 1.0)
    assert row["behavior_logprobs"] == NEAR(
        [-0.011, -0.617557, -1.224115, -0.240508, -0.847066, -1.453623, -0.470016]
    )
    assert (row["temperature"], row["top_p"], row["policy"]) == (NEAR(0.8), 1.0, "demo-model-2026-01-01")
    assert row["sampled_at"] == datetime(2025, 11, 24, 16, 0, tzinfo=UTC)
    extra = json.loads(row["extra"])
    assert (extra["seed"], extra["metadata"]) == (7, {"task": "jars", "reward": "1.0"})
    assert collected(tmp_path, LIST, MESSAGES).total.kept == 0


def completion(id, content, **metadata):
    choice = {"index": 0, "message": turn("assistant", content), "finish_reason": "stop"}
    named = {"id": id, "object": "chat.completion", "created": 1764000000, "request_id": "r"}
    return {**named, "choices": [choice], "metadata": metadata}


def page(*items, more=False):
    return {"object": "list", "data": list(items), "has_more": more}


def message(id, content):
    return {"id": id, "role": "user", "content": content, "name": None, "content_parts": None}


def test_overlapping_pages_hold_each_completion_once(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(page(completion("c1", "2", group_id="g"))))
    again = completion("c1", "2", group_id="g", later="yes")
    (tmp_path / "b.jsonl").write_bytes(lines(page(again, completion("c2", "3", group_id="g"))))
    (tmp_path / "m.jsonl").write_bytes(lines(page(message("c1-0", "1+1=")), page(message("c2-0", "1+1="))))
    report = collected(tmp_path, *(tmp_path / f"{name}.jsonl" for name in "abm")).total
    assert (report.read, report.kept, report.duplicate) == (3, 2, 1)
    first, second = rollouts(tmp_path)
    assert first["group_id"] == second["group_id"] != first["prompt_hash"]


def test_a_prompt_of_which_a_page_is_missing_is_no_prompt(tmp_path):
    (tmp_path / "list.json").write_bytes(lines(page(completion("c1", "2"))))
    first, second = page(message("c1-0", "1+1="), more=True), page(message("c1-1", "Now."))
    (tmp_path / "first.json").write_bytes(lines(first))
    assert collected(tmp_path, tmp_path / "list.json", tmp_path / "first.json").total.rejected == {
        "no_prompt": 1
    }
    (tmp_path / "second.json").write_bytes(lines(second))
    report = collected(tmp_path, *(tmp_path / f"{name}.json" for name in ("list", "first", "second")))
    assert report.total.kept == 1
    [row] = rollouts(tmp_path)
    assert [turn["content"] for turn in json.loads(row["prompt"])] == ["1+1=", "Now."]


def test_messages_alone_are_no_completions():
    assert readers.detect(log_of(MESSAGES.read_bytes())).name == "openai-stored"
    [reject] = rejects_of(MESSAGES.read_bytes())
    assert reject.reason == "no_response"
