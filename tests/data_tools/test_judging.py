import pytest

import data_tools
from data_tools.errors import ConfigError
from data_tools.rewards.judging import JudgeReport
from tests.data_tools.rollout_rows import row, table


@pytest.fixture
def ds(tmp_path):
    ds = data_tools.open(str(tmp_path / "ds"), create=True)
    rows = [
        row("a", response="4", reward=None, extra='{"answer": "4"}'),
        row("b", response="5", reward=0.0, extra='{"answer": "4"}'),
        row("c", response="4", reward=0.5, extra='{"answer": "4"}'),
        row("d", response=None, reward=0.25, response_ids=[1, 2, 3], n_tokens=3),
    ]
    with ds.writer() as writer:
        writer.rollouts(table(rows))
        writer.commit()
    return ds


def rewards(ds):
    query = "SELECT response_id, reward FROM rollouts ORDER BY response_id"
    return {row["response_id"]: row["reward"] for row in ds.sql(query).to_pylist()}


def test_an_expression_judges_every_row_and_counts_what_changed(ds):
    report = ds.judge("(response = extra->>'answer')::INT")
    assert report == JudgeReport(rows=4, rewarded=2, unchanged=1, not_judged=1)
    assert rewards(ds) == {"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.25}


def test_judging_again_changes_nothing_and_writes_nothing(ds):
    ds.judge("(response = extra->>'answer')::INT")
    files = ds.storage.stems("rewards", ".parquet")
    assert ds.judge("(response = extra->>'answer')::INT").unchanged == 3
    assert ds.storage.stems("rewards", ".parquet") == files


def test_a_condition_bounds_the_rows(ds):
    assert ds.judge("1", where="reward IS NULL").rows == 1
    assert rewards(ds) == {"a": 1.0, "b": 0.0, "c": 0.5, "d": 0.25}


def test_a_function_sees_responses_and_the_columns_that_it_names(ds):
    def right(responses, answer):
        return [float(given == wanted) for given, wanted in zip(responses, answer, strict=True)]

    report = ds.judge(right, source="judge-2")
    assert (report.rewarded, report.not_judged, report.notes) == (2, 1, {"reward_failed": 1})
    [path] = ds.storage.stems("rewards", ".parquet")
    with ds.storage.parquet(f"rewards/{path}.parquet") as file:
        assert set(file.read().column("source").to_pylist()) == {"judge-2"}


def test_a_rule_may_look_at_token_columns(ds):
    ds.judge("len(response_ids)", where="response_ids IS NOT NULL")
    assert rewards(ds)["d"] == 3.0


def test_rows_where_the_rule_fails_keep_their_reward(ds):
    report = ds.judge("7 + 0 * (10 - CAST(response || CASE response WHEN '5' THEN 'x' ELSE '' END AS INT))")
    assert report.notes == {"reward_failed": 1}
    assert rewards(ds) == {"a": 7.0, "b": 0.0, "c": 7.0, "d": 0.25}


def test_progress_is_told_rows_done_and_in_all(ds):
    told = []
    ds.judge("1", progress=lambda done, total: told.append((done, total)))
    assert told == [(4, 4)]


@pytest.mark.parametrize("rule", ["nope + 1", "(SELECT 1)", "sum(reward)"])
def test_a_rule_that_is_no_expression_over_a_row_is_refused(ds, rule):
    with pytest.raises(ConfigError):
        ds.judge(rule)
    assert not ds.storage.stems("rewards", ".parquet")


def test_a_condition_that_is_no_condition_is_refused(ds):
    with pytest.raises(ConfigError):
        ds.judge("1", where="true; DROP TABLE rollouts")
