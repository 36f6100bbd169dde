"""Who sampled the responses of a dataset, and when."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from data_tools.store.views import literal
from offline_rec.reporting import charts, histograms
from offline_rec.reporting.blocks import Bar, Cell, Chart, Grid, Legend, Note, Table
from offline_rec.reporting.plain_text import moment, name, number, plural, share

if TYPE_CHECKING:
    import duckdb

SERIES = 5
"""Policies that have a colour of their own; the others share one."""

TABLE_ROWS = 16


def composition(con: "duckdb.DuckDBPyConnection", facts: dict[str, Any]) -> list[Any]:
    """Policies and versions, times of sampling, rewards over versions, staleness."""
    if not facts["rows"]:
        return [Note("The dataset holds no response yet.", "rec collect LOGS --into DATASET")]
    return [_policies(con, facts["rows"]), Grid([*_times(con), *_versions(con), *_staleness(con)])]


def _policies(con: "duckdb.DuckDBPyConnection", total: int) -> Table:
    found = con.execute(
        f"""SELECT policy, policy_version, count(*) AS n, avg(reward), count(behavior_logprob) / count(*),
            min(sampled_at), max(sampled_at), count(*) OVER () FROM rollouts GROUP BY policy, policy_version
            ORDER BY policy NULLS LAST, policy_version DESC NULLS LAST LIMIT {TABLE_ROWS}"""
    ).fetchall()
    most = max(row[2] for row in found)
    rows: list[list[Cell]] = [
        [
            name(policy),
            "–" if version is None else f"{version}",
            Bar(f"{n:,} ({share(n, total)})", n / most),
            number(reward),
            share(logged),
            moment(first),
            moment(last),
        ]
        for policy, version, n, reward, logged, first, last, _ in found
    ]
    more = found[0][-1] - len(found)
    rest = total - sum(row[2] for row in found)
    return Table(
        "Who sampled the responses?",
        ["policy", "version", "responses", "mean reward", "with log-probs", "first sampled", "last sampled"],
        rows,
        (1, 3, 4),
        f"{plural(more, 'more version')} with {rest:,} responses." if more > 0 else "",
    )


def _series(con: "duckdb.DuckDBPyConnection", condition: str = "true") -> tuple[list[Legend], str]:
    """The policies of most rows as series, and the expression that gives a row the number of its series."""
    found = con.execute(
        f"SELECT policy, count(*) AS n FROM rollouts WHERE {condition} GROUP BY policy "
        f"ORDER BY n DESC, policy LIMIT {SERIES + 1}"
    ).fetchall()
    named = [policy for policy, _ in found[:SERIES]]
    legend = [Legend(name(policy), i + 1) for i, policy in enumerate(named)]
    cases = " ".join(
        f"WHEN policy IS NOT DISTINCT FROM {'NULL' if policy is None else literal(policy)} THEN {i}"
        for i, policy in enumerate(named)
    )
    if len(found) > SERIES:
        legend.append(Legend("others", SERIES + 1))
    return legend, f"CASE {cases} ELSE {SERIES} END"


def _times(con: "duckdb.DuckDBPyConnection") -> list[Any]:
    legend, series = _series(con, "sampled_at IS NOT NULL")
    values = f"SELECT epoch(sampled_at) AS x, {series} AS s FROM rollouts WHERE sampled_at IS NOT NULL"
    found = histograms.histogram(con, values, series=len(legend), bins=24) if legend else None
    question = "When were they sampled?"
    if found is None:
        return [missing(question, "No response has a time of sampling.")]
    if found.most == found.least:
        return [missing(question, f"All at one time: {_day(found.least)}.")]
    days = [edge / 86400 for edge in found.edges]
    tips = [f"from {_day(edge)}: {n:,}" for edge, n in zip(found.edges, found.totals, strict=False)]
    rows = [[_day(edge), f"{n:,}"] for edge, n in zip(found.edges, found.totals, strict=False)]
    return [
        Chart(
            question,
            charts.bars(days, found.counts, x="time of sampling (UTC)", tips=tips, dates=True, says=question),
            legend,
            f"From {_day(found.least)} to {_day(found.most)}.",
            Table("", ["from", "responses"], rows, (1,)),
        )
    ]


def _day(seconds: float) -> str:
    return moment(datetime.fromtimestamp(seconds, UTC))


def missing(question: str, why: str) -> Table:
    """The place of a chart that has nothing to draw, with the reason."""
    return Table(question, (), (), says=why)


def _versions(con: "duckdb.DuckDBPyConnection") -> list[Any]:
    """Mean reward over the versions of each policy that has several."""
    found = con.execute(
        f"""WITH versions AS (SELECT policy, policy_version AS v, avg(reward) AS reward, count(reward) AS n
            FROM rollouts WHERE policy_version IS NOT NULL AND reward IS NOT NULL GROUP BY ALL),
        several AS (SELECT policy, sum(n) AS n FROM versions GROUP BY policy HAVING count(*) > 1
            ORDER BY n DESC, policy LIMIT {SERIES})
        SELECT s.policy, list(v ORDER BY v), list(versions.reward ORDER BY v) FROM versions
        JOIN several s ON s.policy IS NOT DISTINCT FROM versions.policy GROUP BY s.policy, s.n
        ORDER BY s.n DESC, s.policy"""
    ).fetchall()
    question = "Does the reward change from version to version?"
    if not found:
        return [missing(question, "No policy has several versions with rewards.")]
    curves = [charts.Line(versions, rewards, i + 1) for i, (_, versions, rewards) in enumerate(found)]
    svg = charts.lines(curves, x="version of the policy", y="mean reward", says=question)
    rows = [
        [name(policy), f"{version}", number(reward)]
        for policy, versions, rewards in found
        for version, reward in zip(versions, rewards, strict=True)
    ]
    numbers = Table("", ["policy", "version", "mean reward"], rows[:500], (1, 2))
    return [Chart(question, svg, [Legend(name(p), i + 1) for i, (p, *_) in enumerate(found)], "", numbers)]


def _staleness(con: "duckdb.DuckDBPyConnection") -> list[Any]:
    question = "How many versions old are the responses?"
    found = histograms.histogram(con, "SELECT staleness AS x FROM rollouts")
    if found is None:
        return [missing(question, "No response says which version of its policy sampled it.")]
    told = f"Versions behind the newest of the same policy: {number(found.mean)} on average."
    return [histograms.chart(question, found, x="versions behind the newest", says=told)]
