"""What a run's policy changed: responses that it made likelier or less likely, by its scores in a dataset."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offline_rec.reporting import groups, histograms
from offline_rec.reporting.blocks import Grid, Group, Groups, Legend, Note, Table
from offline_rec.reporting.plain_text import plural, share, signed
from offline_rec.reporting.scores import kept_scores, sidecars

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from data_tools.store.dataset import StoredDataset

LISTED = 8
"""Responses that are shown of each kind."""

KINDS = ("better than their group", "worse than their group", "equal, alone or not judged")

BY_KIND = """WITH rewards AS (
        SELECT hash(response_id) AS key, group_id, reward FROM rollouts),
    means AS (SELECT group_id, avg(reward) AS mean FROM rewards GROUP BY group_id)
    SELECT c.change AS x,
        CASE WHEN reward > mean + 1e-9 THEN 0 WHEN reward < mean - 1e-9 THEN 1 ELSE 2 END AS s
    FROM _changes c JOIN rewards USING (key) JOIN means USING (group_id)"""


@dataclass(frozen=True)
class Change:
    """Two policies whose scores a dataset holds: `end` the key of the later one, `start` of the earlier one.

    Without `start` the earlier one is whoever sampled each response, by the logged log-probs.
    """

    ds: "StoredDataset"
    end: str
    start: str | None

    @classmethod
    def of(cls, ds: "StoredDataset", *, end: str | None, start: str | None) -> "Change | None":
        """From the names of weights, as far as the dataset has scores of them; None without the end."""
        there = [one.key for one in kept_scores(ds)] if end else []
        if end is None or end not in there:
            return None
        first = next((key for key in there if start and key.startswith(start) and key != end), None)
        return cls(ds, end, first)

    @property
    def view(self) -> groups.TokenView:
        """What tokens are coloured by."""
        return groups.TokenView(self.end, self.start)

    @property
    def since(self) -> str:
        """What the change is counted from."""
        return "the policy that sampled it" if self.start is None else "the start of the run"

    def table(self) -> "pa.Table":
        """The change of log-prob of every response that both know: (response_id hash, change)."""
        return self._select("SELECT hash(response_id) AS key, change FROM changes")

    def extremes(self, *, upwards: bool) -> list[str]:
        """The ids of the responses that changed most in one direction."""
        order, sign = ("DESC", ">") if upwards else ("ASC", "<")
        found = self._select(
            f"SELECT response_id FROM changes WHERE change {sign} 0 ORDER BY change {order}, response_id "
            f"LIMIT {LISTED}"
        )
        ids: list[str] = found.column(0).to_pylist()
        return ids

    def sample(self, seed: int, count: int) -> list[str]:
        """Ids of some responses that have scores."""
        found = self._select(
            f"SELECT response_id FROM changes ORDER BY md5('{seed}' || response_id) LIMIT {count}"
        )
        ids: list[str] = found.column(0).to_pylist()
        return ids

    def _select(self, query: str) -> "pa.Table":
        keys = [self.end] if self.start is None else [self.end, self.start]
        before = "l.behavior_logprob" if self.start is None else "s.logprob"
        start = "" if self.start is None else "JOIN scores_1 s USING (file, file_row)"
        with sidecars(self.ds, keys) as con:
            con.execute(
                f"""CREATE VIEW changes AS SELECT l.response_id, e.logprob - {before} AS change
                FROM scores_0 e JOIN logged l USING (file, file_row) {start}
                WHERE isfinite(e.logprob - {before})"""
            )
            return con.sql(query).to_arrow_table()


def changed(change: Change | None, where: str, dataset: str, *, listed: bool) -> list[Any]:
    """The charts of what changed and, if they are to be `listed`, the responses that did most."""
    if change is None:
        why = "There are no log-probs of this policy on rows of its dataset; an estimate leaves some:"
        return [Note(why, f"rec ope {where} --data {dataset}")]
    with change.ds.connect() as con:
        con.register("_changes", change.table())
        blocks = _overall(con, change)
        if listed:
            promoted, demoted = (change.extremes(upwards=upwards) for upwards in (True, False))
            blocks += _listed(con, change, "Most promoted responses", promoted)
            blocks += _listed(con, change, "Most demoted responses", demoted, with_key=not promoted)
    return blocks


def _overall(con: "duckdb.DuckDBPyConnection", change: Change) -> list[Any]:
    found = histograms.histogram(con, BY_KIND, series=len(KINDS))
    if found is None:
        return [Note("No response has log-probs of both policies.")]
    means = {
        kind: (mean, up, n)
        for kind, mean, up, n in con.execute(
            f"SELECT s, avg(x), avg((x > 0)::INT), count(*) FROM ({BY_KIND}) GROUP BY s"
        ).fetchall()
    }
    rows = [[KINDS[kind], f"{n:,}", signed(mean), share(up)] for kind, (mean, up, n) in sorted(means.items())]
    question = "Did good responses become likelier, and bad ones less likely?"
    legend = [Legend(KINDS[0], 3), Legend(KINDS[1], 2), Legend(KINDS[2], 6)]
    many = plural(found.values, "response")
    says = f"Change of the log-prob of a whole response since {change.since}, for {many}."
    chart = histograms.chart(
        question, found, x="change of log-prob (nats)", legend=legend, says=says, colours=(3, 2, 6)
    )
    columns = ["responses", "number", "mean change", "became likelier"]
    return [Grid([chart, Table("In numbers", columns, rows, (1, 2, 3), broad=True)])]


def _listed(
    con: "duckdb.DuckDBPyConnection",
    change: Change,
    question: str,
    ids: Sequence[str],
    *,
    with_key: bool = True,
) -> list[Any]:
    if not ids:
        return [Note(f"{question}: there are none.")]
    found = {row["response_id"]: row for row in groups.rows_where(con, groups.in_list("response_id", ids))}
    rows = [found[one] for one in ids if one in found]
    coloured, key = groups.colour(change.ds, rows, change.view)
    responses = [groups.response(row, coloured, None, prompted=True) for row in rows]
    toned = groups.toned(responses, rows, middle=_middle(con))
    says = f"by their change of log-prob since {change.since}"
    return [Groups([Group(question, says, "", toned, 0, open=True)], key if with_key else "")]


def _middle(con: "duckdb.DuckDBPyConnection") -> float:
    return float(con.execute("SELECT coalesce(avg(reward), 0) FROM rollouts").fetchall()[0][0])
