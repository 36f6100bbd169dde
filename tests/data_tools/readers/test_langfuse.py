"""Langfuse: observations, traces and the scores beside them. Values by hand."""

import csv
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.data_tools.logged import collected, lines, reason_of, rollouts, row_of, rows_of

LANGFUSE = Path(__file__).parents[2] / "cases" / "langfuse"
OBSERVATIONS, SCORES = LANGFUSE / "observations_v2.jsonl", LANGFUSE / "scores.jsonl"
JARS = [{"role": "user", "content": "A crate holds 6 jars. How many jars are in 7 crates?"}]


def generation(identity="o1", **fields):
    record = {
        "id": identity,
        "trace_id": "t1",
        "project_id": "p1",
        "type": "GENERATION",
        "parent_observation_id": "",
        "start_time": "2026-01-05 12:00:00",
        "input": "Say yes.",
        "output": "Yes.",
    }
    return record | fields


def score(of="o1", name="correct", value=1, **fields):
    record = {"trace_id": "t1", "observation_id": of, "name": name, "value": value, "data_type": "NUMERIC"}
    return record | {"string_value": None, "source": "API"} | fields


def written(folder, observations, scores):
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "observations.jsonl").write_bytes(lines(*observations))
    (folder / "logs" / "a_scores.jsonl").write_bytes(lines(*scores))
    return folder / "logs"


def judged(folder, observations, scores, **options):
    """The report, and the reward, scores and flags of each response."""
    report = collected(folder, written(folder, observations, scores), **options)
    rows = rollouts(folder)
    told = [(row["reward"], json.loads(row["extra"]).get("scores"), row["flags"]) for row in rows]
    return report, told


def test_generations_are_rows_and_scores_of_a_folder_are_joined_to_them(tmp_path):
    report = collected(tmp_path, LANGFUSE)
    calls, scores = report.logs
    assert (calls.input_rows, calls.read, calls.kept) == (4, 3, 3)
    assert calls.notes == {"not_a_call": 1, "reward_of_score": 2, "several_scores": 1}
    assert calls.details == {"reward_of_score": "correct", "several_scores": "correct, thumbs"}
    assert (scores.input_rows, scores.read, scores.notes) == (5, 0, {"joined_score": 5})
    [(left_out, why)] = report.companions.items()
    assert left_out.endswith("traces_legacy.jsonl")
    assert why.startswith("traces of ")
    first, second, tool = rollouts(tmp_path)
    assert [row["reward"] for row in (first, second, tool)] == [1.0, 0.0, None]
    assert json.loads(first["prompt"]) == json.loads(second["prompt"]) == JARS
    assert (first["response"], tool["response"]) == ("Seven crates of 6 make 42 jars.", "An Allen key.")
    assert first["group_id"] == second["group_id"] != tool["group_id"]
    assert (first["policy"], first["policy_version"]) == ("demo-model", 12)
    assert first["temperature"] == pytest.approx(0.7)
    assert first["sampled_at"] == datetime(2026, 1, 5, 12, 0, 0, 120000, UTC)
    assert json.loads(tool["extra"])["scores"] == {"note": "fine answer", "thumbs": 1.0, "tone": "good"}
    assert json.loads(tool["extra"])["tags"] == ["g1"]
    assert collected(tmp_path, LANGFUSE).total.kept == 0


def test_exports_as_csv_say_the_same(tmp_path):
    for path in (OBSERVATIONS, SCORES):
        records = [json.loads(line) for line in path.read_bytes().splitlines()]
        with (tmp_path / f"{path.stem}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            texts = [{key: as_text(value) for key, value in record.items()} for record in records]
            writer.writerows(texts)
    collected(tmp_path, *tmp_path.glob("*.csv"))
    rows = rollouts(tmp_path)
    assert [(row["reward"], row["policy_version"]) for row in rows] == [(1.0, 12), (0.0, 12), (None, 12)]
    assert [json.loads(row["prompt"]) for row in rows[:2]] == [JARS, JARS]


def as_text(value):
    return json.dumps(value) if isinstance(value, dict | list) else value


def test_a_rule_takes_any_score_by_its_name(tmp_path):
    report = collected(tmp_path, LANGFUSE, reward="thumbs")
    assert [row["reward"] for row in rollouts(tmp_path)] == [None, None, 1.0]
    assert "several_scores" not in report.total.notes
    sql = "coalesce((extra->'scores'->>'correct')::DOUBLE, (extra->'scores'->>'thumbs')::DOUBLE / 2)"
    (tmp_path / "other").mkdir()
    collected(tmp_path / "other", LANGFUSE, reward=sql)
    assert [row["reward"] for row in rollouts(tmp_path / "other")] == [1.0, 0.0, 0.5]


def test_traces_alone_are_rows_and_scores_of_traces_theirs(tmp_path):
    report = collected(tmp_path, LANGFUSE / "traces_legacy.jsonl", SCORES)
    rows = rollouts(tmp_path)
    assert [(row["prompt"], row["response"]) for row in rows] == [
        (JARS[0]["content"], "Seven crates of 6 make 42 jars."),
        ("Name one tool that tightens a hex bolt.", "An Allen key."),
    ]
    assert [row["reward"] for row in rows] == [None, 1.0]
    assert report.total.rejected == {"unmatched_score": 4}  # of observations that nobody collected


def test_scores_alone_are_counted_and_not_lost(tmp_path):
    report = collected(tmp_path, SCORES)
    assert report.total.rejected == {"unmatched_score": 5}


def test_scores_of_several_names_make_no_reward_until_one_is_chosen(tmp_path):
    observations = [generation("o1"), generation("o2"), generation("o3")]
    scores = [score("o1"), score("o1", "polite", 0.5), score("o2", value=0)]
    report, told = judged(tmp_path, observations, scores)
    assert told == [(None, {"correct": 1, "polite": 0.5}, []), (None, {"correct": 0}, []), (None, None, [])]
    assert report.total.notes["several_scores"] == 2
    assert report.total.details["several_scores"] == "correct, polite"


def test_categories_and_texts_are_no_rewards(tmp_path):
    scores = [
        score(name="tone", value=1, data_type="CATEGORICAL", string_value="good"),
        score(name="note", value=0, data_type="TEXT", string_value="fine"),
    ]
    assert judged(tmp_path, [generation()], scores)[1] == [(None, {"note": "fine", "tone": "good"}, [])]


def test_a_score_of_a_trace_is_of_its_only_response_and_of_none_of_several(tmp_path):
    observations = [
        generation("o1"),
        generation("o2", trace_id="t2"),
        generation("o3", trace_id="t2", output="No."),
        generation("root", trace_id="t2", type="SPAN"),
        generation("tool", trace_id="t2", type="TOOL", parent_observation_id="root"),
    ]
    scores = [
        score(None, "thumbs", 1),
        score("root", "thumbs", 0, trace_id="t2"),
        score("tool", "thumbs", 1, trace_id="t2"),
    ]
    report, told = judged(tmp_path, observations, scores)
    assert told[0] == (1.0, {"thumbs": 1}, [])
    assert told[1] == told[2] == (None, {"thumbs": 0}, ["shared_reward"])
    assert report.total.rejected == {"unmatched_score": 1}  # a tool's run is no response


def test_of_a_score_that_was_exported_twice_the_latest_counts(tmp_path):
    scores = [
        score(value=1, id="s1", updated_at="2026-01-05 12:00:02"),
        score(value=0, id="s1", updated_at="2026-01-05 12:00:01"),
    ]
    assert judged(tmp_path, [generation()], scores)[1] == [(1.0, {"correct": 1}, [])]


def test_scores_of_one_name_that_differ_are_no_reward(tmp_path):
    report, told = judged(tmp_path, [generation()], [score(value=1), score(value=0)])
    assert told == [(None, {"correct": [0, 1]}, [])]
    assert report.total.notes["scores_differ"] == 1


def test_an_observation_that_was_exported_again_with_other_costs_is_a_duplicate(tmp_path):
    report, _ = judged(tmp_path, [generation(total_cost=0), generation(total_cost=1)], [])
    assert (report.total.kept, report.total.duplicate) == (1, 1)


def test_input_and_output_may_be_texts_messages_or_bodies():
    assert row_of(generation(input="[1, 2]"))["prompt"] == "[1, 2]"
    tools = [{"type": "function", "function": {"name": "lift"}}]
    row = row_of(generation(input={"messages": JARS, "tools": tools}, output={"answer": 42}))
    assert json.loads(row["prompt"]) == JARS
    assert json.loads(row["tools"]) == tools
    assert row["response"] == '{"answer":42}'
    choices = [{"message": {"role": "assistant", "content": text}} for text in ("a", "b")]
    rows = rows_of(lines(generation(output=json.dumps({"choices": choices}))))
    assert [row["response"] for row in rows] == ["a", "b"]


def test_the_spelling_of_the_api_is_read_too():
    record = {
        "id": "o1",
        "traceId": "t1",
        "type": "GENERATION",
        "parentObservationId": None,
        "startTime": "2026-01-05T12:00:00.000Z",
        "input": JARS,
        "output": {"role": "assistant", "content": "42"},
        "model": "demo",
        "modelParameters": {"temperature": 1},
    }
    row = row_of(record)
    assert (row["response"], row["policy"], row["temperature"]) == ("42", "demo", 1.0)
    assert row["sampled_at"] == datetime(2026, 1, 5, 12, tzinfo=UTC)


def test_a_failed_or_empty_generation_is_refused():
    assert reason_of(generation(level="ERROR", status_message="429")) == "failed_call"
    assert reason_of(generation(output="")) == "no_response"
    assert reason_of(generation(input="")) == "no_prompt"
