from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools import schema
from data_tools.errors import DataError
from offline_rec.data import ragged
from offline_rec.data.ragged import gather
from offline_rec.data.rows import Ragged, RowStore
from tests.offline_rec.datasets import StubDataset, rollouts

lists_of_rows = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=12)


@given(lists_of_rows, st.data())
def test_taking_ragged_rows_equals_taking_lists(rows: list[list[int]], data: st.DataObject) -> None:
    ragged = Ragged.from_lists(rows, np.int32)
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=20)) if rows else []
    taken = ragged.take(np.array(wanted, np.int64))
    assert [taken[i].tolist() for i in range(len(taken))] == [rows[i] for i in wanted]


@given(st.lists(lists_of_rows, min_size=1, max_size=4), st.data())
@settings(max_examples=50, deadline=None)
def test_gathering_from_many_arrays_equals_joining_lists(
    arrays: list[list[list[int]]], data: st.DataObject
) -> None:
    parts, picked = [], []
    for rows in arrays:
        index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else []
        parts.append((Ragged.from_lists(rows, np.int32), np.array(index, np.int64)))
        picked += [rows[i] for i in index]
    order = data.draw(st.none() | st.permutations(range(len(picked))))
    wanted = picked if order is None else [picked[i] for i in order]
    found = gather(parts, None if order is None else np.array(order, np.int64))
    assert [found[i].tolist() for i in range(len(found))] == wanted
    assert found.values.dtype == np.int32


@given(lists_of_rows.filter(any), st.data())
@settings(max_examples=50, deadline=None)
def test_long_rows_are_taken_and_padded_like_short_ones(rows: list[list[int]], data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=20)), np.int64)
    short = Ragged.from_lists(rows, np.int32)
    width = max(map(len, rows))
    assert not ragged._are_long(short.offsets, ragged.LONG)
    with patch.object(ragged, "LONG", 0):
        assert ragged._are_long(short.offsets, ragged.LONG)
        taken, padded = short.take(index), short.pad(width, fill=-1)
    assert taken.values.tolist() == short.take(index).values.tolist()
    assert taken.offsets.tolist() == short.take(index).offsets.tolist()
    assert padded.tolist() == short.pad(width, fill=-1).tolist()


@given(lists_of_rows)
def test_padding_fills_on_the_right(rows: list[list[int]]) -> None:
    width = max(map(len, rows), default=0)
    padded = Ragged.from_lists(rows, np.int32).pad(width, fill=-1)
    assert padded.tolist() == [row + [-1] * (width - len(row)) for row in rows]


@given(lists_of_rows)
@settings(deadline=None)
def test_arrow_lists_survive_a_round_trip_and_a_slice(rows: list[list[int]]) -> None:
    array = pa.array([None, *rows], pa.list_(pa.int32()))
    ragged = Ragged.from_arrow(array.slice(1))
    assert ragged.to_arrow().to_pylist() == rows
    assert Ragged.from_arrow(array).lengths.tolist() == [0, *map(len, rows)]


def numbered(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "response_id": f"r{n}",
            "prompt_ids": [n, n + 1],
            "response_ids": [n] * (n % 3),
            "behavior_logprobs": [-0.5] * (n % 3),
        }
        for n in range(first, first + count)
    ]


@pytest.fixture
def ds(tmp_path: Path) -> Any:
    stub = StubDataset(tmp_path)
    stub.write("rollouts/a", rollouts(numbered(0, 10)))
    stub.write("rollouts/b", rollouts(numbered(10, 7)))
    return stub


def test_rows_come_in_the_order_asked_across_files_and_row_groups(ds: Any) -> None:
    asked = [("b", 6), ("a", 9), ("a", 0), ("b", 0), ("a", 9), ("a", 4)]
    rows = RowStore(ds, cache_bytes=1).take([f for f, _ in asked], np.array([r for _, r in asked]))
    numbers = [row + (10 if file == "b" else 0) for file, row in asked]
    assert rows.response_id == [f"r{n}" for n in numbers]
    assert rows.prompt_ids.values.tolist() == [v for n in numbers for v in (n, n + 1)]
    assert [rows.response_ids[i].tolist() for i in range(6)] == [[n] * (n % 3) for n in numbers]
    assert rows.lengths.tolist() == [2 + n % 3 for n in numbers]


@given(st.lists(st.integers(0, 16), max_size=30))
@settings(deadline=None)
def test_taking_by_code_equals_taking_all_and_selecting(wanted: list[int]) -> None:
    every = np.arange(17)
    codes, at = (every >= 10).astype(np.int64), np.where(every >= 10, every - 10, every)
    index = np.array(wanted, np.int64)
    store = shared_store()
    taken = store.take(codes[index], at[index])
    chosen = store.take(codes, at).select(index)
    assert taken.response_id == chosen.response_id
    assert taken.response_ids.values.tolist() == chosen.response_ids.values.tolist()
    assert taken.response_ids.offsets.tolist() == chosen.response_ids.offsets.tolist()


def shared_store(cache: list[RowStore] = []) -> RowStore:  # noqa: B006 - one dataset for all examples
    if not cache:
        import tempfile

        stub: Any = StubDataset(Path(tempfile.mkdtemp()))
        stub.write("rollouts/a", rollouts(numbered(0, 10)))
        stub.write("rollouts/b", rollouts(numbered(10, 7)))
        cache.append(RowStore(stub))
    return cache[0]


def test_missing_masks_are_ones_and_missing_logprobs_are_nan(tmp_path: Path) -> None:
    ds: Any = StubDataset(tmp_path)
    rows = [
        {"prompt_ids": [1], "response_ids": [2, 3]},
        {"prompt_ids": [1], "response_ids": [2, 3], "loss_mask": [0, 1], "behavior_logprobs": [-1.0, None]},
    ]
    ds.write("rollouts/a", rollouts(rows))
    taken = RowStore(ds).take(["a", "a"], np.array([0, 1]))
    assert taken.mask.values.tolist() == [1, 1, 0, 1]
    assert np.isnan(taken.behavior.values).tolist() == [True, True, False, True]
    assert taken.anchor is None


def test_ratio_temperature_is_the_rows_own_only_where_logprobs_are_processed(tmp_path: Path) -> None:
    ds: Any = StubDataset(tmp_path)
    kinds = [("processed", 0.7), ("processed", None), ("processed", 0.0), ("raw", 0.7), ("unknown", 0.7)]
    rows = [{"prompt_ids": [1], "response_ids": [2], "logprob_kind": k, "temperature": t} for k, t in kinds]
    ds.write("rollouts/a", rollouts(rows))
    taken = RowStore(ds).take(["a"] * 5, np.arange(5))
    np.testing.assert_allclose(taken.temperature, [0.7, 1, 1, 1, 1], rtol=1e-6)


def test_rows_without_ids_use_the_tokens_sidecar_and_drop_logged_logprobs(tmp_path: Path) -> None:
    ds: Any = StubDataset(tmp_path)
    rows = [
        {"prompt_ids": [1], "response_ids": [2], "behavior_logprobs": [-0.25]},
        {"behavior_logprobs": [-0.5, -0.5, -0.5]},
        {"response_ids": [4], "behavior_logprobs": [-0.75]},
    ]
    ds.write("rollouts/a", rollouts(rows))
    made = [
        {"response_id": f"r{i}", "prompt_ids": [7, 8], "response_ids": [9, 9], "loss_mask": [1, 0]}
        for i in range(3)
    ]
    made = [row | {"n_prompt_tokens": 2, "n_tokens": 2} for row in made]
    ds.write("tokens/k/a", pa.Table.from_pylist(made, schema=schema.TOKENS))
    at = np.arange(3)

    with pytest.raises(DataError, match="2 of 3 rows have no token ids: r1, r2"):
        RowStore(ds).take(["a"] * 3, at)
    assert RowStore(ds).lengths(["a"] * 3, at)[0].tolist() == [1, -1, -1]

    taken = RowStore(ds, tokens_key="k").take(["a"] * 3, at)
    assert [taken.prompt_ids[i].tolist() for i in at] == [[1], [7, 8], [7, 8]]
    assert [taken.response_ids[i].tolist() for i in at] == [[2], [9, 9], [4]]
    assert [taken.mask[i].tolist() for i in at] == [[1], [1, 0], [1]]
    np.testing.assert_array_equal(taken.behavior.values, np.float32([-0.25, np.nan, np.nan, -0.75]))
    assert [n.tolist() for n in RowStore(ds, tokens_key="k").lengths(["a"] * 3, at)] == [[1, 2, 2], [1, 2, 1]]

    text = RowStore(ds, tokens_key="k", retokenise=True)
    assert text.take(["a"] * 3, at).response_ids.lengths.tolist() == [2, 2, 2]
    assert np.isnan(text.take(["a"] * 3, at).behavior.values).all()
    assert text.lengths(["a"] * 3, at)[1].tolist() == [2, 2, 2]


def test_logprobs_sidecar_of_other_token_ids_is_refused(tmp_path: Path) -> None:
    ds: Any = StubDataset(tmp_path)
    ds.write("rollouts/a", rollouts([{"prompt_ids": [1], "response_ids": [2, 3]}] * 2))
    scored = [{"response_id": "r0", "logprobs": [-1.0, -2.0]}, {"response_id": "r1", "logprobs": None}]
    ds.write("logprobs/good/a", pa.Table.from_pylist(scored, schema=schema.LOGPROBS))
    ds.write(
        "logprobs/bad/a",
        pa.Table.from_pylist([scored[0], {**scored[1], "logprobs": [-1.0]}], schema=schema.LOGPROBS),
    )
    taken = RowStore(ds, anchor_key="good", reference_key="nowhere").take(["a", "a"], np.arange(2))
    assert taken.anchor is not None
    assert taken.reference is not None
    np.testing.assert_array_equal(taken.anchor.values, np.float32([-1, -2, np.nan, np.nan]))
    assert np.isnan(taken.reference.values).all()
    with pytest.raises(DataError, match="1 values for the 2 response tokens of row r1"):
        RowStore(ds, anchor_key="bad").take(["a", "a"], np.arange(2))


def test_no_rows_and_unknown_batches() -> None:
    store = shared_store()
    assert len(store.take([], np.array([], np.int64))) == 0
    with pytest.raises(DataError, match="no batch z"):
        store.take(["z"], np.array([0]))
    with pytest.raises(DataError, match="a has 10 rows, but row 10 is asked for"):
        store.take(["a"], np.array([10]))


def test_only_so_many_row_groups_are_kept_and_rows_of_many_hold_none_of_them(ds: Any) -> None:
    store = RowStore(ds, cache_blocks=2)
    blocks = store._rollouts
    rows = store.take(["a"] * 3, np.array([0, 5, 9]))
    assert [group for _, group in blocks._blocks] == [1, 2]
    held = [block["response_ids"].rows.values for block in blocks._blocks.values()]
    assert not any(np.shares_memory(rows.response_ids.values, values) for values in held)
    every = ["a"] * 3, np.array([0, 5, 9])
    reads = []
    for _ in range(3):
        store.take(*every)
        reads.append(sorted(group for _, group in blocks._blocks))
    assert reads[1:] == [[0, 1, 2]] * 2  # three are asked for again and again, so that three are kept
    few = RowStore(ds, cache_blocks=2)._rollouts
    parts, _ = few._part(("a", 0), np.array([1, 2]), copied=True)
    assert not np.shares_memory(
        parts["prompt_ids"].rows.values, few._blocks["a", 0]["prompt_ids"].rows.values
    )


def test_a_closed_store_holds_nothing_and_reads_anew(ds: Any) -> None:
    store = RowStore(ds)
    every = ["a", "b"], np.array([3, 5])
    before = store.take(*every)
    store.close()
    assert (dict(store._rollouts._blocks), dict(store._rollouts._files), store._rollouts._held) == ({}, {}, 0)
    again = store.take(*every)
    assert again.response_id == before.response_id == ["r3", "r15"]
    assert again.prompt_ids.values.tolist() == before.prompt_ids.values.tolist() == [3, 4, 15, 16]
