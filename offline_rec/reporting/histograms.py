"""Histograms by SQL: counts per bin of any number of rows, in two passes over one column."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from offline_rec.reporting import charts
from offline_rec.reporting.blocks import Chart, Legend, Table
from offline_rec.reporting.plain_text import number, share

if TYPE_CHECKING:
    import duckdb

BINS = 30
FEW = 64
"""Values that may have a bar each."""

TAIL = 3.0
"""Times as far as 99 % of the values the largest must reach for the axis to end before it."""


@dataclass(frozen=True)
class Histogram:
    """Counts between `edges`, of each series; `beyond` counts the values above the last edge.

    `step`: how far apart the values are, if they are evenly so; the edges then lie half-way between them.
    """

    edges: list[float]
    counts: list[list[int]]
    beyond: int
    values: int
    mean: float
    least: float
    most: float
    step: float | None

    def label(self, i: int) -> str:
        """What lies in a bin."""
        low, high = self.edges[i], self.edges[i + 1]
        if self.step is None:
            return f"{number(low)} to {number(high)}"
        first, last = (round(x / self.step) * self.step for x in (low + self.step / 2, high - self.step / 2))
        return number(first) if last - first < self.step / 2 else f"{number(first)} to {number(last)}"

    @property
    def totals(self) -> list[int]:
        """Counts of all series together."""
        return [sum(counts) for counts in zip(*self.counts, strict=True)]


def histogram(
    con: "duckdb.DuckDBPyConnection", values: str, *, series: int = 1, bins: int = BINS
) -> Histogram | None:
    """The histogram of `values`, a SELECT of x and, with several series, the number s of its series.

    None where no value is finite.
    """
    which = "s" if series > 1 else "0"
    source = f"(SELECT x::DOUBLE AS x, {which} AS s FROM ({values}) WHERE isfinite(x::DOUBLE))"
    found = con.execute(
        "SELECT count(*), min(x), max(x), avg(x), approx_quantile(x, 0.99), bool_and(x = floor(x)), "
        "approx_count_distinct(x) "
        f"FROM {source}"
    ).fetchall()[0]
    count, least, most, mean, almost_all, whole, distinct = found
    if not count:
        return None
    top = most
    if most - least > TAIL * (almost_all - least) > 0:
        top = almost_all
    step = 1.0 if whole else _step(con, source) if distinct < FEW else None
    low, width, n = _bins(least, top, step, bins)
    counts = [[0] * n for _ in range(series)]
    beyond = 0
    query = f"SELECT s, least(floor((x - ?) / ?), ?)::INT AS bin, count(*) FROM {source} GROUP BY ALL"
    for of, i, rows in con.execute(query, [low, width, n]).fetchall():
        if i < n:
            counts[of][i] += rows
        elif top == most:  # the largest value itself, on the last edge
            counts[of][n - 1] += rows
        else:
            beyond += rows
    edges = [low + i * width for i in range(n + 1)]
    return Histogram(edges, counts, beyond, count, mean, least, most, step)


def _step(con: "duckdb.DuckDBPyConnection", source: str) -> float | None:
    """How far apart few values are, if they are all multiples of it, such as grades of a twentieth."""
    values = [x for (x,) in con.execute(f"SELECT DISTINCT x FROM {source} ORDER BY x LIMIT {FEW}").fetchall()]
    step = min((b - a for a, b in pairwise(values)), default=0.0)
    if step <= 0 or len(values) == FEW or (values[-1] - values[0]) / step > FEW:
        return None
    even = all(abs(x / step - round(x / step)) < 1e-6 for x in values)
    return float(step) if even else None


def _bins(least: float, top: float, step: float | None, bins: int) -> tuple[float, float, int]:
    """Where the first bin begins, how wide bins are, and how many there are."""
    if step is not None:
        places = round((top - least) / step) + 1
        width = 1 if places <= FEW else math.ceil(places / bins)
        return least - step / 2, width * step, math.ceil(places / width)
    return (least, (top - least) / bins, bins) if top > least else (least - 0.5, 1.0, 1)


def chart(
    question: str,
    found: Histogram,
    *,
    x: str,
    y: str = "responses",
    legend: Sequence[Legend] = (),
    says: str = "",
    colours: Sequence[int] = (),
) -> Chart | Table:
    """The chart of a histogram, with its numbers below; a sentence where all values are the same."""
    if found.least == found.most:
        all_the_same = f"All {found.values:,} have the same: {number(found.most)} {x}."
        return Table(question, (), (), says=f"{all_the_same} {says}".strip())
    totals = found.totals
    tips = [f"{found.label(i)}: {n:,} {y} ({share(n, found.values)})" for i, n in enumerate(totals)]
    rows = [[found.label(i), f"{n:,}", share(n, found.values)] for i, n in enumerate(totals)]
    if found.beyond:
        rows.append(
            [f"above {number(found.edges[-1])}", f"{found.beyond:,}", share(found.beyond, found.values)]
        )
    told = says or f"Mean {number(found.mean)}, from {number(found.least)} to {number(found.most)}."
    if found.beyond:
        told += f" {found.beyond:,} lie beyond the axis."
    return Chart(
        question,
        charts.bars(found.edges, found.counts, x=x, y=y, tips=tips, says=question, colours=colours),
        legend,
        told,
        Table("", [x, y, "share"], rows, (1, 2)),
    )
