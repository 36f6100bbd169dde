"""LangSmith's runs and feedback, in OpenAI's and LangChain's forms. Values by hand."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from data_tools import readers
from tests.data_tools.logged import collected, lines, log_of, reason_of, rollouts, row_of, rows_of

LANGSMITH = Path(__file__).parents[2] / "cases" / "langsmith"
SAMPLES = [LANGSMITH / "langsmith_runs.jsonl", LANGSMITH / "langsmith_bulk_export.parquet"]
JARS = [{"role": "user", "content": "A crate holds 6 jars. How many jars are in 7 crates?"}]


def run(identity="r1", **fields):
    record = {
        "id": identity,
        "run_type": "llm",
        "trace_id": identity,
        "parent_run_id": None,
        "session_id": "project",
        "start_time": "2026-01-05T12:00:00",
        "status": "success",
        "inputs": {"messages": [{"role": "user", "content": "Say yes."}]},
        "outputs": {"generations": [[{"text": "Yes."}]]},
    }
    return record | fields


def feedback(of="r1", key="thumb", score=1, **fields):
    return {"run_id": of, "key": key, "score": score, "value": None, "comment": None} | fields


def constructed(name, **held):
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", name], "kwargs": held}


def judged(folder, *records, **options):
    """The report, and the reward and scores of each response."""
    (folder / "log.jsonl").write_bytes(lines(*records))
    report = collected(folder, folder / "log.jsonl", **options)
    rows = rollouts(folder)
    return report, [(row["reward"], json.loads(row["extra"]).get("scores")) for row in rows]


@pytest.mark.parametrize("path", SAMPLES, ids=["jsonl", "parquet"])
def test_runs_of_both_forms_are_rows_with_their_feedback(tmp_path, path):
    report = collected(tmp_path, path)
    assert (report.total.read, report.total.kept, report.total.format) == (4, 4, "langsmith")
    assert report.total.details["reward_of_score"] == "correct"
    rows = rollouts(tmp_path)
    assert [row["response"] for row in rows] == [
        "Seven crates of 6 make 42 jars.",
        "7 plus 6 gives 13 jars.",
        "An Allen key.",
        "A spoon.",
    ]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, 0.0]
    assert json.loads(rows[0]["prompt"]) == json.loads(rows[1]["prompt"]) == JARS
    assert (
        rows[0]["group_id"] == rows[1]["group_id"] != rows[0]["prompt_hash"]
    )  # one example of an experiment
    assert rows[2]["group_id"] == rows[3]["group_id"] != rows[0]["group_id"]
    assert rows[3]["behavior_logprobs"] == pytest.approx([-0.076574, -0.683131])
    assert rows[0]["sampled_at"] == datetime(2026, 1, 5, 12, 0, 0, 120000, UTC)
    assert (rows[1]["policy"], rows[1]["finish_reason"]) == ("demo-model", "stop")
    assert rows[1]["temperature"] == pytest.approx(0.7)
    extra = json.loads(rows[0]["extra"])
    assert extra["scores"] == {"correct": 1.0, "thumb": {"up": 1}}
    assert extra["extra"]["metadata"]["ls_provider"] == "openai"
    assert collected(tmp_path, path).total.kept == 0


def test_a_run_in_two_exports_counts_once(tmp_path):
    report = collected(tmp_path, LANGSMITH)
    assert (report.total.kept, report.total.duplicate) == (4, 4)


def test_feedback_beside_runs_is_joined_by_id(tmp_path):
    records = [run("r1"), run("r2"), feedback("r1"), feedback("r2", score=0), feedback("gone")]
    report, told = judged(tmp_path, *records)
    assert told == [(1.0, {"thumb": 1}), (0.0, {"thumb": 0})]
    assert report.total.notes["joined_score"] == 2
    assert report.total.rejected == {"unmatched_score": 1}


def test_feedback_on_the_root_of_a_trace_is_of_its_only_call(tmp_path):
    root = run("root", run_type="chain", feedback_stats={"thumb": {"n": 1, "avg": 1.0}})
    child = run("child", trace_id="root", parent_run_id="root")
    report, told = judged(tmp_path, root, child)
    assert told == [(1.0, {"thumb": 1.0})]
    assert report.total.notes["not_a_call"] == 1


def test_a_mean_of_feedback_that_differs_is_no_reward_by_itself(tmp_path):
    stats = {"thumb": {"n": 2, "avg": 0.5, "stdev": 0.5}, "same": {"n": 2, "avg": 1.0, "stdev": 0}}
    _, told = judged(tmp_path, run(feedback_stats=stats))
    assert told == [(1.0, {"thumb": {"n": 2, "avg": 0.5}, "same": 1.0})]


def test_langchain_messages_become_those_of_the_api():
    call = {"name": "lift", "args": {"to": 2}, "id": "c1", "type": "tool_call"}
    asked = [
        constructed("SystemMessage", content="Be brief.", type="system"),
        {"type": "human", "data": {"content": "Lift it.", "type": "human"}},
        constructed("AIMessage", content="", tool_calls=[call]),
        constructed("ToolMessage", content="done", tool_call_id="c1", type="tool"),
        ["human", "And now?"],
    ]
    blocks = [{"type": "text", "text": "Now "}, {"type": "text", "text": "rest."}]
    said = constructed("AIMessageChunk", content=blocks, response_metadata={"stop_reason": "end_turn"})
    row = row_of(run(inputs={"messages": [asked]}, outputs={"generations": [[{"message": said}]]}))
    prompt = json.loads(row["prompt"])
    assert [message["role"] for message in prompt] == ["system", "user", "assistant", "tool", "user"]
    assert prompt[2]["tool_calls"][0]["function"] == {"name": "lift", "arguments": {"to": 2}}
    assert (prompt[3]["tool_call_id"], prompt[4]["content"]) == ("c1", "And now?")
    assert (row["response"], row["finish_reason"]) == ("Now rest.", "stop")


def test_inputs_and_outputs_under_other_names_are_read():
    row = row_of(run(inputs={"prompts": ["Say yes."]}, outputs={"output": "Yes."}))
    assert (row["prompt"], row["response"]) == ("Say yes.", "Yes.")
    row = row_of(run(inputs={"question": "Say yes."}, outputs={"answer": 42, "why": "so"}))
    assert (row["prompt"], row["response"]) == ("Say yes.", '{"answer":42,"why":"so"}')
    prompts = {"prompts": ["a", "b"]}
    two = rows_of(lines(run(inputs=prompts, outputs={"generations": [[{"text": "1"}], [{"text": "2"}]]})))
    assert [(row["prompt"], row["response"]) for row in two] == [("a", "1"), ("b", "2")]


def test_failed_and_unfinished_runs_are_refused():
    assert reason_of(run(error="RateLimitError()")) == "failed_call"
    assert reason_of(run(status="pending", outputs=None)) == "no_response"


def test_rows_that_have_a_run_and_a_score_stay_rows():
    record = {"run_id": "r", "key": "k", "score": 1, "comment": "", "prompt": "a", "response": "b"}
    assert readers.detect(log_of(lines(record))).name == "rows"
