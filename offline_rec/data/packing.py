"""Micro-batches within a budget of tokens: full ones, little of them padding, rows of one prompt together."""

import bisect
from collections.abc import Sequence

import numpy as np

from offline_rec.data.passes import Sharing, cost_of, distinct, plan
from offline_rec.data.ragged import IntArray
from offline_rec.data.rows import Rows

BY_LENGTH_GAIN = 0.98
"""Rows are cut by length where that is estimated to take less than this share of the time of full ones: a
smaller gain is within the error of the estimate, and costs up to a tenth more micro-batches."""


def micro_batches(rows: Rows, token_budget: int, sharing: Sharing) -> list[IntArray]:
    """Row numbers in batches of at most `token_budget` tokens, a shared prompt counted once.

    Every row is in exactly one batch; one that alone exceeds the budget is a batch of its own. Equal input
    gives equal batches. Best fit of whole prompts with all their rows makes them full; they are cut by
    length, where padding counts as tokens, if that is estimated to be clearly faster.
    """
    prompt, response = rows.prompt_ids.lengths, rows.response_ids.lengths
    number = _counted_once(rows, sharing)
    full, even = (
        fitted(prompt, response, number, token_budget, sharing),
        by_length(prompt + response, token_budget),
    )

    def cost(batches: Sequence[IntArray]) -> float:
        return sum(cost_of(plan(prompt[b], response[b], number[b], sharing), sharing.costs) for b in batches)

    return even if cost(even) < BY_LENGTH_GAIN * cost(full) else full


def fullness(rows: Rows, batches: Sequence[IntArray], token_budget: int, sharing: Sharing) -> float:
    """The share of the token budget that micro-batches use, a shared prompt counted once; 1 for none."""
    number = _counted_once(rows, sharing)
    used = int(rows.response_ids.lengths.sum())
    for batch in batches:
        heads = batch[np.unique(number[batch], return_index=True)[1]]
        used += int(rows.prompt_ids.lengths[heads].sum())
    return used / (len(batches) * token_budget) if len(batches) else 1.0


def _counted_once(rows: Rows, sharing: Sharing) -> IntArray:
    """The number of each row's prompt, one of its own for each where prompts cannot be shared."""
    longest = rows.prompt_ids.lengths.max(initial=0) + rows.response_ids.lengths.max(initial=0)
    beyond = sharing.limit is not None and longest > sharing.limit
    return distinct(rows.prompt_ids) if sharing.once and not beyond else np.arange(len(rows))


def by_length(lengths: IntArray, token_budget: int) -> list[IntArray]:
    """Batches whose padded size, rows x longest, stays within the budget; longest first, ties in order."""
    order = np.argsort(-lengths, kind="stable")
    batches = []
    start = 0
    while start < len(order):
        stop = start + max(token_budget // max(int(lengths[order[start]]), 1), 1)
        batches.append(order[start:stop])
        start = stop
    return batches


def fitted(
    prompt: IntArray, response: IntArray, number: IntArray, token_budget: int, sharing: Sharing
) -> list[IntArray]:
    """Batches as full as best fit makes them; rows of one prompt stay together as far as they fit."""
    parts: list[IntArray] = []
    sizes: list[int] = []
    by_prompt = np.argsort(number, kind="stable")
    for rows in np.split(by_prompt, np.flatnonzero(np.diff(number[by_prompt])) + 1):
        for part in _parts(rows, prompt, response, token_budget):
            parts.append(part)
            sizes.append(int(prompt[part[0]] + response[part].sum()))
    return [
        np.concatenate([parts[i] for i in batch])
        for batch in best_fit(np.array(sizes, np.int64), token_budget)
    ]


def _parts(rows: IntArray, prompt: IntArray, response: IntArray, budget: int) -> list[IntArray]:
    """Rows of one prompt in as few parts as fit the budget, the prompt in each."""
    room = budget - int(prompt[rows[0]]) if len(rows) else 0
    if len(rows) < 2 or response[rows].sum() <= room:
        return [rows] if len(rows) else []
    if room <= 0:
        return np.split(rows, len(rows))
    return [rows[part] for part in best_fit(response[rows], room)]


def best_fit(sizes: IntArray, room: int) -> list[IntArray]:
    """Items in bins of this room: largest first, each into the fullest bin that takes it.

    An item that is larger than a bin has one of its own. Bins are in the order in which they were opened,
    items of equal size in theirs.
    """
    bins: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (room left, bin), ascending
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect.bisect_left(left, (size, -1))
        free, chosen = left.pop(at) if at < len(left) else (room, len(bins))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(item)
        bisect.insort(left, (free - size, chosen))
    return [np.array(items, np.int64) for items in bins]
