"""Steps of NeMo-RL: padding cut, zeros that are no log-probs, rewards of filtered batches. Values by hand."""

import json
from pathlib import Path

import pytest

from data_tools import readers
from tests.data_tools.logged import collected, lines, log_of, rejects_of, rollouts, row_of, rows_of

CASES = Path(__file__).parents[2] / "cases" / "nemo_rl"
JARS = [1, 5475, 7157, 4437, 16572, 19715, 19413, 20553, 15155, 14990, 23259, 18106, 4192]
NEAR = pytest.approx
PADDED = {
    "content": ["ab"],
    "rewards": [1.0],
    "input_lengths": [6],
    "token_ids": [[5, 6, 7, 8, 9, 10, 0, 0]],
    "token_loss_mask": [[0, 0, 1, 0, 1, 1, 0, 0]],
    "generation_logprobs": [[0.0, 0.0, -0.5, 0.0, 0.0, -0.25, 0.0, 0.0]],
    "idx": 0,
}


def case(name):
    return (CASES / name).read_bytes()


@pytest.mark.parametrize("name", ["train_data_step1.jsonl", "val_data_step10.jsonl"])
def test_both_logs_are_told_by_their_content_and_collected_once(tmp_path, name):
    assert readers.detect(log_of(case(name))).name == "nemo-rl"
    assert collected(tmp_path, CASES / name).total.kept == 4
    assert collected(tmp_path, CASES / name).total.kept == 0


def test_prompt_response_and_log_probs_are_cut_out_of_the_padded_ids():
    first, second, third, fourth = rows_of(case("train_data_step1.jsonl"))
    assert first["prompt_ids"] == second["prompt_ids"] == JARS
    assert first["response_ids"] == [17040, 13359, 11999, 16572, 5347, 9805, 19715, 2]
    assert first["behavior_logprobs"] == NEAR(
        [-0.011, -0.617557, -1.224115, -0.240508, -0.847066, -1.453623, -0.470016, -1.076574]
    )
    assert second["behavior_logprob"] == NEAR(
        -0.076574 - 0.683131 - 1.289689 - 0.306082 - 0.912639 - 1.519197 - 0.53559, rel=1e-6
    )
    assert third["prompt_ids"] == [1, 1536, 5865, 14124, 16017, 6664, 29275, 21070, 18620]
    assert (third["response_ids"], fourth["response_ids"]) == ([13724, 11590, 8728, 2], [5475, 20244, 2])
    assert [row["reward"] for row in (first, second, third, fourth)] == [1.0, 0.0, 1.0, 0.0]
    assert first["group_id"] == second["group_id"] == first["prompt_hash"] != third["group_id"]
    assert (first["prompt"], first["response"], first["loss_mask"]) == (None, None, None)
    extra = json.loads(fourth["extra"])
    assert extra["content"] == "<s>Name one tool that tightens a hex bolt.A spoon.</s>"
    assert (extra["advantages"], extra["sample_loss_mask"], extra["idx"]) == (-0.5, 1.0, 3)
    assert extra["prev_logprobs"] == NEAR([-0.076574, -0.683131, -1.289689])


def test_the_version_is_the_step_in_the_file_name(tmp_path):
    collected(tmp_path, CASES)
    query = "source_file LIKE '%train%' AS train, policy_version"
    found = {(row["train"], row["policy_version"]) for row in rollouts(tmp_path, query)}
    assert found == {(True, 1), (False, 10)}
    assert rows_of(case("train_data_step1.jsonl"))[0]["policy_version"] is None


def test_zeros_on_other_turns_are_no_log_probs_and_a_zero_of_the_policy_is_one():
    row = row_of(PADDED)
    assert (row["prompt_ids"], row["response_ids"]) == ([5, 6], [7, 8, 9, 10])
    assert row["loss_mask"] == [1, 0, 1, 1]
    assert row["behavior_logprobs"] == [-0.5, None, 0.0, -0.25]
    assert (row["behavior_logprob"], row["flags"]) == (-0.75, [])


def test_a_missing_log_prob_of_the_policy_is_flagged():
    row = row_of({**PADDED, "generation_logprobs": [[0.0, 0.0, -0.5, 0.0, None, -0.25, 0.0, 0.0]]})
    assert (row["behavior_logprob"], row["flags"]) == (None, ["missing_logprobs"])


def test_log_probs_of_another_length_are_left_out():
    row = row_of({**PADDED, "generation_logprobs": [[-0.5, 0.0, -0.25]]})
    assert (row["behavior_logprobs"], row["flags"]) == (None, ["logprob_length"])
    assert row_of({**PADDED, "generation_logprobs": []})["behavior_logprobs"] is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_loss_mask": [[0] * 8]}, "no_response"),
        ({"token_loss_mask": [[0, 1]]}, "bad_mask"),
        ({"token_loss_mask": [[0, 0, 1, 2, 1, 1, 0, 0]]}, "bad_mask"),
        ({"input_lengths": [5]}, "bad_mask"),
        ({"input_lengths": [9]}, "bad_mask"),
        ({"token_ids": ["tensor([5, 6])"]}, "bad_mask"),
    ],
)
def test_what_contradicts_itself_is_refused(change, reason):
    [reject] = rejects_of(lines({**PADDED, **change}))
    assert reject.reason == reason


def test_without_a_length_the_response_ends_with_the_policys_last_token():
    record = {name: value for name, value in PADDED.items() if name != "input_lengths"}
    assert row_of(record)["response_ids"] == [7, 8, 9, 10]


def test_rewards_before_filtering_are_those_of_other_rows():
    row = row_of({**PADDED, "rewards": [0.0], "filtered_rewards": [1.0]})
    assert (row["reward"], json.loads(row["extra"])["rewards"]) == (1.0, 0.0)
    assert row_of({**PADDED, "filtered_rewards": []})["reward"] is None


def test_validation_data_are_conversations():
    rows = rows_of(case("val_data_step10.jsonl"))
    assert [(row["response"], row["reward"]) for row in rows] == [
        ("Seven crates of 6 make 42 jars.", 1.0),
        ("7 plus 6 gives 13 jars.", 0.0),
        ("An Allen key.", 1.0),
        ("A spoon.", 0.0),
    ]
    assert json.loads(rows[2]["prompt"]) == [
        {"role": "user", "content": "Name one tool that tightens a hex bolt."}
    ]
    assert rows[0]["group_id"] == rows[1]["group_id"] != rows[2]["group_id"]
    assert json.loads(rows[3]["extra"]) == {"idx": 3}
