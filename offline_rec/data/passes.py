"""Which passes through a model compute the rows of a micro-batch: what is computed once, and what together.

A prompt that several rows have is computed once, and their responses run on its keys and values; other rows
are computed whole, prompt and response together. Rows of like length share a pass, so that little is padding.
Where attention can skip what a token does not see, all of it is one row instead, laid end to end.
All of it is decided by lengths and estimated costs; no tensor exists yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offline_rec.data.ragged import IntArray, Ragged
from offline_rec.data.rows import Rows

LEAST_GAIN = 0.93
"""Prompts are shared where that, and two more launches, is estimated to take less than this share of the time
of whole rows: estimates were up to a fifth too good for tiny models, whose time is that of launches."""


BLOCK = 128
"""A packed row is filled up to a multiple of that many tokens: attention skips blocks of them."""


@dataclass(frozen=True)
class Costs:
    """What a pass takes, in units of the time of one token through all layers, forward and backward.

    `launch`: any pass; `attention`: a token, for each token that it attends to; `carried`: a prompt token
    whose keys and values are handed to a response.
    """

    launch: float = 0.0
    attention: float = 0.0
    carried: float = 0.0

    def of(self, rows: int, length: int, past: int = 0) -> float:
        """A pass of `rows` rows of `length` tokens after `past` tokens that are computed already."""
        return self.fixed(past) + rows * float(self.row(length, past))

    def fixed(self, past: int = 0) -> float:
        """A pass without its rows; keys and values are joined layer by layer."""
        return self.launch * (2 if past else 1)

    def row(self, length: Any, past: int = 0) -> Any:
        """One row of a pass."""
        return length * (1 + self.attention * (past + length / 2)) + self.carried * past


@dataclass(frozen=True)
class Sharing:
    """What a model can do: `shares` says whether rows may run on the keys and values of their prompt.

    `packs`: whether all rows may be one packed row. Both only where no sequence is longer than `limit`,
    because attention reaches no further back; None is any length.
    """

    costs: Costs = Costs()
    shares: bool = False
    limit: int | None = None
    packs: bool = False

    @property
    def once(self) -> bool:
        """Whether a prompt that several rows have may be computed once."""
        return self.shares or self.packs


@dataclass(frozen=True)
class Pass:
    """Rows that are computed together, `length` tokens each with padding, `real` tokens in all without.

    Four kinds: whole rows; with `opens` the prompts of `rows`, whose keys and values are kept, and whose
    last states predict the first tokens of the rows `opens`, that of `opens[i]` from prompt `place[i]`; with
    `parent` the responses of `rows` without their last tokens, `rows[i]` on prompt `place[i]` of that pass,
    whose length is `past`; with `packed` one row of `length` tokens: the prompts, then the responses of
    `rows`, again without their last tokens, `rows[i]` to prompt `place[i]`. `packed` is how many pairs of
    tokens see each other, and `opens` the rows whose prompt others have too.
    """

    rows: IntArray
    length: int
    real: int
    opens: IntArray | None = None
    parent: int | None = None
    place: IntArray | None = None
    past: int = 0
    packed: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens that are computed, padding too."""
        return self.length * (len(self.rows) if self.packed is None else 1)

    def cost(self, costs: Costs) -> float:
        """Estimated time."""
        if self.packed is not None:
            return costs.launch + self.real + costs.attention * self.packed
        return costs.of(len(self.rows), self.length, self.past)


def distinct(prompts: Ragged) -> IntArray:
    """The number of each row's prompt, equal for equal ids; numbered in order of appearance."""
    numbers: dict[bytes, int] = {}
    return np.array(
        [numbers.setdefault(prompts[i].tobytes(), len(numbers)) for i in range(len(prompts))], np.int64
    )


def plan_rows(rows: Rows, sharing: Sharing) -> list[Pass]:
    """The passes that compute the rows of a micro-batch."""
    number = distinct(rows.prompt_ids) if sharing.once else np.arange(len(rows))
    return plan(rows.prompt_ids.lengths, rows.response_ids.lengths, number, sharing)


def plan(prompt: IntArray, response: IntArray, number: IntArray, sharing: Sharing) -> list[Pass]:
    """The passes that compute rows of these lengths, parents first; `number` tells equal prompts.

    Every row with a response is in one pass without children, or its prompt in one that keeps and, if the
    response has a second token, the response in a child of that pass.
    """
    within = sharing.limit is None or _longest(prompt + response) <= sharing.limit
    if sharing.packs and within and response.any():
        return [packed_row(prompt, response, number)]
    whole = whole_rows(prompt, response, np.arange(len(prompt)), sharing.costs)
    if not sharing.shares:
        return whole
    several = (np.bincount(number)[number] > 1) if len(number) else np.zeros(0, np.bool_)
    if sharing.limit is not None and several.any():
        several &= prompt[several].max() + response[several].max() <= sharing.limit
    if not several.any():
        return whole
    shared = shared_prompts(prompt, response, number, np.flatnonzero(several), sharing.costs)
    rest = np.flatnonzero(~several)
    if len(rest):
        shared += whole_rows(prompt, response, rest, sharing.costs)
    costs = sharing.costs
    pays = cost_of(shared, costs) + 2 * costs.launch < LEAST_GAIN * cost_of(whole, costs)
    return shared if pays else whole


def cost_of(passes: Sequence[Pass], costs: Costs) -> float:
    """Estimated time of all passes."""
    return sum(one.cost(costs) for one in passes)


def fill_of(passes: Sequence[Pass]) -> float:
    """The share of computed tokens that are not padding."""
    computed = sum(one.tokens for one in passes)
    return sum(one.real for one in passes) / computed if computed else 1.0


def whole_rows(prompt: IntArray, response: IntArray, rows: IntArray, costs: Costs) -> list[Pass]:
    """Passes that compute rows from their first token to their last."""
    total = (prompt + response)[rows]
    return [Pass(rows[part], _longest(total[part]), int(total[part].sum())) for part in cut(total, costs)]


def shared_prompts(
    prompt: IntArray, response: IntArray, number: IntArray, rows: IntArray, costs: Costs
) -> list[Pass]:
    """Passes that compute each prompt of `rows` once, and then their responses."""
    passes: list[Pass] = []
    _, first, which = np.unique(number[rows], return_index=True, return_inverse=True)
    heads = rows[first]
    for part in cut(prompt[heads], costs):
        length = _longest(prompt[heads[part]])
        parent = len(passes)
        place = np.full(len(heads), -1)
        place[part] = np.arange(len(part))
        of_row = place[which]
        opens = (of_row >= 0) & (response[rows] > 0)
        real = int(prompt[heads[part]].sum())
        passes.append(Pass(heads[part], length, real, opens=rows[opens], place=of_row[opens]))
        longer = np.flatnonzero((of_row >= 0) & (response[rows] > 1))
        inputs = response[rows[longer]] - 1
        for some in cut(inputs, costs, past=length):
            own, most, real = longer[some], _longest(inputs[some]), int(inputs[some].sum())
            passes.append(Pass(rows[own], most, real, parent=parent, place=of_row[own], past=length))
    return passes


def packed_row(prompt: IntArray, response: IntArray, number: IntArray) -> Pass:
    """One row of all rows that have a response, every distinct prompt there once."""
    rows = np.flatnonzero(response)
    rows = rows[np.argsort(number[rows], kind="stable")]
    _, first, place = np.unique(number[rows], return_index=True, return_inverse=True)
    before, inputs = prompt[rows], response[rows] - 1
    real = int(before[first].sum() + inputs.sum())
    return Pass(
        rows,
        length=-(-real // BLOCK) * BLOCK,
        real=real,
        opens=rows[np.bincount(place)[place] > 1],
        place=place,
        packed=float((before[first] ** 2).sum() / 2 + (inputs * (before + inputs / 2)).sum()),
    )


def cut(lengths: IntArray, costs: Costs, past: int = 0) -> list[IntArray]:
    """Rows of these lengths in passes, longest first, such that padding and launches together cost least."""
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    if len(order) * _longest(lengths) - lengths.sum() <= costs.launch:
        return [order] if len(order) else []
    # A pass begins at the first row of its length: best[i] is the least cost of the i longest lengths.
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    stops = np.append(starts[1:], len(order))
    row, fixed = costs.row(ordered[starts], past), costs.fixed(past)
    best, came = np.zeros(len(starts) + 1), np.zeros(len(starts) + 1, np.int64)
    for last, stop in enumerate(stops.tolist(), start=1):
        cost = best[:last] + (stop - starts[:last]) * row[:last]
        came[last] = chosen = cost.argmin()
        best[last] = cost[chosen] + fixed
    parts, last = [], len(starts)
    while last:
        parts.append(order[starts[came[last]] : stops[last - 1]])
        last = int(came[last])
    return parts[::-1]


def _longest(lengths: IntArray) -> int:
    return int(lengths.max(initial=0))
