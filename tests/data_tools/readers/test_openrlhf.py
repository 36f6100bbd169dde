"""Dumps of OpenRLHF's batch inference. Values by hand."""

from pathlib import Path

import pytest

from data_tools import readers
from tests.data_tools.logged import collected, lines, log_of, rollouts, rows_of

CASES = Path(__file__).parents[2] / "cases"
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CRATES = TURN.format("A crate holds 6 jars. How many jars are in 7 crates?")
BOLT = TURN.format("Name one tool that tightens a hex bolt.")


def scored(*rewards, prompt="p"):
    return [{"input": prompt, "output": f"answer {reward}", "reward": reward} for reward in rewards]


def write(folder, **files):
    for name, records in files.items():
        (folder / name.replace("_", ".")).write_bytes(lines(*records))
    return folder


def test_rewards_of_the_reward_model_and_groups_spread_through_the_file():
    rows = rows_of((CASES / "openrlhf_rm_scored.jsonl").read_bytes())
    assert [(row["prompt"], row["response"], row["reward"]) for row in rows] == [
        (CRATES, "Seven crates of 6 make 42 jars.", 1.73),
        (BOLT, "An Allen key.", 1.73),
        (CRATES, "7 plus 6 gives 13 jars.", -0.4),
        (BOLT, "A spoon.", -0.4),
    ]
    assert rows[0]["group_id"] == rows[2]["group_id"] != rows[1]["group_id"] == rows[3]["group_id"]
    assert [(row["response_ids"], row["behavior_logprobs"], row["policy_version"]) for row in rows] == [
        (None, None, None)
    ] * 4


def test_generated_outputs_have_no_reward_and_keep_their_stop_string():
    rows = rows_of((CASES / "openrlhf_generate_vllm.jsonl").read_bytes())
    assert [(row["prompt"], row["response"], row["reward"]) for row in rows] == [
        (CRATES, "Seven crates of 6 make 42 jars.<|im_end|>", None),
        (BOLT, "An Allen key.<|im_end|>", None),
        (CRATES, "7 plus 6 gives 13 jars.<|im_end|>", None),
        (BOLT, "A spoon.<|im_end|>", None),
    ]
    assert len({row["group_id"] for row in rows}) == 2


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"input": "p", "output": "r"}, "openrlhf"),
        ({"input": "p", "output": "r", "reward": None}, "openrlhf"),
        ({"input": "p", "output": "r", "score": 1.0}, "rows"),
        ({"input": "p", "output": "r", "reward": 1.0, "step": 3}, "rows"),
        ({"input": [{"role": "user", "content": "p"}], "output": "r"}, "rows"),
    ],
)
def test_only_these_fields_alone_are_openrlhf(record, name):
    assert readers.detect(log_of(lines(record))).name == name


def test_files_of_ranks_do_not_double_the_merged_one(tmp_path):
    first, second = scored(1.0, 2.0), scored(3.0, 4.0)
    logs = tmp_path / "logs"
    logs.mkdir()
    write(logs, out_jsonl=[*first, *second], out_jsonl0=first, out_jsonl1=second)
    report = collected(tmp_path, logs)
    assert (report.total.read, report.total.kept) == (4, 4)
    assert report.companions == {
        f"{logs}/out.jsonl0": f"rank 0 of {logs}/out.jsonl",
        f"{logs}/out.jsonl1": f"rank 1 of {logs}/out.jsonl",
    }
    assert [row["reward"] for row in rollouts(tmp_path)] == [1.0, 2.0, 3.0, 4.0]
    assert collected(tmp_path, logs).total.kept == 0


def test_files_of_more_ranks_of_an_earlier_run_are_read(tmp_path):
    first, second, old = scored(1.0), scored(2.0), scored(3.0)
    write(tmp_path, out_jsonl=[*first, *second], out_jsonl0=first, out_jsonl1=second, out_jsonl2=old)
    report = collected(
        tmp_path, tmp_path / "out.jsonl", *(tmp_path / f"out.jsonl{rank}" for rank in range(3))
    )
    assert (report.total.kept, len(report.companions)) == (3, 2)


def test_a_merged_file_that_is_a_selection_is_left_out_for_the_whole_groups(tmp_path):
    first, second = scored(1.0, 2.0), scored(3.0, 4.0)
    write(tmp_path, out_jsonl=[second[1]], out_jsonl0=first, out_jsonl1=second)
    report = collected(tmp_path, *(tmp_path / name for name in ("out.jsonl", "out.jsonl0", "out.jsonl1")))
    assert report.total.kept == 4
    assert report.companions == {f"{tmp_path}/out.jsonl": f"selection of {tmp_path}/out.jsonl0"}


def test_logs_that_only_have_such_names_are_all_read(tmp_path):
    write(tmp_path, out_jsonl=scored(1.0), out_jsonl0=scored(2.0))
    report = collected(tmp_path, tmp_path / "out.jsonl", tmp_path / "out.jsonl0")
    assert (report.total.kept, report.companions) == (2, {})
