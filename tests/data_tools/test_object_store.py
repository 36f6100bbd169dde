"""The same dataset behind an fsspec URL: fsspec's in-memory store stands for s3, gs and hf."""

import contextlib

import fsspec
import pyarrow as pa
import pytest

import data_tools
from data_tools.errors import ConfigError, DataError, MissingExtra
from tests.data_tools.rollout_rows import many


@pytest.fixture
def url():
    yield "memory://bucket/some/prefix"
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/", recursive=True)


@pytest.fixture
def ds(url):
    ds = data_tools.open(url, create=True)
    for start in (0, 10):
        with ds.writer() as writer:
            writer.rollouts(many(10, start=start))
            writer.rejects(pa.table({"reason": ["torn_line"]}))
            writer.commit()
    return ds


def test_a_dataset_is_written_and_queried(ds, url):
    found = data_tools.open(url)
    assert found.info == ds.info
    assert found.sql("SELECT count(*) AS n, count(DISTINCT file) AS files FROM rollouts").to_pylist() == [
        {"n": 20, "files": 2}
    ]
    assert set(found.sql("SELECT DISTINCT file FROM rollouts").column(0).to_pylist()) == set(found.batches())
    assert found.sql("FROM rejects").num_rows == 2
    assert found.stats()["bytes"]["rollouts"] > 0


def test_what_is_no_dataset_says_so(url):
    with pytest.raises(DataError, match="is not a dataset"):
        data_tools.open(url)


def test_nothing_reaches_the_store_before_the_commit(ds):
    store = fsspec.filesystem("memory")
    before = store.find(ds.storage.path)
    with ds.writer() as writer:
        writer.rollouts(many(10_000, start=100))
        assert store.find(ds.storage.path) == before
    assert store.find(ds.storage.path) == before


def test_sidecars_rewards_policies_delete_and_compact_work(ds):
    sidecar = ds.sidecar("logprobs", "w")
    for batch in sidecar.missing():
        with sidecar.writer(batch) as writer:
            writer.write(ds.parquet(batch).read(["response_id"]))
            writer.commit()
    with ds.rewards_writer("judge") as writer:
        writer.write(pa.table({"response_id": ["r1", "r2"], "reward": [5.0, 6.0]}))
        writer.commit()
    ds.write_policy(data_tools.PolicyCard(name="org/p"))
    assert list(ds.policies()) == ["org/p"]
    assert ds.delete("reward = 5").rows == 1
    assert "r1" in ds.erased()
    assert ds.compact().files_after == 1
    (batch,) = ds.batches()
    assert sidecar.parquet(batch).read(["response_id"]) == ds.parquet(batch).read(["response_id"])
    assert ds.sql("SELECT response_id FROM rollouts WHERE reward > 1").to_pylist() == [{"response_id": "r2"}]
    assert len(ds.storage.entries("swaps")) == 1  # the last one, done


def test_the_connection_reads_nothing_else_of_the_store(ds):
    fsspec.filesystem("memory").pipe("/elsewhere.parquet", b"x")
    with pytest.raises(ConfigError):
        ds.sql("SELECT * FROM read_blob('memory:///elsewhere.parquet')")
    with ds.connect() as con, pytest.raises(Exception, match="disabled by configuration"):
        con.sql("SELECT * FROM read_blob('memory:///elsewhere.parquet')").fetchall()


@pytest.mark.parametrize("url", ["nonsense://x/y", "s3://"])
def test_an_unknown_or_uninstalled_store_is_a_readable_error(url):
    with pytest.raises((DataError, MissingExtra), match=r"://|s3fs"):
        data_tools.open(url)
