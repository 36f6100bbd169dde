"""The order of groups: complete, seeded, stateless, local, the same for any number of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.errors import DataError
from offline_rec.data.order import Order, mix, share_out, shuffled

SNAPSHOT = "0123456789abcdef0123"


def first(sizes):
    return np.cumsum([0, *sizes]).astype(np.int64)


def test_mix_is_splitmix64():
    # First outputs of the reference generator seeded with 0 and 1 (state advances before it is finalised).
    assert int(mix(0)[0]) == 0xE220A8397B1DCDAF
    assert int(mix(1)[0]) == 0x910A2DEC89025CC1


def test_shuffled_is_a_permutation_of_its_keys_alone():
    once, again, other = shuffled(1000, 3, 1), shuffled(1000, 3, 1), shuffled(1000, 3, 2)
    assert sorted(once) == list(range(1000))
    assert (once == again).all()
    assert (once != other).mean() > 0.9


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=9).filter(any),
    st.integers(1, 4),
    st.integers(0, 2**40),
    st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_every_epoch_holds_every_group_once(sizes, window, seed, count):
    order = Order(first(sizes), snapshot=SNAPSHOT, seed=seed, window=window)
    n = order.n_groups
    stream = np.concatenate([order.take(at, count) for at in range(0, 2 * n, count)])[: 2 * n]
    assert sorted(stream[:n]) == sorted(stream[n:]) == list(range(n))


def test_the_stream_does_not_depend_on_how_or_when_it_is_read():
    order = Order(first([5, 0, 8, 3, 9]), snapshot=SNAPSHOT, seed=1, window=2)
    whole = order.take(0, 75)
    pieces = [
        Order(first([5, 0, 8, 3, 9]), snapshot=SNAPSHOT, seed=1, window=2).take(at, 7)
        for at in range(0, 70, 7)
    ]
    assert (np.concatenate(pieces) == whole[:70]).all()
    assert (order.take(60, 15) == whole[60:]).all()


def test_another_seed_snapshot_or_epoch_gives_another_order():
    base = Order(first([50, 50]), snapshot=SNAPSHOT, seed=1).take(0, 200)
    assert (base[:100] != base[100:]).any()
    assert (Order(first([50, 50]), snapshot=SNAPSHOT, seed=2).take(0, 100) != base[:100]).any()
    assert (Order(first([50, 50]), snapshot="f" * 20, seed=1).take(0, 100) != base[:100]).any()


def test_a_step_reads_few_blocks():
    order = Order(first([10] * 100), snapshot=SNAPSHOT, seed=0, window=4)
    blocks = order.take(0, 1000) // 10
    for at in range(0, 1000, 40):
        assert len(set(blocks[at : at + 40])) == 4


def test_position_counts_epochs_and_groups():
    position = Order(first([4, 6]), snapshot=SNAPSHOT, seed=5).position(23)
    assert (position.snapshot, position.seed, position.epoch, position.ordinal) == (SNAPSHOT, 5, 2, 3)


def test_priority_visits_in_proportion():
    order = Order(first([2, 2]), snapshot=SNAPSHOT, seed=0, priority=np.array([0.0, 2.0, 1.0, 1.0]))
    assert sorted(order.take(0, 4)) == [1, 1, 2, 3]


@given(
    st.lists(st.lists(st.floats(0, 5), max_size=6), min_size=1, max_size=6).filter(
        lambda b: sum(map(sum, b)) > 0.1
    ),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_priority_rounds_each_expected_count_down_or_up(blocks, seed):
    priority = np.array([p for block in blocks for p in block])
    order = Order(first(map(len, blocks)), snapshot=SNAPSHOT, seed=seed, window=2, priority=priority)
    counts = np.bincount(order.take(0, order.n_groups), minlength=len(priority))
    expected = priority / priority.sum() * len(priority)
    assert counts.sum() == len(priority)
    assert (np.abs(counts - expected) < 1 + 1e-6).all()


def test_equal_priorities_visit_every_group_once():
    order = Order(first([3, 4]), snapshot=SNAPSHOT, seed=2, priority=np.full(7, 0.1))
    assert sorted(order.take(0, 7)) == list(range(7))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_share_every_group_of_a_step_evenly(ranks):
    cost = np.array([9, 1, 1, 1, 5, 4, 3, 3, 3], np.int64)
    parts = share_out(cost, ranks)
    assert sorted(np.concatenate(parts)) == list(range(len(cost)))
    loads = [cost[part].sum() for part in parts]
    assert max(loads) - min(loads) <= 9
    assert ranks != 2 or loads == [15, 15]


def test_a_rank_may_be_left_without_a_group():
    assert [len(part) for part in share_out(np.array([7], np.int64), 2)] == [1, 0]


@pytest.mark.parametrize("priority", [[0.0, 0.0], [1e308, 1e308], [float("nan"), 1.0]])
def test_priorities_that_no_draw_can_follow_are_refused(priority):
    with pytest.raises(DataError, match="the priorities of 2 groups sum to"):
        Order(np.array([0, 2]), snapshot="0" * 64, seed=0, priority=np.array(priority))
