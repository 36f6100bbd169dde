"""Rewards that are defined at collect: a field, SQL, a function. What fails is null and counted, never 0."""

import json
import math
from pathlib import Path

import pytest

import data_tools
from data_tools.errors import ConfigError
from data_tools.rewards.named import REWARDS
from data_tools.rewards.rules import reward_rule
from tests.data_tools.logged import collected, lines, rollouts

TROUBLES = Path(__file__).parent.parent / "cases" / "troubles"
HERE = __name__


def judged(tmp_path, records, reward):
    """Collect with a reward; its rewards by row, and the report."""
    log = tmp_path / "log.jsonl"
    log.write_bytes(lines(*records))
    report = collected(tmp_path, log, reward=reward).logs[0]
    return [row["reward"] for row in rollouts(tmp_path)], report


def rows(*answers, **fields):
    return [{"prompt": "q", "response": answer} | fields for answer in answers]


def test_a_field_of_the_log_is_the_reward_read_as_rewards_are(tmp_path):
    report = collected(tmp_path, TROUBLES / "A11_rewards_as_strings_and_bools.jsonl", reward="acc").logs[0]
    found = rollouts(tmp_path)
    rewards = [row["reward"] for row in found]
    assert rewards == [1.0, 0.0, None, 3.0, None, None, 1.0, 1.0, 1.0, 1.0]
    assert (report.kept, report.rejected) == (10, {})  # the score of "1,5" counts no more
    assert report.notes["reward_unreadable"] == 2
    assert report.where["reward_unreadable"] == [3, 5]
    assert report.notes["reward_from_text"] == 3
    assert json.loads(found[8]["extra"])["score"] == "1,5"


def test_the_logged_reward_can_be_part_of_the_rule_and_stays_in_extra(tmp_path):
    records = rows("a", score=0.5) + rows("b", score=None) + rows("c", score="high")
    rewards, report = judged(tmp_path, records, "reward * 2 - 1")
    assert rewards == [0.0, None, None]
    assert report.notes == {"reward_unreadable": 1}
    assert json.loads(rollouts(tmp_path)[0]["extra"]) == {"score": 0.5}


def test_a_list_of_rewards_counts_once_it_is_said_how(tmp_path):
    source = TROUBLES / "A11_rewards_as_strings_and_bools.jsonl"
    sql = "CASE WHEN extra->>'score' LIKE '[%' THEN list_sum((extra->'score')::DOUBLE[]) END"
    collected(tmp_path, source, reward=sql)
    assert [row["reward"] for row in rollouts(tmp_path)].count(1.0) == 1


def test_a_field_that_some_rows_lack_is_counted_by_name(tmp_path):
    rewards, report = judged(tmp_path, rows("a", acc=1) + rows("b"), "acc")
    assert rewards == [1.0, None]
    assert report.notes["reward_absent"] == 1
    assert any("no field 'acc'" in line for line in report_lines(tmp_path, "acc"))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("exct", "exact"),
        ("acccuracy", "accuracy"),
        ("thumb", "thumbs"),
        ("behavior_logprobz", "behavior_logprob"),
    ],
)
def test_a_name_that_stands_for_nothing_is_an_error_that_names_the_nearest(tmp_path, name, nearest):
    records = rows("a", "b", accuracy=1) + rows("c", scores={"thumbs": 1})
    with pytest.raises(ConfigError, match=repr(name)) as caught:
        judged(tmp_path, records, name)
    assert caught.value.hint.startswith(f"did you mean '{nearest}")
    assert list((tmp_path / "ds" / "rollouts").glob("*")) == []


def test_a_name_that_is_like_nothing_is_told_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match="no reward, and no record has a field") as caught:
        judged(tmp_path, rows("a", acc=1), "zzz")
    assert caught.value.hint == f"rewards: {', '.join(REWARDS)}; fields of the records: acc"


def report_lines(tmp_path, reward):
    log = tmp_path / "again.jsonl"
    log.write_bytes(lines(*rows("x", acc=1), *rows("y")))
    return collected(tmp_path, log, reward=reward).lines()


def test_sql_reads_columns_and_fields_of_extra(tmp_path):
    records = rows("so 42", gold="42") + rows("so 41", gold="42") + rows("so", gold=None)
    sql = "(response LIKE '%' || (extra->>'gold'))::INT -- the gold answer is somewhere"
    assert judged(tmp_path, records, sql)[0] == [1.0, 0.0, None]


@pytest.mark.parametrize(
    ("sql", "rewards"),
    [
        ("length(response) / 2", [0.5, 1.0]),
        ("0.25::DECIMAL(4, 2)", [0.25, 0.25]),
        ("response = 'a'", [1.0, 0.0]),
        ("extra->>'acc'", [1.0, 1.0]),
        ("extra->>'verdict'", [None, None]),
        ("CASE response WHEN 'a' THEN 'nan'::DOUBLE ELSE 'inf'::DOUBLE END", [None, None]),
        ("n_tokens", [None, None]),
    ],
)
def test_results_of_sql_become_numbers_or_null(tmp_path, sql, rewards):
    assert judged(tmp_path, rows("a", "bc", acc="True", verdict="good"), sql)[0] == rewards


def test_a_row_for_which_sql_fails_is_null_and_the_others_are_judged(tmp_path):
    records = rows("1", "x", "2") + rows(None, response_ids=[5])
    rewards, report = judged(tmp_path, records, "response::DOUBLE")
    assert rewards == [1.0, None, 2.0, None]
    assert report.notes == {"reward_failed": 1}
    assert report.where["reward_failed"] == [2]
    assert "Could not convert string 'x'" in report.details["reward_failed"]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("avg(reward)", "looks beyond its row"),
        ("reward - avg(reward) OVER ()", "looks beyond its row"),
        ("unnest([1, 2])", "looks beyond its row"),
        ("acc * 2", "acc"),
        ("(SELECT 1)", "subquery"),
        ("1; DROP TABLE x", "--reward"),
        ("read_text('/etc/passwd')", "--reward"),
        ("response +", "--reward"),
    ],
)
def test_sql_that_is_no_expression_over_one_row_is_refused_before_anything_is_read(tmp_path, sql, message):
    with pytest.raises(ConfigError) as error:
        data_tools.collect([str(tmp_path / "none.jsonl")], str(tmp_path / "ds"), reward=sql)
    assert message in str(error.value)
    assert not (tmp_path / "ds").exists()


def by_length(responses, answers, weight=None):
    return [float(len(text) == answer) for text, answer in zip(responses, answers, strict=True)]


def fails_on_x(responses):
    if "x" in responses:
        raise ValueError("an x")
    return [1.0 for _ in responses]


def always_fails(responses):
    raise ZeroDivisionError("never")


def too_short(responses):
    return []


def strange(responses):
    return [{"a": None, "b": math.nan, "c": "good"}.get(text, 1) for text in responses]


def told(responses, **columns):
    told.columns = columns
    return [1] * len(responses)


def test_a_function_gets_the_columns_and_fields_that_it_names(tmp_path):
    rewards, _ = judged(tmp_path, rows("ab", answers=2) + rows("ab", answers=3), f"{HERE}:by_length")
    assert rewards == [1.0, 0.0]


def test_a_function_with_open_columns_gets_all_of_them(tmp_path):
    judged(tmp_path, rows("ab", reward=0.5, tier="gold"), told)
    assert (told.columns["prompt"], told.columns["reward"], told.columns["tier"]) == (["q"], [0.5], ["gold"])


def test_only_the_rows_for_which_a_function_fails_are_null(tmp_path):
    rewards, report = judged(tmp_path, rows("a", "x", "b", reward=0.25), f"{HERE}:fails_on_x")
    assert rewards == [1.0, None, 1.0]
    assert report.notes == {"reward_failed": 1}
    assert report.where["reward_failed"] == [2]
    assert report.details["reward_failed"].endswith("fails_on_x: ValueError: an x")


@pytest.mark.parametrize(
    ("function", "error"), [("always_fails", "ZeroDivisionError: never"), ("too_short", "returned []")]
)
def test_a_function_that_never_works_leaves_every_reward_missing(tmp_path, function, error):
    rewards, report = judged(tmp_path, rows("a", "b"), f"{HERE}:{function}")
    assert rewards == [None, None]
    assert report.notes["reward_failed"] == 2
    assert error in report.details["reward_failed"]


def test_what_a_function_returns_besides_numbers_is_null_and_none_is_no_error(tmp_path):
    rewards, report = judged(tmp_path, rows("a", "b", "c", "d"), f"{HERE}:strange")
    assert rewards == [None, None, None, 1.0]
    assert report.where["reward_failed"] == [2, 3]


def test_a_row_without_text_is_not_shown_to_a_function(tmp_path):
    records = rows(None, response_ids=[5, 6]) + rows("ab", answers=2)
    rewards, report = judged(tmp_path, records, f"{HERE}:by_length")
    assert rewards == [None, 1.0]
    assert report.details["reward_failed"] == "no response text"


@pytest.mark.parametrize("name", ["no_such_module:f", f"{HERE}:no_such_function", f"{HERE}:HERE"])
def test_a_function_that_is_not_there_is_an_error(name):
    with pytest.raises(ConfigError, match="reward"):
        reward_rule(name)


def test_a_column_that_a_function_needs_and_the_log_lacks_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="takes the column 'answers'"):
        judged(tmp_path, rows("a"), f"{HERE}:by_length")


def test_a_reward_object_is_used_as_it_is(tmp_path):
    from offline_rec import rewards as named

    found, _ = judged(tmp_path, rows(" 42", answers="42") + rows("41", answers="42"), named.get("exact"))
    assert found == [1.0, 0.0]
