"""Curves of a run: what `metrics.jsonl` and `lineage/` hold of every step, as charts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offline_rec.reporting import charts
from offline_rec.reporting.blocks import Chart, Grid, Legend, Note, Table
from offline_rec.reporting.plain_text import number

if TYPE_CHECKING:
    import duckdb

POINTS = 300
"""Points of a curve at most: more steps are averaged, as nobody can see more of them."""

TABLE_ROWS = 60

RECORDS = "(SELECT step, to_json(m) AS j FROM metrics m)"


@dataclass(frozen=True)
class Curve:
    """A curve: its name, the path of its value in a record, and its colour."""

    name: str
    path: str
    colour: int
    dashed: bool = False


@dataclass(frozen=True)
class Plot:
    """A chart of curves: the question it answers, how to read it, and why it may be empty."""

    question: str
    curves: Sequence[Curve]
    says: str
    empty: str
    y: str = ""
    level: float | None = None
    log: bool = False


HELD_OUT = (
    Plot(
        "Do good held-out responses become likelier?",
        [Curve("weighted by reward", "heldout.reward_weighted_logprob", 1)],
        "Mean log-prob of a token of held-out responses, weighted by their rewards: up is better.",
        "No held-out rows were measured (--eval-every, and rewards on the holdout).",
        y="nats per token",
    ),
    Plot(
        "What would the policy earn on held-out prompts?",
        [Curve("this policy", "heldout.value", 1), Curve("the log", "heldout.value_logged", 6, dashed=True)],
        "Mean reward that self-normalised ratios give; trust it while the effective share is high.",
        "That needs held-out rows with rewards and log-probs of the policy that sampled.",
        y="reward",
    ),
    Plot(
        "How far has it drifted on held-out rows?",
        [Curve("KL on held-out rows", "heldout.kl", 2)],
        "KL divergence from what ratios are taken against, in nats per token.",
        "That needs log-probs to measure the drift from.",
        y="nats per token",
    ),
    Plot(
        "How many held-out responses still count?",
        [Curve("effective share", "heldout.ess", 4)],
        "Effective share of the held-out responses under their ratios: 1 is all, near 0 is a handful.",
        "That needs log-probs to take ratios to.",
    ),
)

TRAINING = (
    Plot(
        "Does the loss go down?",
        [Curve("loss", "loss", 1)],
        "The surrogate whose gradient is followed: on logged data its level says little, its jumps do.",
        "No step has a loss.",
    ),
    Plot(
        "How likely are the trained responses?",
        [Curve("log-prob of a token", "logprob_mean", 1)],
        "Mean over all tokens of a step, good and bad responses alike.",
        "No step has a log-prob.",
        y="nats per token",
    ),
    Plot(
        "Are the updates calm?",
        [Curve("gradient norm", "grad_norm", 2)],
        "Norm of the gradient before it is clipped.",
        "No step has a gradient norm.",
    ),
    Plot(
        "Which share of the tokens may still move?",
        [
            Curve("better than baseline", "kept_share_positive", 3),
            Curve("worse", "kept_share_negative", 2),
            Curve("all", "kept_share", 6, dashed=True),
        ],
        "Share of tokens that the objective's keep rule lets through, by the sign of the advantage.",
        "The objective keeps every token.",
    ),
    Plot(
        "How many responses does a step really learn from?",
        [
            Curve("tokens", "ess_token", 1),
            Curve("responses", "ess_response", 4),
            Curve("weights", "ess_weight", 6, dashed=True),
        ],
        "Effective share under ratios of tokens, of whole responses, and under the weights: 1 is all.",
        "Neither ratios nor weights were measured.",
    ),
    Plot(
        "How far from the policy that sampled?",
        [Curve("k1", "kl_k1", 6, dashed=True), Curve("k3", "kl_k3", 1)],
        "Two estimates of the KL divergence on the rows of each step, in nats per token.",
        "The run had no log-probs to take ratios to.",
        y="nats per token",
    ),
    Plot(
        "How many tokens have run away?",
        [
            Curve("ratio above 2", "ratio_above_2_share", 3),
            Curve("below a half", "ratio_below_half_share", 2),
        ],
        "Share of tokens that are more than twice, or less than half, as likely as when they were sampled.",
        "The run had no log-probs to take ratios to.",
    ),
    Plot(
        "How large were the steps?",
        [Curve("learning rate", "lr", 5)],
        "The learning rate of every update.",
        "No step has a learning rate.",
    ),
)


def held_out(con: "duckdb.DuckDBPyConnection") -> list[Any]:
    """What was measured on held-out rows while the run went on."""
    drawn = [plotted(con, plot) for plot in HELD_OUT]
    if not any(isinstance(one, Chart) for one in drawn):
        return [Note(HELD_OUT[0].empty)]
    return [Grid(drawn)]


def training(con: "duckdb.DuckDBPyConnection") -> list[Any]:
    """What every step looked like."""
    if not con.execute("SELECT count(*) FROM metrics WHERE step > 0").fetchall()[0][0]:
        return [Note("The run has recorded no step yet.")]
    drawn = [plotted(con, plot) for plot in TRAINING]
    return [Grid([*drawn[:3], _ratios(con), *drawn[3:]])]


def plotted(con: "duckdb.DuckDBPyConnection", plot: Plot) -> Chart | Table:
    """The chart of a plot, or why there is none."""
    found = [(curve, *values) for curve in plot.curves if (values := series(con, curve.path))[0]]
    if not found:
        return Table(plot.question, (), (), says=plot.empty)
    drawn = [charts.Line(x, y, curve.colour, dashed=curve.dashed) for curve, x, y in found]
    svg = charts.lines(drawn, x="step", y=plot.y, log=plot.log, level=plot.level, says=plot.question)
    main = [(curve, y) for curve, _, y in found if not curve.dashed]
    told = " ".join(_told(curve.name if len(main) > 1 else "", y) for curve, y in main[:2])
    legend = [Legend(curve.name, curve.colour) for curve, *_ in found] if len(found) > 1 else []
    return Chart(plot.question, svg, legend, f"{plot.says} {told}", _numbers(found))


def _told(name: str, y: Sequence[float]) -> str:
    named = f"{name[0].upper()}{name[1:]}: from" if name else "From"
    return f"{named} {number(y[0])} to {number(y[-1])}."


def _numbers(found: Sequence[tuple[Curve, list[float], list[float]]]) -> Table:
    steps = sorted({step for _, x, _ in found for step in x})
    every = max(1, -(-len(steps) // TABLE_ROWS))
    chosen = sorted({*steps[::every], *steps[-1:]})
    columns = [dict(zip(x, y, strict=True)) for _, x, y in found]
    rows = [[number(round(step)), *(number(column.get(step)) for column in columns)] for step in chosen]
    return Table("", ["step", *(curve.name for curve, *_ in found)], rows, tuple(range(len(found) + 1)))


def series(con: "duckdb.DuckDBPyConnection", path: str) -> tuple[list[float], list[float]]:
    """Steps and values of what lies under a path of the records; means of neighbours where there are many."""
    value = f"TRY_CAST(j->>'$.{path}' AS DOUBLE)"
    rows = con.execute(
        f"""WITH found AS (SELECT step, {value} AS y FROM {RECORDS} WHERE isfinite({value})),
            many AS (SELECT greatest(1, ceil(count(*) / {POINTS}))::BIGINT AS width FROM found),
            placed AS (SELECT *, (row_number() OVER (ORDER BY step) - 1) // width AS bin FROM found, many)
        SELECT max(step)::DOUBLE, avg(y) FROM placed GROUP BY bin ORDER BY 1"""
    ).fetchall()
    return [step for step, _ in rows], [y for _, y in rows]


def _ratios(con: "duckdb.DuckDBPyConnection") -> Chart | Table:
    """Quantiles of the mean ratios of responses."""
    question = "How far do responses lie from the policy that sampled them?"
    rows = con.execute(
        f"""WITH many AS (SELECT greatest(1, ceil(max(step) / {POINTS // 3}))::BIGINT AS width FROM lineage)
        SELECT max(step)::DOUBLE, quantile_cont(mean_ratio::DOUBLE, [0.05, 0.25, 0.5, 0.75, 0.95])
        FROM lineage, many WHERE isfinite(mean_ratio) GROUP BY (step - 1) // width ORDER BY 1"""
    ).fetchall()
    if not rows:
        return Table(question, (), (), says="No ratios were kept: the run had no log-probs to take them to.")
    steps = [step for step, _ in rows]
    low, lower, middle, upper, high = ([q[i] for _, q in rows] for i in range(5))
    svg = charts.lines(
        [charts.Line(steps, middle, 1, low, high), charts.Line(steps, middle, 1, lower, upper)],
        x="step",
        y="mean ratio of a response",
        level=1,
        log=max(high) > 20 * max(min(low), 1e-9),
        says=question,
    )
    every = max(1, -(-len(rows) // TABLE_ROWS))
    numbers = [[number(round(step)), *map(number, q)] for step, q in rows[::every]]
    told = (
        "Mean ratio of the tokens of a response: the median, and the bands that hold half and nine tenths of "
        f"the responses. At the end 90 % lie between {number(low[-1])} and {number(high[-1])}."
    )
    columns = ["step", "5 %", "25 %", "median", "75 %", "95 %"]
    return Chart(question, svg, (), told, Table("", columns, numbers, tuple(range(6))))
