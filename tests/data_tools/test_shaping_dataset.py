"""Shaping a dataset on disk."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

import data_tools
from data_tools.errors import ConfigError, RecError
from data_tools.schema import TOKEN_COLUMNS
from data_tools.shaping import Shaping, compile, explain, shape
from data_tools.shaping.columns import ROW_COLUMNS
from tests.data_tools.rollout_rows import row, table


@pytest.fixture
def dataset(tmp_path):
    ds = data_tools.open(str(tmp_path / "ds"), create=True, holdout=0.0)
    for batch, version in (("one", 1), ("two", 3)):
        rows = [
            row(
                f"{batch}{i}",
                reward=float(i),
                policy="p",
                policy_version=version,
                response_ids=[1, 2],
                n_tokens=2,
            )
            for i in range(3)
        ]
        with ds.writer(batch) as writer:
            writer.rollouts(table(rows))
            writer.commit()
    return ds


def test_rows_are_found_again_by_file_and_row(dataset):
    rows = shape(dataset, Shaping()).read_all().to_pylist()
    assert {(r["response_id"], r["file"], r["file_row"]) for r in rows} == {
        (f"{batch}{i}", batch, i) for batch in ("one", "two") for i in range(3)
    }
    assert {r["response_id"]: r["advantage"] for r in rows}["two2"] == 1.0


def test_dataset_shapes_itself_and_names_a_wrong_field(dataset):
    assert dataset.shape(Shaping(where="reward > 0")).read_all().num_rows == 4
    with pytest.raises(ConfigError, match="did you mean reward"):
        dataset.shape(Shaping(where="rewad > 0"))


def test_file_that_cannot_be_read_is_no_fault_of_a_field(dataset):
    path = Path(dataset.rollout_path(dataset.batches()[0]))
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[: middle - 1000] + b"\0" * 1000 + content[middle:])
    with pytest.raises(RecError) as caught:
        dataset.shape(Shaping(where="reward > 0")).read_all()
    assert "where =" not in str(caught.value)


def test_staleness_weighs_older_versions_less(dataset):
    rows = shape(dataset, Shaping(weight="staleness_halflife(1)")).read_all().to_pylist()
    assert {(r["file"], r["weight"]) for r in rows} == {("one", 0.25), ("two", 1.0)}


def test_statement_reads_no_token_column(dataset):
    shaping = Shaping(
        drop="balance", weight="red_weight(1) * staleness_halflife(2)", keep="len(response) > 0"
    )
    with dataset.connect() as con:
        plan = con.execute(f"EXPLAIN (FORMAT json) {compile(shaping)}").fetchall()[0][1]
        described = con.execute("DESCRIBE rollouts").fetchall()
    assert "n_tokens" in plan
    assert not [name for name in TOKEN_COLUMNS if name in plan]
    assert {name for name, *_ in described} - set(TOKEN_COLUMNS) == ROW_COLUMNS


def test_compiled_statement_runs_in_rec_sql_as_printed(dataset):
    found = explain(dataset, Shaping(weight="red_weight(1)"))
    assert dataset.sql(found.statement).num_rows == found.kept == 6


def test_age_counts_back_from_the_moment_of_the_connection(tmp_path):
    ds = data_tools.open(str(tmp_path / "ds"), create=True, holdout=0.0)
    with ds.writer() as writer:
        writer.rollouts(table([row("a", reward=1.0, sampled_at=datetime(2026, 1, 1, tzinfo=UTC))]))
        writer.commit()
    with ds.connect(now=datetime(2026, 1, 31, tzinfo=UTC)) as con:
        [shaped] = shape(con, Shaping(weight="age_halflife(30)")).read_all().to_pylist()
    assert shaped["weight"] == pytest.approx(0.5)
