"""Differences of mixes: shares of rows by category, and of groups by prompt.

The distance of two finite samples of one mix is not 0. So beside each distance stands what it would be by
chance, for samples of this size that differ in nothing.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data_tools.drift.numbers import FEWEST_PROMPTS

if TYPE_CHECKING:
    import duckdb

LISTED = 20
"""Categories that a report names, the largest differences first."""

EXACT = 2000
"""Up to so many draws of a prompt the chance of every division is summed, beyond it a normal one's."""


@dataclass(frozen=True)
class Distance:
    """How far two mixes are apart, 0 to 1: half the sum of the differences of shares (total variation), and
    the Jensen-Shannon divergence in bits.

    `..._by_chance`: what samples of this size would show if they were of one mix; null where it cannot be
    told.
    """

    total_variation: float
    total_variation_by_chance: float | None
    jensen_shannon: float
    jensen_shannon_by_chance: float | None


@dataclass(frozen=True)
class Mix:
    """Shares of rows by category: `shares` holds the LISTED that differ most.

    `n_only_first`, `n_only_second`: categories that one side alone has, the first of which are named.
    """

    name: str
    categories: int
    distance: Distance
    shares: list[dict[str, Any]]
    n_only_first: int
    only_first: list[str]
    n_only_second: int
    only_second: list[str]


@dataclass(frozen=True)
class PromptMix:
    """Prompts on both sides or on one, the rows that these have, and the distance of their shares of groups.

    A group is one draw of a prompt: by chance, its side is.
    """

    both: int
    only_first: int
    only_second: int
    rows_first_of_both: int
    rows_second_of_both: int
    distance: Distance
    examples_first: list[str]
    examples_second: list[str]


_SIZES = """SELECT sum(n)::BIGINT, count(*) FROM (
        SELECT second, prompt, count(*) AS n FROM sides GROUP BY ALL) GROUP BY second ORDER BY second"""

_CELLS = """CREATE OR REPLACE TEMP TABLE _cells AS SELECT prompt, {name} AS category,
        count(*) FILTER (NOT second)::DOUBLE AS x, count(*) FILTER (second)::DOUBLE AS y
    FROM sides GROUP BY ALL"""

_CATEGORIES = """CREATE OR REPLACE TEMP TABLE _categories AS
    SELECT category, sum(x) / $n1 AS p, sum(y) / $n2 AS q FROM _cells GROUP BY category"""

# The variance of q - p over prompts, whose rows go together: the square of numbers.py's u_p, multiplied out,
# so that cells of 0 rows need not be there.
_CHANCE = """WITH prompts AS (
        SELECT prompt, sum(x) / $n1 AS a, sum(y) / $n2 AS b FROM _cells GROUP BY prompt),
    whole AS (SELECT count(*) AS n, sum(a * a) AS aa, sum(a * b) AS ab, sum(b * b) AS bb FROM prompts),
    seen AS (
        SELECT c.category, any_value(c.p) AS p, any_value(c.q) AS q,
            sum(power(y / $n2 - x / $n1, 2) - 2 * (y / $n2 - x / $n1) * (c.q * s.b - c.p * s.a)) AS of_cells
        FROM _cells l JOIN _categories c USING (category) JOIN prompts s USING (prompt) GROUP BY c.category),
    spread AS (
        SELECT p, q, n / greatest(n - 1, 1)
            * greatest(of_cells + p * p * aa - 2 * p * q * ab + q * q * bb, 0) AS v
        FROM seen, whole)
    SELECT sum(sqrt(2 * v / pi())) / 2, sum(v / (4 * (p + q))) / ln(2) FROM spread"""

_TERM = "CASE WHEN {a} > 0 THEN {a} * log2(2 * {a} / ({a} + {b})) ELSE 0 END"
_DISTANCE = f"""SELECT sum(abs(p - q)) / 2,
        (sum({_TERM.format(a="p", b="q")}) + sum({_TERM.format(a="q", b="p")})) / 2
    FROM {{table}}"""


def mix(con: "duckdb.DuckDBPyConnection", name: str) -> Mix | None:
    """Compare a column of `sides` by category; None where all rows are of one."""
    [(n1, prompts1), (n2, prompts2)] = con.sql(_SIZES).fetchall()
    sizes = {"n1": n1, "n2": n2}
    con.execute(_CELLS.format(name=name))
    con.execute(_CATEGORIES, sizes)
    [(categories,)] = con.sql("SELECT count(*) FROM _categories").fetchall()
    if categories < 2:
        return None
    tv, js = _distance(con, "_categories")
    by_chance: tuple[float | None, float | None] = (None, None)
    if min(prompts1, prompts2) >= FEWEST_PROMPTS:
        [found] = con.execute(_CHANCE, sizes).fetchall()
        by_chance = (min(found[0], 1.0), min(found[1], 1.0))
    query = f"SELECT category, p, q FROM _categories ORDER BY abs(p - q) DESC, category LIMIT {LISTED}"
    shares = [{"category": c, "first": p, "second": q} for c, p, q in con.sql(query).fetchall()]
    only = [_only(con, condition) for condition in ("q = 0", "p = 0")]
    return Mix(
        name=name,
        categories=categories,
        distance=Distance(tv, by_chance[0], js, by_chance[1]),
        shares=shares,
        n_only_first=only[0][0],
        only_first=only[0][1],
        n_only_second=only[1][0],
        only_second=only[1][1],
    )


def prompt_mix(con: "duckdb.DuckDBPyConnection") -> PromptMix:
    """Compare which prompts the sides have, and how often each was drawn."""
    con.execute(
        """CREATE OR REPLACE TEMP TABLE _drawn AS SELECT prompt, sum(rows) FILTER (NOT second) AS rows1,
            sum(rows) FILTER (second) AS rows2, count(*) FILTER (NOT second) AS x,
            count(*) FILTER (second) AS y
        FROM (SELECT prompt, grp, second, count(*) AS rows FROM sides GROUP BY ALL) GROUP BY prompt"""
    )
    [(both, only1, only2, rows1, rows2, n1, n2)] = con.sql(
        """SELECT count(*) FILTER (x > 0 AND y > 0), count(*) FILTER (y = 0), count(*) FILTER (x = 0),
            coalesce(sum(rows1) FILTER (y > 0), 0)::BIGINT, coalesce(sum(rows2) FILTER (x > 0), 0)::BIGINT,
            sum(x)::BIGINT, sum(y)::BIGINT FROM _drawn"""
    ).fetchall()
    tv, js = _distance(con, f"(SELECT x / {n1}::DOUBLE AS p, y / {n2}::DOUBLE AS q FROM _drawn)")
    counts = con.sql("SELECT x + y AS k, count(*) AS n FROM _drawn GROUP BY k ORDER BY k").fetchall()
    chance = divided_by_chance(counts, n1, n2)
    examples = [
        [
            name
            for (name,) in con.sql(f"SELECT prompt FROM _drawn WHERE {c} ORDER BY prompt LIMIT 3").fetchall()
        ]
        for c in ("y = 0", "x = 0")
    ]
    return PromptMix(both, only1, only2, rows1, rows2, Distance(tv, chance[0], js, chance[1]), *examples)


def divided_by_chance(counts: list[tuple[int, int]], n1: int, n2: int) -> tuple[float, float]:
    """Expected total variation and Jensen-Shannon divergence if each draw had its side by chance.

    `counts`: (draws of a prompt on both sides together, prompts with so many). The draws of a prompt that are
    on the first side are then binomial, with n1 / (n1 + n2).
    """
    tv = js = 0.0
    for k, prompts in counts:
        x, chance = _binomial(int(k), n1 / (n1 + n2))
        p, q = x / n1, (k - x) / n2
        m = (p + q) / 2
        terms = [np.where(a > 0, a * np.log2(np.where(a > 0, a, 1.0) / m), 0.0) for a in (p, q)]
        tv += prompts * float(chance @ np.abs(p - q)) / 2
        js += prompts * float(chance @ (terms[0] + terms[1])) / 2
    return min(tv, 1.0), min(js, 1.0)


def _binomial(k: int, share: float) -> tuple[Any, Any]:
    """Values of a binomial variable and their chances; around the mean alone where there are many."""
    if k <= EXACT:
        x = np.arange(k + 1, dtype=np.float64)
        logs = np.array(
            [math.lgamma(k + 1) - math.lgamma(i + 1) - math.lgamma(k - i + 1) for i in range(k + 1)]
        )
        chance = np.exp(logs + x * math.log(share) + (k - x) * math.log1p(-share))
    else:
        spread = math.sqrt(k * share * (1 - share))
        x = np.clip(k * share + spread * np.linspace(-8, 8, 1001), 0, k)
        chance = np.exp(-((x - k * share) ** 2) / (2 * spread**2))
    return x, chance / chance.sum()


def _distance(con: "duckdb.DuckDBPyConnection", table: str) -> tuple[float, float]:
    [(tv, js)] = con.sql(_DISTANCE.format(table=table)).fetchall()
    return float(tv), max(float(js), 0.0)


def _only(con: "duckdb.DuckDBPyConnection", condition: str) -> tuple[int, list[str]]:
    [(n,)] = con.sql(f"SELECT count(*) FROM _categories WHERE {condition}").fetchall()
    query = f"SELECT category FROM _categories WHERE {condition} ORDER BY p + q DESC, category LIMIT {LISTED}"
    return n, [name for (name,) in con.sql(query).fetchall()]
