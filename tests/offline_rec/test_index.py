"""The index on disk: groups side by side, where they lie, what is left out and why."""

import numpy as np
import pytest

from data_tools.errors import DataError
from data_tools.shaping import COLUMNS, Shaping, prepare
from data_tools.shaping.statement import keeps_groups_whole, stages, with_stages
from offline_rec.data import index as index_module
from offline_rec.data.admission import Admission
from offline_rec.data.index import HOME, Index, build_index, home_of
from tests.offline_rec.logged import dataset

STATEMENT = """
    SELECT response_id, group_id AS group_key, file, file_row, reward - 0.5 AS advantage,
        CASE WHEN response_id = 'unused' THEN 0.0 ELSE 1.0 + turn END AS weight,
        CAST(coalesce(policy_version, 1) AS DOUBLE) AS priority, false AS expert, reward, temperature,
        n_prompt_tokens, n_tokens
    FROM rollouts"""


def row(name, group, *, tokens=3, **columns):
    made = {
        "response_id": name,
        "group_id": group,
        "prompt": group,
        "prompt_ids": [5, 6],
        "turn": 0,
        "reward": 1.0,
    }
    return made | {"response_ids": [7] * tokens, "temperature": 1.0} | columns


def build(tmp_path, rows, *, batches=1, admission=None, statement=STATEMENT):
    ds = dataset(tmp_path / "ds", rows, batches=batches)
    with ds.connect() as con:
        admission = Admission(batches=ds.batches(), **(admission or {}))
        counts = build_index(con, statement, tmp_path / "index", admission=admission, priority="priority")
    return counts, Index(tmp_path / "index")


def test_rows_of_a_group_lie_side_by_side_in_the_order_of_the_dataset(tmp_path):
    rows = [row("a0", "a"), row("b0", "b"), row("a1", "a"), row("c0", "c"), row("b1", "b"), row("a2", "a")]
    counts, index = build(tmp_path, rows, batches=2)
    assert (counts.rows, counts.groups, counts.tokens) == (6, 3, 30)
    taken = index.take(np.array([0, 1, 2]))
    assert taken.response_id == ["a0", "a1", "a2", "b0", "b1", "c0"]
    assert taken.group.tolist() == [0, 0, 0, 1, 1, 2]
    assert taken.file.tolist() == [0, 0, 1, 0, 1, 1]
    assert taken.file_row.tolist() == [0, 2, 2, 1, 1, 0]
    assert taken.advantage.tolist() == [0.5] * 6


def test_groups_are_taken_in_any_order_and_a_repeated_one_is_two(tmp_path):
    _, index = build(tmp_path, [row("a0", "a"), row("a1", "a"), row("b0", "b", tokens=5)])
    taken = index.take(np.array([1, 0, 1]))
    assert taken.response_id == ["b0", "a0", "a1", "b0"]
    assert taken.group.tolist() == [0, 1, 1, 2]
    assert index.tokens(np.array([1, 0])).tolist() == [7, 10]
    assert len(index.take(np.array([], np.int64))) == 0


def test_what_is_left_out_is_counted_by_reason(tmp_path):
    rows = [
        row("kept", "a"),
        row("unused", "a"),
        row("greedy", "a", temperature=0.0),
        row("long", "a", tokens=9),
        row("empty", "a", tokens=0),
        row("textual", "a", prompt_ids=None, response_ids=None),
        row("masked", "a", loss_mask=[0, 0, 0]),
        row("partly_masked", "a", loss_mask=[0, 1, 0]),
        row("unknown_temperature", "a", temperature=None),
    ]
    counts, index = build(tmp_path, rows, admission={"max_tokens": 10, "needs_ratio": True})
    reasons = {"zero_weight": 1, "no_tokens": 2, "masked": 1, "too_long": 1, "temperature_0": 1}
    assert counts.left_out == reasons
    assert index.take(np.array([0])).response_id == ["kept", "partly_masked", "unknown_temperature"]


def test_a_greedy_row_stays_where_no_ratio_is_needed(tmp_path):
    counts, _ = build(tmp_path, [row("greedy", "a", temperature=0.0)])
    assert counts.rows == 1


def test_lengths_of_text_rows_come_from_the_tokens_made_for_them(tmp_path):
    def lengths(file, file_row):
        return np.full(len(file), 2), np.where(file_row == 0, 4, -1)

    text = {"prompt_ids": None, "response_ids": None}
    rows = [row("made", "a", **text), row("not_made", "a", **text), row("logged", "a")]
    counts, index = build(tmp_path, rows, admission={"lengths": lengths})
    assert counts.left_out["no_tokens"] == 1
    assert index.tokens(np.array([0])).tolist() == [6 + 5]
    counts, index = build(tmp_path / "again", rows, admission={"lengths": lengths, "retokenise": True})
    assert counts.left_out["no_tokens"] == 2
    assert index.tokens(np.array([0])).tolist() == [6]


def test_a_group_cut_by_the_stream_is_still_one(tmp_path, monkeypatch):
    rows = [row(f"{g}{k}", g, tokens=k + 1, policy_version=k) for g in "abcd" for k in range(5)]
    whole = build(tmp_path / "whole", rows)[1]
    # DuckDB hands out vectors of 2048 rows, so that the batches are cut here.
    writer_add = index_module._IndexWriter.add

    def add_in_pieces(self, batch):
        for start in range(0, len(batch), 3):
            writer_add(self, batch.slice(start, 3))

    monkeypatch.setattr(index_module._IndexWriter, "add", add_in_pieces)
    counts, cut = build(tmp_path / "cut", rows)
    every = np.arange(4)
    assert counts.groups == cut.n_groups == 4
    assert cut.take(every).response_id == whole.take(every).response_id
    assert cut.take(every).group.tolist() == whole.take(every).group.tolist()
    assert cut.tokens(every).tolist() == whole.tokens(every).tolist() == [25] * 4
    assert cut.priorities().tolist() == whole.priorities().tolist() == [2.0] * 4
    assert cut.block_first().tolist() == whole.block_first().tolist() == [0, 4]


def test_blocks_are_row_groups_with_small_neighbours_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "ROW_GROUP_ROWS", 4)
    rows = [row(f"r{i}", f"g{i // 2}") for i in range(20)]
    _, index = build(tmp_path, rows)
    assert index.block_first().tolist() == [0, 2, 4, 6, 8, 10]
    _, small = build(tmp_path / "small", [row(f"r{i}", f"g{i}") for i in range(7)], batches=7)
    assert small.block_first().tolist() == [0, 2, 4, 6, 7]


def test_a_single_group_is_an_index_like_any_other(tmp_path):
    _, index = build(tmp_path, [row("a0", "a"), row("a1", "a")])
    assert index.block_first().tolist() == [0, 1]
    assert index.take(np.array([0])).response_id == ["a0", "a1"]


def test_an_empty_selection_gives_an_empty_index(tmp_path):
    counts, index = build(tmp_path, [row("a", "a")], statement=STATEMENT + " WHERE false")
    assert (counts.rows, index.n_rows, index.n_groups) == (0, 0, 0)
    assert index.block_first().tolist() == [0]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("turn", None, "weight"),
        ("reward", float("inf"), "advantage"),
        ("reward", 1e39, "advantage"),
        ("policy_version", -1, "priority"),
    ],
)
def test_numbers_that_cannot_be_used_are_refused_by_row(tmp_path, column, value, message):
    with pytest.raises(
        DataError, match=rf"{message} is not a number that can be used in 1 rows, such as bad"
    ):
        build(tmp_path, [row("good", "a"), row("bad", "a", **{column: value})])


def test_groups_are_drawn_from_few_row_groups_and_from_more_only_if_need_be(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "ROW_GROUP_ROWS", 4)
    index = build(tmp_path, [row(f"{g}{k}", f"g{g:02}") for g in range(20) for k in range(2)])[1]
    assert index.block_first().tolist() == [0, *range(2, 21, 2)]
    for count, expected in ((4, 2), (6, 3), (20, 10), (30, 10)):
        drawn = index.draw(count, seed=1, row_groups=2)
        assert drawn.tolist() == sorted(set(drawn.tolist()))
        assert len(drawn) == min(count, 20)
        assert len(np.unique(drawn // 2)) == expected
    assert len(np.unique(index.draw(4, seed=1, row_groups=8) // 2)) > 2
    assert index.draw(4, seed=1, row_groups=2).tolist() == index.draw(4, seed=1, row_groups=2).tolist()


SCATTERED = ["b", "a", "b", "c", "a", "c", "c", "a", "b", "d"]


def digest(tmp_path, shaping, *, turns=False, homes):
    """Of the index over groups whose rows lie apart, with `home` as a statistic or found in a window."""
    rows = [
        row(f"{group}{number}", group, reward=float(number % 3), turn=None)
        for number, group in enumerate(SCATTERED)
    ]
    ds = dataset(tmp_path / f"ds-{homes}", rows, batches=3)
    with ds.connect() as con:
        prepare(con)
        also = {HOME: home_of(ds.batches())} if homes else {}
        chain = stages(shaping, "all", turns=turns, also=also)
        select = f"SELECT {', '.join([*COLUMNS, *also])} FROM final WHERE kept"
        admission = Admission(batches=ds.batches())
        folder = tmp_path / f"index-{homes}"
        build_index(con, with_stages(chain, select), folder, admission=admission, homes=homes)
    taken = Index(folder).take(np.arange(Index(folder).n_groups))
    return list(zip(taken.response_id, taken.group, taken.advantage, strict=True))


@pytest.mark.parametrize("drop", ["none", "balance", "zero-variance"])
def test_a_home_that_is_a_statistic_is_the_same_where_groups_are_kept_whole(tmp_path, drop):
    shaping = Shaping(drop=drop)
    assert keeps_groups_whole(shaping, turns=False)
    assert digest(tmp_path, shaping, homes=True) == digest(tmp_path, shaping, homes=False)


def test_where_rows_of_a_group_are_left_out_its_home_is_no_statistic(tmp_path):
    shaping = Shaping(keep="response_id <> 'b0'")
    assert not keeps_groups_whole(shaping, turns=False)
    assert digest(tmp_path, shaping, homes=True) != digest(tmp_path, shaping, homes=False)
    assert not keeps_groups_whole(Shaping(), turns=True)
    assert not keeps_groups_whole(Shaping(drop="reward < 0"), turns=False)
    assert not keeps_groups_whole(Shaping(unrewarded="keep", advantage="1"), turns=False)
