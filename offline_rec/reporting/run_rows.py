"""Which rows a run learned from: the weight by policy and staleness, and how often a row was used."""

from typing import TYPE_CHECKING, Any

from offline_rec.reporting import charts, histograms
from offline_rec.reporting.blocks import Bar, Cell, Chart, Grid, Note, Table
from offline_rec.reporting.plain_text import name, number, plural, share

if TYPE_CHECKING:
    import duckdb

    from data_tools.run_directory import RunDirectory
    from data_tools.store.dataset import StoredDataset

TABLE_ROWS = 30

USED = """SELECT hash(response_id) AS key, sum(weight) AS weight, count(*)::BIGINT AS uses,
    avg(mean_ratio) AS ratio, avg(kept_share) AS kept FROM lineage GROUP BY response_id"""

BY_POLICY = """SELECT policy, policy_version, any_value(staleness) AS staleness, count(*) AS rows,
        sum(uses)::BIGINT AS uses, sum(u.weight) AS mass, avg(u.ratio), avg(u.kept)
    FROM _used u JOIN rollouts r ON hash(r.response_id) = u.key
    GROUP BY policy, policy_version ORDER BY mass DESC, policy, policy_version"""

BY_STALENESS = """SELECT staleness, sum(u.weight) FROM _used u JOIN rollouts r ON hash(r.response_id) = u.key
    WHERE staleness IS NOT NULL GROUP BY staleness ORDER BY staleness"""


def trained_rows(run: "RunDirectory", ds: "StoredDataset | None") -> list[Any]:
    """The weight mass of a run's rows and their uses."""
    with run.connect() as con:
        if not con.execute("SELECT count(*) FROM (FROM lineage LIMIT 1)").fetchall()[0][0]:
            return [Note("The run kept no lineage yet: it is written with each checkpoint.")]
        uses = histograms.histogram(con, "SELECT count(*) AS x FROM lineage GROUP BY response_id")
        used = con.sql(USED).to_arrow_table() if ds is not None else None
    blocks: list[Any] = []
    if ds is None or used is None:
        blocks.append(Note("The dataset of the run is not there: whose rows these were cannot be told."))
    else:
        with ds.connect() as con:
            con.register("_used", used)
            blocks += [_by_policy(con), *_by_staleness(con)]
    question = "How often was a response used?"
    charted = (
        [] if uses is None else [histograms.chart(question, uses, x="steps that a response was part of")]
    )
    return [*blocks[:1], Grid([*blocks[1:], *charted])]


def _by_policy(con: "duckdb.DuckDBPyConnection") -> Table | Note:
    found = con.execute(BY_POLICY).fetchall()
    if not found:
        return Note("The rows of the run are no longer in its dataset.")
    mass = sum(row[5] for row in found) or 1.0
    rows: list[list[Cell]] = [
        [
            name(policy),
            "–" if version is None else f"{version}",
            number(staleness),
            f"{count:,}",
            f"{uses:,}",
            Bar(share(weight, mass), weight / mass),
            number(ratio),
            share(kept),
        ]
        for policy, version, staleness, count, uses, weight, ratio, kept in found[:TABLE_ROWS]
    ]
    columns = [
        "policy",
        "version",
        "versions old",
        "responses",
        "uses",
        "weight",
        "mean ratio",
        "tokens kept",
    ]
    more = len(found) - len(rows)
    says = f"{plural(more, 'more version')} are not shown." if more else ""
    return Table("Whose responses had the weight?", columns, rows, (1, 2, 3, 4, 6, 7), says)


def _by_staleness(con: "duckdb.DuckDBPyConnection") -> list[Any]:
    question = "How old was what it learned from?"
    found = con.execute(BY_STALENESS).fetchall()
    if len(found) < 2:
        why = (
            "All trained responses are equally many versions old." if found else "No response has a version."
        )
        return [Table(question, (), (), says=why)]
    total = sum(weight for _, weight in found) or 1.0
    least, most = found[0][0], found[-1][0]
    width = -(-(most - least + 1) // histograms.BINS)
    shares = [0.0] * (-(-(most - least + 1) // width))
    for staleness, weight in found:
        shares[(staleness - least) // width] += 100 * weight / total
    edges = [least - 0.5 + i * width for i in range(len(shares) + 1)]
    svg = charts.bars(
        edges,
        [shares],
        x="versions behind the newest",
        y="% of the weight",
        says=question,
        tips=[f"{one:.1f} %" for one in shares],
    )
    mean = sum(staleness * weight for staleness, weight in found) / total
    rows = [[f"{staleness:,}", share(weight, total)] for staleness, weight in found[:200]]
    told = f"The weight lies {number(mean)} versions back on average."
    return [Chart(question, svg, (), told, Table("", ["versions old", "weight"], rows, (0, 1)))]
