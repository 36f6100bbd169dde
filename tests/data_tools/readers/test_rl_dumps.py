"""Dumps of trainers: verl, ROLL, ms-swift, SkyRL, TRL, AReaL. Values by hand from the samples."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_tools import readers
from tests.data_tools.logged import collected, lines, log_of, rejects_of, rollouts, row_of, rows_of

CASES = Path(__file__).parents[2] / "cases"
JARS = "A crate holds 6 jars. How many jars are in 7 crates?"
BOLT = "Name one tool that tightens a hex bolt."
SEVEN, SUM, ALLEN, SPOON = (
    "Seven crates of 6 make 42 jars.",
    "7 plus 6 gives 13 jars.",
    "An Allen key.",
    "A spoon.",
)
FOUR = [(SEVEN, 1.0), (SUM, 0.0), (ALLEN, 1.0), (SPOON, 0.0)]
FORMATS = {
    "verl": "verl",
    "roll": "roll",
    "ms_swift": "ms-swift",
    "skyrl": "skyrl",
    "trl": "trl",
    "areal": "areal",
}


def case(name):
    return (CASES / name).read_bytes()


def answers(rows):
    return [(row["response"], row["reward"]) for row in rows]


def table(**columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("folder", FORMATS)
def test_every_dump_is_told_by_its_content(folder):
    files = [path for path in (CASES / folder).rglob("*") if path.is_file()]
    found = {readers.detect(log_of(path.read_bytes())).name for path in files}
    assert found == {FORMATS[folder]}


@pytest.mark.parametrize("folder", FORMATS)
def test_a_dump_that_was_collected_adds_nothing(tmp_path, folder):
    assert collected(tmp_path, CASES / folder).total.kept > 0
    again = collected(tmp_path, CASES / folder)
    assert (again.total.kept, again.batch) == (0, None)


@pytest.mark.parametrize(
    "record",
    [
        {"input": "q", "output": "a", "score": 1.0, "step": 3},
        {"prompt": ["a", "b"], "completion": ["c", "d"], "step": 1},
        {"step": 1, "prompt": "q", "completion": "a"},
        {"input_prompt": "q", "output_response": "a", "score": 1.0},
        {"task_id": 1, "prompt": "q", "completion": "a", "reward": 1.0},
    ],
)
def test_plain_rows_of_similar_names_stay_plain_rows(record):
    assert readers.detect(log_of(lines(record))).name == "rows"


def test_verl_without_uid_groups_equal_prompts():
    rows = rows_of(case("verl/verl_rollout_data_dir/1.jsonl"))
    assert answers(rows) == FOUR
    assert rows[0]["prompt"] == f"user\n{JARS}\nassistant\n"
    assert [row["group_id"] for row in rows] == [row["prompt_hash"] for row in rows]
    assert {row["policy_version"] for row in rows} == {1}
    assert {tuple(row["flags"]) for row in rows} == {("no_special_tokens",)}
    assert json.loads(rows[0]["extra"]) == {"gts": "42", "acc": True, "pred": "42", "request_id": "0b5e-00"}
    assert rows[0]["behavior_logprobs"] is None


def test_verl_with_uid_groups_by_its_sample():
    rows = rows_of(case("verl/verl_rollout_data_dir/2.jsonl"))
    assert answers(rows) == FOUR
    groups = [row["group_id"] for row in rows]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert groups[0] != rows[0]["prompt_hash"]
    assert json.loads(rows[3]["extra"])["uid"] == "u1_1_0"


@pytest.mark.parametrize("uid", ["u0", "u0_1", "_0_0", "u_a_b", 7, None])
def test_a_uid_of_another_shape_names_no_group(uid):
    record = {"input": "q", "output": "a", "gts": None, "score": 1.0, "step": 2, "uid": uid}
    row = row_of(record)
    assert row["group_id"] == row["prompt_hash"]


def test_validation_dumps_repeat_the_score_as_reward():
    rows = rows_of(case("verl/verl_validation_data_dir/20.jsonl"))
    assert answers(rows) == FOUR
    assert json.loads(rows[1]["extra"]) == {"gts": "42", "acc": 0.0}
    assert rows[0]["policy_version"] == 20
    differing = {"input": "q", "output": "a", "gts": "", "score": 1.0, "step": 2, "reward": 0.5}
    assert json.loads(row_of(differing)["extra"])["reward"] == 0.5


def test_a_score_that_is_not_a_number_is_a_missing_reward():
    base = {"input": "q", "output": "a", "gts": "1", "step": 2}
    data = lines(*({**base, "score": score} for score in (float("nan"), "True", [0.0, 1.0], None)), base)
    assert [row["reward"] for row in rows_of(data)] == [None, 1.0, None, None, None]
    assert json.loads(rows_of(data)[2]["extra"])["score"] == [0.0, 1.0]


def test_a_field_of_a_dump_can_be_named_as_the_reward(tmp_path):
    collected(tmp_path, CASES / "verl/verl_rollout_data_dir/1.jsonl", reward="score")
    assert [row["reward"] for row in rollouts(tmp_path)] == [1.0, 0.0, 1.0, 0.0]


def test_roll_unzips_the_columns_of_its_line():
    rows = rows_of(case("roll/rollout_dump_data.step_3.jsonl"))
    assert answers(rows) == FOUR
    assert [row["prompt"] for row in rows] == [JARS, JARS, BOLT, BOLT]
    groups = [row["group_id"] for row in rows]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert groups[0] != rows[0]["prompt_hash"]
    assert {(row["policy_version"], row["temperature"], row["source_row"]) for row in rows} == {(3, 1.0, 1)}
    assert len({row["response_id"] for row in rows}) == 4
    extra = json.loads(rows[2]["extra"])
    assert (extra["ground_truth"], extra["tag"], extra["domain"]) == ("allen key", "jars", "math")


def test_roll_prefers_messages_and_reads_nested_parameters():
    messages = [{"role": "user", "content": "q"}]
    step = {
        "responses": ["a"],
        "scores": [0.5],
        "prompt": ["q"],
        "messages": [json.dumps(messages)],
        "sampling_params": [
            json.dumps({"generation_config": {"temperature": 0.7, "top_p": 0.9, "top_k": 50}})
        ],
    }
    row = row_of(step)
    assert json.loads(row["prompt"]) == messages
    assert (row["temperature"], row["top_p"], row["top_k"]) == (
        pytest.approx(0.7),
        pytest.approx(0.9),
        50,
    )
    assert json.loads(row["extra"])["prompt"] == "q"


def test_a_column_of_another_length_belongs_to_no_row():
    step = {"responses": ["a", "b"], "scores": [1.0], "prompt": ["q", "q"], "sampling_params": ["{}", "{}"]}
    rows = rows_of(lines(step))
    assert [(row["reward"], row["flags"]) for row in rows] == [(None, ["column_length"])] * 2
    short = {"step": ["1"], "prompt": ["q", "q"], "completion": ["a"]}
    [reject] = rejects_of(lines(short))
    assert (reject.reason, reject.detail) == (
        "bad_record",
        "prompt and completion are not lists of one length",
    )


def test_swift_unzips_every_line_and_takes_its_only_reward():
    rows = rows_of(case("ms_swift/ms_swift_completions.jsonl"))
    assert answers(rows) == FOUR * 3
    assert [row["policy_version"] for row in rows] == [5] * 4 + [6] * 4 + [7] * 4
    assert [row["source_row"] for row in rows] == [1] * 4 + [2] * 4 + [3] * 4
    assert json.loads(rows[1]["extra"]) == {"advantages": -0.7}


def test_several_rewards_of_swift_are_left_to_the_user(tmp_path):
    step = {"step": ["1"], "prompt": ["q"], "completion": ["a"], "Accuracy": [1.0], "Format": [0.5]}
    log = tmp_path / "completions.jsonl"
    log.write_bytes(lines({**step, "advantages": [0.1], "entropy": [0.3]}))
    report = collected(tmp_path, log)
    assert report.total.notes == {"several_rewards": 1}
    [row] = rollouts(tmp_path)
    assert row["reward"] is None
    assert json.loads(row["extra"]) == {"Accuracy": 1.0, "Format": 0.5, "advantages": 0.1, "entropy": 0.3}


def test_a_reward_per_token_counts_where_only_the_last_can_matter():
    rows = rows_of(case("skyrl/jars.jsonl"))
    assert answers(rows) == [(f"{text}</s>", reward) for text, reward in FOUR]
    assert rows[0]["prompt"] == f"<s>{JARS}"
    assert {(row["finish_reason"], row["policy_version"]) for row in rows} == {("stop", None)}
    assert rows[0]["group_id"] == rows[1]["group_id"] == rows[0]["prompt_hash"] != rows[2]["group_id"]
    extra = json.loads(rows[2]["extra"])
    assert (extra["data_source"], extra["env_class"]) == ("jars", "jars")
    assert extra["env_extras"] == {"reward_spec": {"ground_truth": "allen key"}}


@pytest.mark.parametrize(
    ("score", "reward"), [(0.5, 0.5), ([0.0, 2.0], 2.0), ([1.0, 0.0], None), ([], None), ([0, None], None)]
)
def test_rewards_of_several_tokens_are_not_summed_unasked(score, reward):
    row = row_of({"input_prompt": "q", "output_response": "a", "score": score, "env_class": "e"})
    assert row["reward"] == reward
    assert reward is not None or json.loads(row["extra"])["score"] == score


def test_the_step_of_skyrl_is_that_of_its_folder(tmp_path):
    folder = tmp_path / "dumped_evals" / "global_step_40_evals"
    folder.mkdir(parents=True)
    (folder / "jars.jsonl").write_bytes(case("skyrl/jars.jsonl"))
    assert collected(tmp_path, folder).total.notes == {"reward_at_token": 4}
    assert {row["policy_version"] for row in rollouts(tmp_path)} == {40}


def test_several_reward_functions_of_trl_leave_the_reward_missing(tmp_path):
    log = CASES / "trl/trl_completions/completions_00010.parquet"
    report = collected(tmp_path, log)
    assert report.total.notes == {"several_rewards": 4}
    rows = rollouts(tmp_path)
    assert answers(rows) == [(text, None) for text, _ in FOUR]
    assert [json.loads(row["extra"]) for row in rows] == [
        {"accuracy_reward": 1.0, "format_reward": 1.0, "advantage": 0.7},
        {"accuracy_reward": 0.0, "format_reward": 0.5, "advantage": -0.7},
        {"format_reward": 1.0, "advantage": 0.6},
        {"format_reward": 0.0, "advantage": -0.6},
    ]
    assert {row["policy_version"] for row in rows} == {10}
    assert [row["source_row"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["group_id"] == rows[1]["group_id"] == rows[0]["prompt_hash"] != rows[2]["group_id"]


def test_rewards_of_trl_are_combined_as_asked(tmp_path):
    log = CASES / "trl/trl_completions/completions_00010.parquet"
    both = "(extra->>'accuracy_reward')::DOUBLE + 0.5 * (extra->>'format_reward')::DOUBLE"
    report = collected(tmp_path, log, reward=both)
    assert report.total.notes == {}
    assert [row["reward"] for row in rollouts(tmp_path)] == [1.5, 0.25, None, None]


def test_a_single_reward_function_of_trl_is_the_reward_and_messages_stay_messages():
    rows = rows_of(case("trl/trl_completions_conversational/completions_00010.parquet"))
    assert answers(rows) == FOUR
    assert json.loads(rows[0]["prompt"]) == [{"role": "user", "content": JARS}]
    assert [json.loads(row["extra"]).get("extracted") for row in rows] == ["42", None, "allen key", None]
    assert {row["policy_version"] for row in rows} == {10}


def test_not_applicable_is_no_reward_and_integers_are_no_reward_functions():
    data = table(step=[1, 1], prompt=["q"] * 2, completion=["a", "b"], n=[3, 4], r=[float("nan"), 1.0])
    assert readers.detect(log_of(data)) is readers.reader("rows")  # there is no advantage yet
    data = table(
        step=[1, 1],
        prompt=["q"] * 2,
        completion=["a", "b"],
        n=[3, 4],
        r=[float("nan"), 1.0],
        advantage=[0.0, 0.5],
    )
    assert [row["reward"] for row in rows_of(data)] == [None, 1.0]
    assert json.loads(rows_of(data)[0]["extra"]) == {"n": 3, "advantage": 0.0}


def test_areal_takes_the_version_of_the_oldest_token_where_it_is_known():
    rows = rows_of(case("areal/5/10.jsonl"))
    assert answers(rows) == [(f"{SEVEN}</s>", 1.0), (f"{SUM}</s>", 0.0)]
    assert rows[0]["prompt"] == f"<s>{JARS}"
    assert [row["policy_version"] for row in rows] == [5, 5]
    assert rows[0]["group_id"] == rows[1]["group_id"] != rows[0]["prompt_hash"]
    assert json.loads(rows[1]["extra"]) == {
        "sample_idx": 1,
        "seqlen": 20,
        "prompt_len": 13,
        "head_version": -1,
        "tail_version": 5,
    }
    mixed = rows_of(case("areal/6/11.jsonl"))
    assert [row["policy_version"] for row in mixed] == [5, 5]
    assert json.loads(mixed[0]["extra"])["tail_version"] == 6


def test_tasks_of_two_files_are_two_groups_unless_they_are_one_run(tmp_path):
    record = {"task_id": 1, "sample_idx": 0, "tail_version": 3, "prompt": "q", "reward": 1.0}
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines({**record, "completion": name}))
    collected(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert len({row["group_id"] for row in rollouts(tmp_path)}) == 2
    (tmp_path / "one").mkdir()
    collected(tmp_path / "one", tmp_path / "a.jsonl", tmp_path / "b.jsonl", run="r")
    assert len({row["group_id"] for row in rollouts(tmp_path / "one")}) == 1
