"""rLLM's episodes, as files and as JSON lines. Values by hand from the samples."""

import json
import shutil
from pathlib import Path

import pytest

from tests.data_tools.logged import collected, lines, reason_of, rollouts, row_of, rows_of

CASES = Path(__file__).parents[2] / "cases" / "rllm"
NEAR = pytest.approx
ANSWERS = ["Seven crates of 6 make 42 jars.", "7 plus 6 gives 13 jars.", "An Allen key.", "A spoon."]
SUMMARY = {"training_step": 4, "num_episodes": 4, "episode_files": [], "summary_stats": {"total_correct": 2}}


def step(said, **fields):
    return {
        "chat_completions": [{"role": "user", "content": "q"}],
        "model_response": said,
        "reward": 0.0,
    } | fields


def episode(*steps, **fields):
    trajectory = {"uid": "u", "name": "solver", "reward": 1.0, "steps": list(steps)}
    return {"id": "task0:0", "trajectories": [trajectory]} | fields


def test_files_of_one_task_and_step_are_a_group(tmp_path):
    report = collected(tmp_path, CASES / "rllm_episodes")
    assert {log.format for log in report.logs} == {"rllm"}
    rows = rollouts(tmp_path)
    assert [row["response"] for row in rows] == ANSWERS
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, 0.0]
    first, second = ({row["group_id"] for row in part} for part in (rows[:2], rows[2:]))
    assert len(first) == len(second) == 1
    assert first != second
    assert {row["policy_version"] for row in rows} == {4}
    assert [(row["trajectory_id"], row["turn"]) for row in rows[:2]] == [("uid-00", 0), ("uid-01", 0)]
    assert json.loads(rows[2]["prompt"]) == [
        {"role": "user", "content": "Name one tool that tightens a hex bolt."}
    ]
    assert (rows[0]["response_ids"], rows[0]["response_messages"]) == (None, None)
    extra = json.loads(rows[3]["extra"])
    assert (extra["task"]["ground_truth"], extra["is_correct"], extra["epoch"]) == ("allen key", False, 0)


def test_json_lines_give_ids_log_probs_and_weight_versions():
    rows = rows_of((CASES / "rllm_episode_to_dict.jsonl").read_bytes())
    assert [row["response"] for row in rows] == ANSWERS
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, 0.0]
    assert rows[0]["group_id"] == rows[1]["group_id"] != rows[2]["group_id"] == rows[3]["group_id"]
    assert rows[3]["prompt_ids"] == [1, 1536, 5865, 14124, 16017, 6664, 29275, 21070, 18620]
    assert rows[3]["response_ids"] == [5475, 20244, 2]
    assert rows[3]["behavior_logprobs"] == NEAR([-0.076574, -0.683131, -1.289689])
    assert {row["policy_version"] for row in rows} == {4}


@pytest.mark.parametrize("name", ["rllm_episodes", "rllm_episode_to_dict.jsonl"])
def test_collecting_again_adds_nothing(tmp_path, name):
    collected(tmp_path, CASES / name)
    again = collected(tmp_path, CASES / name)
    assert (again.total.kept, again.total.duplicate) == (0, 4)


def test_the_summary_of_a_folder_is_named_and_left_out(tmp_path):
    shutil.copytree(CASES / "rllm_episodes", tmp_path / "log")
    summary = tmp_path / "log" / "train_step_4_epoch_0" / "batch_summary.json"
    summary.write_text(json.dumps(SUMMARY, indent=2))
    report = collected(tmp_path, tmp_path / "log")
    assert report.total.read == 4
    assert report.companions[str(summary)].startswith("summary of the folder of ")
    alone = collected(tmp_path, summary)
    assert (alone.total.read, dict(alone.total.notes)) == (0, {"not_a_rollout": 1})


def test_each_step_is_a_turn_with_the_reward_of_its_trajectory():
    rows = rows_of(
        lines(episode(step("a"), step("b", reward=0.5), termination_reason="max_response_length_exceeded"))
    )
    assert [(row["turn"], row["response"], row["reward"]) for row in rows] == [(0, "a", 1.0), (1, "b", 1.0)]
    assert {row["trajectory_id"] for row in rows} == {"u"}
    assert [row["finish_reason"] for row in rows] == [None, "length"]


def test_a_trajectory_without_a_reward_has_those_of_its_steps():
    record = episode(step("a", reward=None), step("b", reward=0.5))
    record["trajectories"][0]["reward"] = None
    assert [row["reward"] for row in rows_of(lines(record))] == [None, 0.5]


def test_agents_of_an_episode_are_groups_of_their_own():
    record = episode(step("a"))
    record["trajectories"].append({"uid": "v", "name": "judge", "reward": 0.0, "steps": [step("right")]})
    solver, judge = rows_of(lines(record))
    assert solver["group_id"] != judge["group_id"]


def test_files_of_other_steps_are_other_groups(tmp_path):
    for number in (4, 5):
        record = episode(step("a"), training_step=number, epoch=0, episode_id="task0:0", task_hash="ff")
        (tmp_path / f"{number}.json").write_text(json.dumps(record, indent=2))
    collected(tmp_path, tmp_path / "4.json", tmp_path / "5.json")
    assert len({row["group_id"] for row in rollouts(tmp_path)}) == 2


def test_a_step_without_a_conversation_is_asked_by_its_observation():
    row = row_of(episode(step(None, chat_completions=[], observation="q", action="go")))
    assert (row["prompt"], row["response"]) == ("q", "go")


def test_an_episode_that_broke_off_before_its_first_step_is_counted():
    assert reason_of(episode()) == "no_response"
