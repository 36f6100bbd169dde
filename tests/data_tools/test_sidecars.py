import pyarrow as pa
import pytest

import data_tools
from data_tools.errors import ConfigError, DataError
from tests.data_tools.rollout_rows import many


@pytest.fixture
def ds(tmp_path):
    ds = data_tools.open(str(tmp_path / "ds"), create=True)
    for start in (0, 5000):
        with ds.writer() as writer:
            writer.rollouts(many(5000, start=start))
            writer.commit()
    return ds


def scores(ids):
    return pa.table({"response_id": ids, "logprob": pa.array([-1.0] * len(ids))})


def test_a_sidecar_is_missing_until_its_commit(ds):
    first, second = ds.batches()
    sidecar = ds.sidecar("logprobs", "w1")
    assert sidecar.missing() == [first, second]
    with sidecar.writer(first) as writer:
        for batch in ds.parquet(first).iter_batches(700, columns=["response_id"]):
            writer.write(scores(batch.column(0)))
        assert sidecar.missing() == [first, second]
        writer.commit()
    assert sidecar.missing() == [second]
    assert sidecar.exists(first)
    assert sidecar.parquet(first).metadata.num_rows == 5000
    assert ds.sidecar("logprobs", "w2").missing() == [first, second]


def test_rows_in_another_order_are_refused(ds):
    (first, _) = ds.batches()
    with ds.sidecar("logprobs", "w").writer(first) as writer:
        writer.write(scores(["r0", "r1"]))
        with pytest.raises(DataError, match="rows 2 to 3 are not those of"):
            writer.write(scores(["r3", "r2"]))


def test_too_few_and_too_many_rows_are_refused(ds):
    (first, _) = ds.batches()
    ids = ds.parquet(first).read(["response_id"]).column(0).to_pylist()
    with ds.sidecar("logprobs", "w").writer(first) as writer:
        writer.write(scores(ids[:-1]))
        with pytest.raises(DataError, match="only 4999 rows were written"):
            writer.commit()
    with ds.sidecar("logprobs", "w").writer(first) as writer:
        writer.write(scores(ids))
        with pytest.raises(DataError, match="are not those of"):
            writer.write(scores(["r0"]))
    assert not ds.sidecar("logprobs", "w").exists(first)


def test_a_batch_that_was_replaced_meanwhile_takes_no_sidecar(ds):
    (first, _) = ds.batches()
    with ds.sidecar("logprobs", "w").writer(first) as writer:
        writer.write(scores(ds.parquet(first).read(["response_id"]).column(0)))
        ds.delete("response_id = 'r0'")
        with pytest.raises(DataError, match="was replaced while"):
            writer.commit()
    assert len(ds.sidecar("logprobs", "w").missing()) == 2


def test_a_key_that_is_no_plain_name_is_refused(ds):
    with pytest.raises(ConfigError, match="cannot be"):
        ds.sidecar("tokens", "../rollouts")


def test_an_unknown_column_of_a_sidecar_is_refused(ds):
    (first, _) = ds.batches()
    with (
        ds.sidecar("tokens", "t").writer(first) as writer,
        pytest.raises(DataError, match="unknown column 'logprob'"),
    ):
        writer.write(scores(["r0"]))
