"""Passes and micro-batches: complete, within the budget, full, and of least cost."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_rec.data.order import imbalance, share_out
from offline_rec.data.packing import best_fit, by_length, fitted, fullness, micro_batches
from offline_rec.data.passes import (
    Costs,
    Sharing,
    cost_of,
    cut,
    distinct,
    fill_of,
    plan,
    plan_rows,
    shared_prompts,
    whole_rows,
)
from offline_rec.data.rows import Rows
from offline_rec.models.padding import of_passes
from tests.offline_rec.test_policy import make_rows

CPU = Costs(launch=60.0, attention=3e-4, carried=0.015)
SHARES = Sharing(CPU, shares=True)
drawn_rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=12)


def rows_of(owners: list[tuple[int, int]], prompts: tuple[int, ...] = (4, 1, 9, 2)) -> Rows:
    """Rows by number of their prompt and length of their response; every token has another id."""
    ids = itertools.count(1000)
    return make_rows(
        [[100 * p + i for i in range(prompts[p])] for p, _ in owners],
        [[next(ids) for _ in range(n)] for _, n in owners],
    )


def log_normal(count: int, mean: float = 320, sigma: float = 0.8) -> Any:
    lengths = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(lengths.astype(np.int64), 1, 8192)


@given(drawn_rows, st.sampled_from([Costs(), CPU, Costs(launch=1e9)]), st.booleans())
@settings(deadline=None)
def test_every_response_token_is_predicted_once_from_the_token_before_it(
    owners: list[tuple[int, int]], costs: Costs, shared: bool
) -> None:
    rows = rows_of(owners)
    lengths, every = (rows.prompt_ids.lengths, rows.response_ids.lengths), np.arange(len(rows))
    planned = (
        shared_prompts(*lengths, distinct(rows.prompt_ids), every, costs)
        if shared
        else whole_rows(*lengths, every, costs)
    )
    layout = of_passes(rows, planned, torch.device("cpu"))
    before = torch.cat([sheet.ids.flatten()[sheet.predicts] for sheet in layout.sheets])
    assert len(before) == len(layout.targets)
    wanted = [
        (int(previous), int(token))
        for i in range(len(rows))
        for previous, token in itertools.pairwise([rows.prompt_ids[i][-1], *rows.response_ids[i]])
    ]
    assert list(zip(before[layout.order].tolist(), layout.targets.tolist(), strict=True)) == wanted


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 20), st.sampled_from([0, 5]))
def test_a_cut_costs_least_of_all_cuts(lengths: list[int], launch: int, past: int) -> None:
    costs, array = Costs(float(launch), 0.01, 0.1), np.array(lengths)

    def cost(parts: Any) -> float:
        return sum(costs.of(len(part), max(part), past) for part in parts)

    ordered = sorted(lengths, reverse=True)
    every = [
        cost([ordered[a:b] for a, b in itertools.pairwise([0, *places, len(ordered)])])
        for n in range(len(ordered))
        for places in itertools.combinations(range(1, len(ordered)), n)
    ]
    parts = cut(array, costs, past)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    slack = (2 if past else 1) * launch  # a single pass is not improved where its padding is below a launch
    assert cost([array[part] for part in parts]) <= min(every) * 1.2 + slack


def test_equal_prompts_have_equal_numbers() -> None:
    rows = make_rows([[1, 2], [1], [1, 2], [2, 1]], [[5]] * 4)
    assert distinct(rows.prompt_ids).tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize(
    ("prompt", "response", "siblings", "shares"),
    [(512, 64, 8, True), (512, 64, 1, False), (8, 256, 8, False), (4, 2, 2, False), (300, 300, 4, True)],
)
def test_prompts_are_shared_where_it_pays(prompt: int, response: int, siblings: int, shares: bool) -> None:
    planned = plan(
        np.full(8, prompt), np.full(8, response), np.arange(8) // siblings, Sharing(CPU, shares=True)
    )
    assert any(one.opens is not None for one in planned) == shares


def test_prompts_are_not_shared_beyond_the_reach_of_attention() -> None:
    shape = (np.full(8, 500), np.full(8, 50), np.zeros(8, np.int64))
    for limit, shares in ((None, True), (550, True), (549, False)):
        planned = plan(*shape, Sharing(CPU, shares=True, limit=limit))
        assert any(one.opens is not None for one in planned) == shares


@given(drawn_rows, st.integers(1, 40), st.booleans())
@settings(deadline=None)
def test_each_row_is_in_one_micro_batch_within_the_budget(
    owners: list[tuple[int, int]], budget: int, shares: bool
) -> None:
    rows, sharing = rows_of(owners), Sharing(Costs(launch=1.0), shares=shares)
    batches = micro_batches(rows, budget, sharing)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(rows)))
    for batch in batches:
        some = rows.select(batch)
        heads = np.unique(distinct(some.prompt_ids), return_index=True)[1]
        prompts = some.prompt_ids.lengths[heads] if shares else some.prompt_ids.lengths
        assert len(batch) == 1 or prompts.sum() + some.response_ids.lengths.sum() <= budget
    again = micro_batches(rows, budget, sharing)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in again]


def test_rows_of_one_prompt_stay_together() -> None:
    rows = rows_of([(i % 16, 30) for i in range(128)], prompts=(200,) * 16)
    batches = micro_batches(rows, 1000, SHARES)
    assert [len(np.unique(batch % 16)) for batch in batches] == [2] * 8
    assert {len(batch) for batch in batches} == {16}


def test_a_prompt_that_cannot_be_shared_is_counted_for_every_row() -> None:
    rows = rows_of([(0, 30)] * 16, prompts=(200,))
    for sharing in (Sharing(CPU), Sharing(CPU, shares=True, limit=229)):
        assert {len(batch) for batch in micro_batches(rows, 1000, sharing)} == {4}
    assert len(micro_batches(rows, 1000, Sharing(CPU, shares=True, limit=230))) == 1


def test_a_prompt_with_more_rows_than_fit_is_cut_and_counted_in_each_part() -> None:
    number = np.zeros(20, np.int64)
    parts = fitted(np.full(20, 100), np.full(20, 50), number, 300, SHARES)
    assert [len(part) for part in parts] == [4] * 5


def test_micro_batches_by_length_keep_ties_in_order() -> None:
    assert [b.tolist() for b in by_length(np.array([2, 5, 2, 5, 2]), 10)] == [[1, 3], [0, 2, 4]]


@pytest.mark.parametrize(("count", "least"), [(256, 0.98), (4096, 0.995)])
@pytest.mark.parametrize("budget", [8192, 16384])
def test_log_normal_sequences_fill_their_micro_batches(count: int, least: float, budget: int) -> None:
    lengths = log_normal(count)
    bins = best_fit(lengths, budget)
    bound = -(-int(lengths.sum()) // budget)
    assert len(bins) <= bound + 1
    assert count < 4096 or lengths.sum() / (len(bins) * budget) >= least
    batches = fitted(lengths // 4, lengths - lengths // 4, np.arange(count), budget, Sharing(CPU))
    passes = [
        one
        for batch in batches
        for one in whole_rows(lengths[batch], np.zeros_like(batch), np.arange(len(batch)), CPU)
    ]
    assert fill_of(passes) > 0.85


def test_padding_is_a_fraction_of_that_of_random_batches() -> None:
    lengths = log_normal(512)
    random = lengths.reshape(-1, 8)
    assert lengths.sum() / (random.max(1) * 8).sum() < 0.5
    rows = make_rows([[1]] * 512, [[2] * (n - 1) for n in lengths])
    passes = [
        one
        for batch in micro_batches(rows, 16_384, Sharing(CPU))
        for one in plan_rows(rows.select(batch), Sharing(CPU))
    ]
    assert fill_of(passes) > 0.95
    assert cost_of(passes, CPU) < 1.12 * cost_of(
        whole_rows(lengths, 0 * lengths, np.arange(512), Costs()), CPU
    )


@pytest.mark.parametrize(("count", "ranks"), [(512, 8), (512, 32), (256, 4)])
def test_ranks_finish_together(count: int, ranks: int) -> None:
    lengths = log_normal(count).astype(np.float64)
    work = lengths + 3e-4 * lengths**2
    parts = share_out(work, ranks)
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert imbalance(work, parts) <= 1.01
    in_turn = [np.arange(rank, count, ranks) for rank in range(ranks)]
    assert imbalance(work, in_turn) > 1.05


@pytest.mark.parametrize("budget", [8192, 16384])
def test_micro_batches_are_full_unless_cutting_by_length_is_clearly_faster(budget: int) -> None:
    lengths = log_normal(4096)
    rows = make_rows([[1]] * 4096, [[2] * (n - 1) for n in lengths])
    batches = micro_batches(rows, budget, Sharing(CPU))
    assert fullness(rows, batches, budget, Sharing(CPU)) >= 0.995
    even = by_length(lengths, budget)
    assert fullness(rows, even, budget, Sharing(CPU)) < 0.97

    def cost(cut: list[np.ndarray]) -> float:
        return sum(cost_of(plan_rows(rows.select(batch), Sharing(CPU)), CPU) for batch in cut)

    assert cost(batches) < cost(even) / 0.98


def test_a_shared_prompt_takes_its_part_of_the_budget_once() -> None:
    rows = rows_of([(i % 16, 30) for i in range(128)], prompts=(200,) * 16)
    batches = micro_batches(rows, 1000, SHARES)
    assert fullness(rows, batches, 1000, SHARES) == pytest.approx((16 * 200 + 128 * 30) / 8000)
    alone = micro_batches(rows, 1000, Sharing(CPU))
    used = 128 * 230 / (1000 * len(alone))
    assert fullness(rows, alone, 1000, Sharing(CPU)) == pytest.approx(used)
