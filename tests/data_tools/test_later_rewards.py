import gzip
import io
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data_tools
from data_tools.errors import ConfigError, DataError
from data_tools.rewards.later import RewardReport
from tests.data_tools.rollout_rows import row, table


@pytest.fixture
def ds(tmp_path):
    ds = data_tools.open(str(tmp_path / "ds"), create=True)
    ids = ("a", "b", "c", "007")
    rows = [row(name, reward=0.5, extra=json.dumps({"request": f"q-{name}", "session": "s"})) for name in ids]
    with ds.writer() as writer:
        writer.rollouts(table(rows))
        writer.commit()
    return ds


def rewards(ds):
    return {
        r["response_id"]: r["reward"] for r in ds.sql("SELECT response_id, reward FROM rollouts").to_pylist()
    }


def given(tmp_path, text, name="rewards.csv"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_a_csv_file_is_matched_by_response_id(ds, tmp_path):
    report = ds.add_rewards(given(tmp_path, "response_id,reward\na,1\nb,-0.25\n"))
    assert report == RewardReport(read=2, applied=2, rows=2)
    assert rewards(ds) == {"a": 1.0, "b": -0.25, "c": 0.5, "007": 0.5}


def test_columns_of_other_names_and_an_own_id_of_the_log(ds, tmp_path):
    file = given(tmp_path, "request,thumbs,note\nq-a,true,x\nq-b,False,\n")
    ds.add_rewards(file, id_column="request", value_column="thumbs", on="extra->>'request'")
    assert rewards(ds) == {"a": 1.0, "b": 0.0, "c": 0.5, "007": 0.5}


def test_every_row_of_the_file_is_accounted_for_with_examples(ds, tmp_path):
    report = ds.add_rewards(given(tmp_path, "response_id,reward\na,1\nb,\nc,good\nzz,1\na,nan\n,1\nb,inf\n"))
    assert report == RewardReport(
        read=7, applied=1, empty=1, unknown=2, unusable=3, rows=1,
        examples={"empty": [2], "unknown": [4, 6], "unusable": [3, 5, 7]},
    )  # fmt: skip
    assert rewards(ds) == {"a": 1.0, "b": 0.5, "c": 0.5, "007": 0.5}


def test_an_id_of_digits_keeps_its_zeros(ds, tmp_path):
    assert ds.add_rewards(given(tmp_path, "response_id,reward\n007,1\n")).applied == 1
    assert ds.add_rewards(given(tmp_path, "response_id,reward\n7,2\n")).unknown == 1
    assert rewards(ds)["007"] == 1.0


def test_an_empty_value_takes_back_only_where_it_is_asked_to(ds, tmp_path):
    file = given(tmp_path, "response_id,reward\na,\n")
    assert ds.add_rewards(file).empty == 1
    assert rewards(ds)["a"] == 0.5
    assert ds.add_rewards(file, nulls_retract=True).applied == 1
    assert rewards(ds)["a"] is None


def test_of_two_rewards_for_an_id_the_last_in_the_file_counts_and_both_stay(ds, tmp_path):
    ds.add_rewards(given(tmp_path, "response_id,reward\na,1\na,2\n"))
    assert rewards(ds)["a"] == 2.0
    (name,) = ds.storage.stems("rewards", ".parquet")
    assert ds.storage.parquet(f"rewards/{name}.parquet").read(["reward"]).column(0).to_pylist() == [1.0, 2.0]


def test_an_id_that_names_several_rows_rewards_them_all(ds, tmp_path):
    report = ds.add_rewards(given(tmp_path, "response_id,reward\ns,3\n"), on="extra->>'session'")
    assert (report.applied, report.rows) == (1, 4)
    assert set(rewards(ds).values()) == {3.0}


@pytest.mark.parametrize("form", ["jsonl", "json", "jsonl.gz", "parquet"])
def test_other_forms_of_files_are_read(ds, tmp_path, form):
    rows = [{"response_id": "a", "reward": 1, "x": [1]}, {"response_id": "b", "reward": True, "x": None}]
    rows += [
        {"response_id": "c", "reward": "0.75", "x": None},
        {"response_id": "007", "reward": None, "x": None},
    ]
    path = tmp_path / "file.dat"  # the name says nothing
    if form == "json":
        path.write_text(json.dumps(rows))
    elif form == "parquet":
        pq.write_table(
            pa.table({"response_id": ["a", "b", "c", "007"], "reward": [1.0, 1.0, 0.75, None]}), path
        )
    else:
        text = "".join(json.dumps(r) + "\n" for r in rows).encode()
        path.write_bytes(gzip.compress(text) if form.endswith("gz") else text)
    report = ds.add_rewards(str(path))
    assert (report.read, report.applied, report.empty) == (4, 3, 1)
    assert rewards(ds) == {"a": 1.0, "b": 1.0, "c": 0.75, "007": 0.5}


def test_standard_input_is_read(ds, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"response_id,reward\na,1\n")))
    assert ds.add_rewards("-").applied == 1


def test_a_missing_column_names_those_there_are(ds, tmp_path):
    for file in (given(tmp_path, "id,score\na,1\n"), given(tmp_path, '{"id": "a", "score": 1}\n', "r.jsonl")):
        with pytest.raises(ConfigError, match=r"has no column 'response_id'\n.*id, score"):
            ds.add_rewards(file)


@pytest.mark.parametrize("text", ["", "\x00\x01\x02\x00", '{"response_id": "a", "reward": 1}\n{"respon'])
def test_a_file_that_cannot_be_read_is_an_error_and_adds_nothing(ds, tmp_path, text):
    with pytest.raises(DataError, match=r"broken\.dat"):
        ds.add_rewards(given(tmp_path, text, "broken.dat"))
    assert ds.storage.stems("rewards", ".parquet") == []


def test_a_key_that_is_no_expression_is_refused(ds, tmp_path):
    with pytest.raises(ConfigError, match="the id of the rows"):
        ds.add_rewards(given(tmp_path, "response_id,reward\na,1\n"), on="response_id) FROM rollouts --")
    with pytest.raises(ConfigError, match="the id of the rows"):
        ds.add_rewards(given(tmp_path, "response_id,reward\na,1\n"), on="no_such")


def test_nothing_matched_writes_no_file(ds, tmp_path):
    assert ds.add_rewards(given(tmp_path, "response_id,reward\nzz,1\n")).unknown == 1
    assert ds.storage.stems("rewards", ".parquet") == []


def test_a_reward_that_is_not_finite_is_refused_by_the_writer(ds):
    with (
        ds.rewards_writer("judge") as writer,
        pytest.raises(DataError, match="reward of response b is not finite"),
    ):
        writer.write(pa.table({"response_id": ["a", "b"], "reward": [1.0, float("nan")]}))


def test_the_source_names_the_judge_or_else_the_file(ds, tmp_path):
    file = given(tmp_path, "response_id,reward\na,1\n")
    ds.add_rewards(file)
    ds.add_rewards(file, source="humans")
    (first, second) = ds.storage.stems("rewards", ".parquet")
    found = [
        ds.storage.parquet(f"rewards/{n}.parquet").read(["source"]).column(0).to_pylist()
        for n in (first, second)
    ]
    assert found == [[file], ["humans"]]
