"""Differences of means, second side minus first, with effect sizes and intervals that know of prompts.

Responses to one prompt are alike, and a prompt may be on both sides: what varies is the prompt. The interval
is that of the linearised difference of ratio means: prompt p adds u_p = (s2 - m2 n2)/N2 - (s1 - m1 n1)/N1,
with its sums s and counts n on each side, and the variance is P/(P-1) sum u_p^2 (the ratio estimator of
Cochran, Sampling Techniques, 3rd ed., chapter 6, with clusters as units). The same rows on both sides give 0.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb

FEWEST_PROMPTS = 10
"""Prompts that each side needs for an interval: below, the spread of prompts is not known well enough."""

ROUNDING = 1e-12

Z = 1.959963984540054


@dataclass(frozen=True)
class Number:
    """A measure on both sides: means, `difference` of the second to the first with its 95 % interval.

    `n_first`, `n_second`: rows that have it. `hedges_g`: Cohen's d by the pooled deviation, times
    1 - 3/(4 df - 1) for small samples. `cliffs_delta`: chance that a row of the second side has more, minus
    that it has less. `same_prompts_difference`: mean over the prompts that both sides have of the difference
    of their means. Null where it cannot be told.
    """

    name: str
    n_first: int
    n_second: int
    first: float | None
    second: float | None
    difference: float | None
    low: float | None
    high: float | None
    hedges_g: float | None
    cliffs_delta: float | None
    same_prompts: int
    same_prompts_difference: float | None
    same_prompts_low: float | None
    same_prompts_high: float | None


_PER_PROMPT = """CREATE OR REPLACE TEMP TABLE _prompts AS SELECT prompt,
        count(*) FILTER (NOT second) AS n1, coalesce(sum(x) FILTER (NOT second), 0) AS s1,
        count(*) FILTER (second) AS n2, coalesce(sum(x) FILTER (second), 0) AS s2
    FROM (SELECT prompt, second, {name} AS x FROM sides WHERE isfinite({name})) GROUP BY prompt"""

_SIDES = """SELECT count(*) FILTER (NOT second) AS n1, avg({name}) FILTER (NOT second) AS m1,
        var_samp({name}) FILTER (NOT second) AS v1, count(*) FILTER (second) AS n2,
        avg({name}) FILTER (second) AS m2, var_samp({name}) FILTER (second) AS v2
    FROM sides WHERE isfinite({name})"""

_SPREAD = """SELECT count(*) FILTER (n1 > 0), count(*) FILTER (n2 > 0), count(*),
        sum(power((s2 - $m2 * n2) / $n2 - (s1 - $m1 * n1) / $n1, 2))
    FROM _prompts"""

_SHARED = """SELECT count(*), avg(s2 / n2 - s1 / n1), var_samp(s2 / n2 - s1 / n1)
    FROM _prompts WHERE n1 > 0 AND n2 > 0"""

# Equal values are counted first: what is sorted is then small, and can spill.
_CLIFF = """WITH counted AS (
        SELECT {name} AS x, count(*) FILTER (NOT second)::DOUBLE AS c1, count(*) FILTER (second)::DOUBLE AS c2
        FROM sides WHERE isfinite({name}) GROUP BY x),
    below AS (SELECT c1, c2, sum(c1) OVER (ORDER BY x ROWS UNBOUNDED PRECEDING) - c1 AS less FROM counted)
    SELECT sum(c2 * (less - ($n1 - less - c1))) / ($n1::DOUBLE * $n2::DOUBLE) FROM below"""


def number(con: "duckdb.DuckDBPyConnection", name: str) -> Number | None:
    """Compare a column of `sides`; None where neither side has it."""
    [(n1, m1, v1, n2, m2, v2)] = con.sql(_SIDES.format(name=name)).fetchall()
    if not n1 and not n2:
        return None
    if not n1 or not n2:
        nothing = (None,) * 5
        return Number(name, n1, n2, m1, m2, *nothing, 0, None, None, None)
    con.execute(_PER_PROMPT.format(name=name))
    sides = {"n1": n1, "n2": n2, "m1": m1, "m2": m2}
    [(prompts1, prompts2, prompts, squares)] = con.execute(_SPREAD, sides).fetchall()
    [(shared, shared_mean, shared_variance)] = con.sql(_SHARED).fetchall()
    [(delta,)] = con.execute(_CLIFF.format(name=name), {"n1": n1, "n2": n2}).fetchall()
    difference = _without_rounding(m2 - m1, (m1, m2, math.sqrt(max(v1 or 0.0, v2 or 0.0))))
    low, high = _interval(difference, squares * prompts / max(prompts - 1, 1), min(prompts1, prompts2))
    shared_low, shared_high = _interval(shared_mean, (shared_variance or 0) / max(shared, 1), shared)
    con.execute("DROP TABLE _prompts")
    return Number(
        name=name,
        n_first=n1,
        n_second=n2,
        first=m1,
        second=m2,
        difference=difference,
        low=low,
        high=high,
        hedges_g=_hedges_g(difference, (n1, n2), (v1, v2)),
        cliffs_delta=delta,
        same_prompts=shared,
        same_prompts_difference=shared_mean,
        same_prompts_low=shared_low,
        same_prompts_high=shared_high,
    )


def _without_rounding(difference: float, scales: tuple[float, ...]) -> float:
    """0 for what is smaller than the rounding of sums in another order: the same rows differ in nothing."""
    return 0.0 if abs(difference) <= ROUNDING * max(map(abs, scales)) else difference


def _hedges_g(
    difference: float, rows: tuple[int, int], variances: tuple[float | None, float | None]
) -> float | None:
    freedom = sum(rows) - 2
    if freedom < 1:
        return None
    spread = sum((n - 1) * (variance or 0.0) for n, variance in zip(rows, variances, strict=True))
    deviation = math.sqrt(spread / freedom)
    if not deviation:
        return 0.0 if not difference else None
    return difference / deviation * (1 - 3 / (4 * freedom - 1))


def _interval(value: float | None, variance: float, prompts: int) -> tuple[float | None, float | None]:
    if value is None or prompts < FEWEST_PROMPTS:
        return None, None
    half = student(prompts - 1) * math.sqrt(max(variance, 0.0))
    return value - half, value + half


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by its expansion in 1/freedom (Abramowitz and Stegun, 26.7.5).

    Off by less than 1e-3 from 9 degrees of freedom on.
    """
    z, n = Z, float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3
