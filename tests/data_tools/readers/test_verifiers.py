"""verifiers' results and prime-rl's rollouts and token exports. Values by hand from the samples."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from data_tools import readers
from tests.data_tools.logged import collected, lines, log_of, reason_of, rollouts, row_of, rows_of

CASES = Path(__file__).parents[2] / "cases"
VERIFIERS, PRIME_RL = CASES / "verifiers", CASES / "prime_rl"
TRACES = PRIME_RL / "rollouts" / "step_12" / "train" / "all" / "traces.jsonl"
EXPORT = PRIME_RL / "token_exports" / "step_12"
NEAR = pytest.approx
ANSWERS = ["Seven crates of 6 make 42 jars.", "7 plus 6 gives 13 jars.", "An Allen key.", "A spoon."]

ROLLOUT = {
    "example_id": 5,
    "prompt": [{"role": "user", "content": "Say ok."}],
    "completion": [{"role": "assistant", "content": "ok"}],
    "reward": 0.0,
    "metrics": {"right": 0.0},
    "timing": {"start_time": 1764003000.5},
}


def grouped_by_two(rows):
    """Whether the first two rows are a group, and the others another."""
    first, second = ({row["group_id"] for row in part} for part in (rows[:2], rows[2:]))
    return len(first) == len(second) == 1 and first != second


def test_results_are_joined_to_their_metadata(tmp_path):
    report = collected(tmp_path, VERIFIERS / "verifiers_eval")
    [(name, what)] = report.companions.items()
    assert name.endswith("metadata.json")
    assert what.startswith("metadata of ")
    rows = rollouts(tmp_path)
    assert [row["response"] for row in rows] == ANSWERS
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, 0.0]
    assert grouped_by_two(rows)
    assert {(row["policy"], row["temperature"], row["logprob_kind"]) for row in rows} == {
        ("demo/policy-1b", 1.0, "unknown")
    }
    assert rows[0]["sampled_at"] == datetime(2025, 11, 24, 16, 50, 0, 500000, tzinfo=UTC)
    assert json.loads(rows[0]["prompt"]) == [
        {"role": "user", "content": "A crate holds 6 jars. How many jars are in 7 crates?"}
    ]
    extra = json.loads(rows[1]["extra"])
    assert (extra["metrics"]["correct_answer"], extra["answer"]) == (0.0, "42")
    assert "correct_answer" not in extra
    assert rows[0]["response_ids"] is None


def test_metadata_alone_holds_no_rollout(tmp_path):
    report = collected(tmp_path, VERIFIERS / "verifiers_eval" / "metadata.json")
    assert (report.total.read, dict(report.total.notes)) == (0, {"not_a_rollout": 1})


def test_the_state_column_trajectory_gives_ids_and_log_probs(tmp_path):
    collected(tmp_path, VERIFIERS / "verifiers_eval_state_columns")
    rows = rollouts(tmp_path)
    assert [row["response"] for row in rows] == ANSWERS
    assert [row["n_tokens"] for row in rows] == [8, 7, 4, 3]
    assert [row["trajectory_id"] for row in rows] == ["tr00", "tr01", "tr10", "tr11"]
    assert grouped_by_two(rows)
    last = rows[3]
    assert last["prompt_ids"] == [1, 1536, 5865, 14124, 16017, 6664, 29275, 21070, 18620]
    assert last["response_ids"] == [5475, 20244, 2]
    assert last["behavior_logprobs"] == NEAR([-0.076574, -0.683131, -1.289689])
    assert (last["reward"], last["turn"], last["loss_mask"]) == (0.0, 0, None)
    assert json.loads(last["extra"])["step"]["advantage"] == -0.5


@pytest.mark.parametrize(
    "path",
    [VERIFIERS / "verifiers_eval", VERIFIERS / "verifiers_eval_state_columns", TRACES, EXPORT],
    ids=lambda path: path.name,
)
def test_collecting_again_adds_nothing(tmp_path, path):
    collected(tmp_path, path)
    again = collected(tmp_path, path)
    assert (again.total.kept, again.total.duplicate) == (0, 4)


def test_each_step_of_a_trajectory_is_a_turn_with_the_reward_of_the_rollout():
    steps = [
        {
            "prompt": "a",
            "completion": "b",
            "tokens": {"prompt_ids": [1], "completion_ids": [2, 3]},
            "reward": 0.1,
        },
        {
            "prompt": "a b c",
            "completion": "d",
            "tokens": {
                "prompt_ids": [1, 2, 3, 4],
                "completion_ids": [5, 6],
                "completion_mask": [1, 0],
                "completion_logprobs": [-0.5, 0.0],
                "is_truncated": True,
            },
        },
    ]
    rows = rows_of(lines(ROLLOUT | {"reward": 2.0, "trajectory": steps}))
    assert [(row["turn"], row["response"], row["reward"]) for row in rows] == [(0, "b", 2.0), (1, "d", 2.0)]
    assert rows[0]["trajectory_id"] == rows[1]["trajectory_id"] is not None
    assert (rows[1]["loss_mask"], rows[1]["finish_reason"]) == ([1, 0], "length")
    assert rows[1]["behavior_logprob"] == -0.5


def test_a_rollout_of_several_turns_without_its_trajectory_is_one_response():
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": "look", "arguments": "{}"}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is 42."},
    ]
    tool = {"name": "look", "parameters": {}}
    row = row_of(ROLLOUT | {"completion": turns, "tool_defs": [tool]})
    assert (row["response"], json.loads(row["response_messages"])) == ("It is 42.", turns)
    assert json.loads(row["tools"]) == [{"type": "function", "function": tool}]


@pytest.mark.parametrize(
    ("fields", "reward"),
    [
        ({}, 0.0),
        ({"metrics": {}}, None),
        ({"error": {"error": "timeout"}}, None),
        ({"error": {"error": "timeout"}, "reward": 0.5}, 0.5),
        ({"metrics": {}, "reward": 1.0}, 1.0),
    ],
)
def test_a_zero_where_nothing_was_scored_is_a_missing_reward(fields, reward):
    row = row_of(ROLLOUT | fields)
    assert (row["reward"], "unscored" in row["flags"]) == (reward, reward is None)


def test_a_trace_is_cut_where_its_first_sampled_token_stands(tmp_path):
    report = collected(tmp_path, TRACES)
    assert [log.format for log in report.logs] == ["verifiers-traces"]
    rows = rollouts(tmp_path)
    assert [row["response"] for row in rows] == ANSWERS
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, 0.0]
    assert grouped_by_two(rows)
    first = rows[0]
    assert first["prompt_ids"][-2:] == [4192, 20578]  # the template opens the turn
    assert first["response_ids"] == [17040, 13359, 11999, 16572, 5347, 9805, 19715, 2]
    assert first["behavior_logprobs"] == NEAR(
        [-0.011, -0.617557, -1.224115, -0.240508, -0.847066, -1.453623, -0.470016, -1.076574]
    )
    assert (first["policy"], first["policy_version"], first["temperature"]) == ("demo/policy-1b", 11, 1.0)
    assert (first["trajectory_id"], first["turn"], first["finish_reason"]) == ("t00", None, "stop")
    assert first["sampled_at"] == datetime(2025, 11, 24, 16, 51, 41, 900000, tzinfo=UTC)
    extra = json.loads(first["extra"])
    assert extra["trace"]["rewards"] == {"correct": {"score": 1.0, "weight": 1.0}}
    assert (extra["advantages"], extra["task"]["data"]["answer"]) == (0.5, "42")


def node(role, content, *ids, parent=None, **fields):
    """A message; one that was sampled begins with a token of the template."""
    made = {"message": {"role": role, "content": content}, "token_ids": list(ids), "mask": [False] * len(ids)}
    if role == "assistant":
        made |= {
            "sampled": True,
            "mask": [False] + [True] * (len(ids) - 1),
            "logprobs": [-0.5] * (len(ids) - 1),
        }
    return made | ({} if parent is None else {"parent": parent}) | fields


def episode(*nodes, **trace):
    return {"id": "e", "traces": [{"id": "t", "nodes": list(nodes)} | trace]}


TURNS = (
    node("user", "q", 1, 2),
    node("assistant", "look()", 9, 3, 4, parent=0),
    node("tool", "42", 5, parent=1),
    node("assistant", "It is 42.", 9, 6, parent=2),
    node("user", "thanks", 8, parent=3),
)


def test_turns_of_a_path_are_one_response_with_tool_results_masked():
    row = row_of(episode(*TURNS, rewards={"a": {"score": 0.5, "weight": 2.0}, "b": {"score": 1.0}}))
    assert (row["prompt_ids"], row["response_ids"]) == ([1, 2, 9], [3, 4, 5, 9, 6])
    assert row["loss_mask"] == [1, 1, 0, 0, 1]
    assert row["behavior_logprobs"] == [-0.5, -0.5, None, None, -0.5]
    assert (row["behavior_logprob"], row["reward"], row["flags"]) == (-1.5, 2.0, [])
    assert json.loads(row["prompt"]) == [{"role": "user", "content": "q"}]
    assert [message["content"] for message in json.loads(row["response_messages"])] == [
        "look()",
        "42",
        "It is 42.",
    ]


def test_each_leaf_of_a_trace_is_a_response_of_its_trajectory():
    branch = (node("user", "again", 7, parent=1), node("assistant", "no", 9, 10, parent=5))
    rows = rows_of(lines(episode(*TURNS, *branch, rewards={"a": {"score": 1.0}})))
    assert [row["response_ids"] for row in rows] == [[3, 4, 5, 9, 6], [3, 4, 7, 9, 10]]
    assert [(row["trajectory_id"], row["turn"], row["reward"]) for row in rows] == [
        ("t", 0, 1.0),
        ("t", 1, 1.0),
    ]
    assert rows[0]["response_id"] != rows[1]["response_id"]


@pytest.mark.parametrize(
    "rewards", [{}, {"a": None}, {"a": {"score": 1.0}, "b": None}, {"a": {"score": "x"}}]
)
def test_a_reward_that_was_not_given_to_its_end_is_missing(rewards):
    assert row_of(episode(*TURNS, rewards=rewards))["reward"] is None


def test_agents_of_an_episode_are_groups_of_their_own_and_one_may_not_be_trained():
    judge = {"id": "j", "nodes": list(TURNS), "agent": {"name": "judge", "trainable": False}}
    record = episode(*TURNS, agent={"name": "solver", "trainable": True}) | {"group": {"id": "g"}}
    record["traces"].append(judge)
    first, second = rows_of(lines(record))
    assert first["group_id"] != second["group_id"]
    assert (first["flags"], second["flags"]) == ([], ["not_trained"])


def test_turns_sampled_at_different_temperatures_have_no_log_probs():
    calls = [{"node": 1, "sampling": {"temperature": 1.0}}, {"node": 3, "sampling": {"temperature": 0.5}}]
    row = row_of(episode(*TURNS, calls=calls))
    assert (row["behavior_logprobs"], row["flags"]) == (None, ["mixed_sampling"])
    assert row["response_ids"] == [3, 4, 5, 9, 6]


def test_messages_without_ids_give_their_texts():
    bare = [
        {name: value for name, value in one.items() if name in ("message", "sampled", "parent")}
        for one in TURNS
    ]
    row = row_of(episode(*bare))
    assert (row["response"], row["response_ids"], row["flags"]) == ("It is 42.", None, [])


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (episode(TURNS[0]), "no_response"),
        (
            {"id": "e", "traces": [{"nodes": [TURNS[0] | {"parent": 0}, TURNS[1] | {"parent": 1}]}]},
            "bad_record",
        ),
    ],
)
def test_a_trace_that_says_nothing_or_runs_in_a_circle_is_refused(record, reason):
    assert reason_of(record) == reason


def test_effective_rollouts_repeat_those_of_all(tmp_path):
    step = tmp_path / "rollouts" / "step_12" / "train"
    shutil.copytree(TRACES.parent, step / "all")
    shutil.copytree(TRACES.parent, step / "effective")
    report = collected(tmp_path, step)
    assert report.total.read == 4
    assert list(report.companions.values()) == [f"repeated rows of {step / 'all' / 'traces.jsonl'}"]
    later = collected(tmp_path, step / "effective")
    assert (later.total.read, later.total.duplicate) == (4, 4)


def test_a_token_export_gives_ids_and_log_probs_of_the_response_alone(tmp_path):
    report = collected(tmp_path, EXPORT)
    assert list(report.skipped.values()) == ["the file is empty"]
    rows = rollouts(tmp_path)
    assert grouped_by_two(rows)
    last = rows[3]
    assert (last["prompt"], last["reward"], last["policy_version"]) == (None, None, 12)
    assert last["prompt_ids"] == [1, 1536, 5865, 14124, 16017, 6664, 29275, 21070, 18620]
    assert last["response_ids"] == [5475, 20244, 2]
    assert last["behavior_logprobs"] == NEAR([-0.076574, -0.683131, -1.289689])
    extra = json.loads(last["extra"])
    assert extra["trainer_logprobs"] == NEAR([-0.079574, -0.686131, -1.292689])
    assert (extra["advantages"], extra["env_name"]) == (-0.5, "jars")
    assert not {"position_ids", "importance_ratio", "rl_weights"} & extra.keys()


def test_an_export_without_its_mark_is_read_with_a_note(tmp_path):
    shutil.copyfile(EXPORT / "rank_0.jsonl", tmp_path / "rank_0.jsonl")
    report = collected(tmp_path, tmp_path / "rank_0.jsonl")
    assert (report.total.kept, dict(report.total.notes)) == (4, {"unfinished_export": 1})


SEQUENCE = {
    "step": 1,
    "rank": 0,
    "token_ids": [1, 2, 3, 4, 5],
    "loss_mask": [False, True, False, True, False],
    "inference_logprobs": [0.0, -0.5, 0.0, -0.25, 0.0],
}


def test_fillers_between_turns_are_no_log_probs():
    row = row_of(SEQUENCE)
    assert (row["prompt_ids"], row["response_ids"], row["loss_mask"]) == ([1], [2, 3, 4], [1, 0, 1])
    assert (row["behavior_logprobs"], row["behavior_logprob"]) == ([-0.5, None, -0.25], -0.75)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"position_ids": [0, 1, 2, 0, 1]}, "bad_record"),
        ({"loss_mask": [False] * 5}, "no_response"),
        ({"loss_mask": [True] * 4}, "bad_mask"),
        ({"loss_mask": [True, 2, 1, 1, 1]}, "bad_mask"),
        ({"loss_mask": [True] * 5}, "no_prompt"),
    ],
)
def test_a_sequence_that_cannot_be_cut_apart_is_refused(fields, reason):
    assert reason_of(SEQUENCE | fields) == reason


def test_log_probs_of_another_length_are_left_out():
    row = row_of(SEQUENCE | {"inference_logprobs": [-0.5, -0.25]})
    assert (row["behavior_logprobs"], row["flags"]) == (None, ["logprob_length"])


def test_plain_rows_with_an_example_id_stay_plain():
    found = readers.detect(log_of(lines({"example_id": 1, "prompt": "a", "completion": "b", "reward": 1.0})))
    assert found is not None
    assert found.name == "rows"
