"""Groups by order: only where their size is told, and only where the log names none."""

from pathlib import Path

import pytest

from data_tools.errors import ConfigError
from tests.data_tools.logged import collected, draw, lines, rollouts

CASES = Path(__file__).parents[1] / "cases"


def groups(folder):
    """The places of the rows of each group, in the order of the log."""
    keys = [row["group_id"] for row in rollouts(folder, "group_id")]
    return [keys.index(key) for key in keys]


def test_equal_prompts_are_told_apart_by_a_declared_size(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(lines(*(draw(response=str(n)) for n in range(5))))
    assert collected(tmp_path, log, group_size=2).total.notes == {}
    assert groups(tmp_path) == [0, 0, 2, 2, 4]


def test_a_line_that_cannot_be_used_keeps_its_place(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(lines(draw(response="a")) + b'{"torn\n' + lines(draw(response="b"), draw(response="c")))
    collected(tmp_path, log, group_size=2)
    assert groups(tmp_path) == [0, 1, 1]


def test_a_group_that_the_log_names_stays(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(lines(draw(task_id=1), draw(response="b"), draw(task_id=1), draw(response="d")))
    collected(tmp_path, log, group_size=2)
    assert groups(tmp_path) == [0, 1, 0, 3]


def test_responses_of_one_line_are_counted_within_it(tmp_path):
    log = CASES / "ms_swift" / "ms_swift_completions.jsonl"
    assert collected(tmp_path, log, group_size=2).total.notes == {}
    assert groups(tmp_path) == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10]


def test_places_of_two_files_never_meet(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(lines(draw(response=name), draw(response="c")))
    collected(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl", group_size=2, run="r")
    assert groups(tmp_path) == [0, 0, 2, 2]


def test_a_size_that_does_not_fit_shows_in_the_prompts(tmp_path):
    report = collected(tmp_path, CASES / "nemo_rl" / "train_data_step1.jsonl", group_size=3)
    assert report.total.notes == {"several_prompts": 1}


def test_a_size_of_one_and_rows_of_csv_cannot_be_counted(tmp_path):
    log = tmp_path / "log.csv"
    log.write_bytes(b"prompt,response\nq,a\nq,b\n")
    for size in (1, 2):
        with pytest.raises(ConfigError, match="--group-size"):
            collected(tmp_path, log, group_size=size)
