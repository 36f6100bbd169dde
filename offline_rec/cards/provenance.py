"""Where rows come from, as counts and names alone: sources, time span, policies, sampling, rewards."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb

LISTED = 20
"""Sources, policies and ways of sampling that are named; of the others there is the count."""

Facts = dict[str, Any]

_KINDS = """CREATE OR REPLACE TEMP TABLE _kinds AS
    SELECT policy, temperature, top_p, top_k, logprob_kind, source_file, count(*) AS rows,
        min(policy_version) AS oldest, max(policy_version) AS newest,
        min(sampled_at) AS first_sampled, max(sampled_at) AS last_sampled,
        count(sampled_at) AS dated, count(reward) AS judged, avg(reward) AS mean,
        var_pop(reward) AS variance, min(reward) AS least, max(reward) AS most
    FROM {rows} GROUP BY ALL"""
"""Scalars that few rows differ in, so that the rows themselves are read once."""

_POLICIES = """SELECT k.policy, sum(k.rows)::BIGINT AS rows, min(k.oldest) AS oldest_version,
        max(k.newest) AS newest_version, any_value(p.model) AS model, any_value(p.revision) AS revision,
        any_value(p.tokenizer) AS tokenizer,
        nullif(any_value(p.sampling), '{}') AS sampler
    FROM _kinds k LEFT JOIN _cards p ON p.policy = k.policy
    GROUP BY k.policy ORDER BY rows DESC, k.policy"""

_SAMPLING = """SELECT temperature::DOUBLE AS temperature, top_p::DOUBLE AS top_p, top_k,
        logprob_kind AS logprobs, sum(rows)::BIGINT AS rows
    FROM _kinds GROUP BY ALL ORDER BY rows DESC, temperature, top_p, top_k, logprobs"""

_SOURCES = """SELECT source_file AS source, sum(rows)::BIGINT AS rows
    FROM _kinds GROUP BY source_file ORDER BY rows DESC, source_file"""

_SPAN = """SELECT sum(rows)::BIGINT AS rows, sum(dated)::BIGINT AS dated,
    strftime(min(first_sampled), '%Y-%m-%d %H:%M:%S') AS first_sampled,
    strftime(max(last_sampled), '%Y-%m-%d %H:%M:%S') AS last_sampled FROM _kinds"""

_REWARDS = """SELECT judged, rows - judged AS not_judged, mean,
        sqrt(squares / nullif(judged - 1, 0)) AS std, least AS min, most AS max
    FROM (SELECT sum(k.judged)::BIGINT AS judged, sum(rows)::BIGINT AS rows, any_value(m.mean) AS mean,
        min(least) AS least, max(most) AS most,
        sum(k.judged * (variance + pow(k.mean - m.mean, 2))) AS squares
        FROM _kinds k, (SELECT sum(judged * mean) / nullif(sum(judged), 0) AS mean FROM _kinds) m)"""
"""Mean and deviation of all rows from those of their kinds."""

_JUDGES = """SELECT l.latest.source AS source, count(*) AS rows
    FROM {rows} r JOIN _later_rewards l USING (response_id) GROUP BY ALL ORDER BY rows DESC, source"""


def provenance(con: "duckdb.DuckDBPyConnection", rows: str = "rollouts") -> Facts:
    """Facts of a FROM item of rollouts, on a dataset's connection; times are UTC.

    `policies`, `sampling`, `sources` and `judges` hold at most LISTED records, most rows first, and `n_...`
    how many there are. `judges` are the sources of later rewards; all others came with the log.
    """
    con.execute(_KINDS.format(rows=rows))
    [span] = _records(con, _SPAN)
    [rewards] = _records(con, _REWARDS)
    facts: Facts = {"span": span, "rewards": rewards}
    queries = {"policies": _POLICIES, "sampling": _SAMPLING, "sources": _SOURCES}
    queries["judges"] = _JUDGES.format(rows=rows)
    for name, query in queries.items():
        facts[name] = _records(con, f"FROM ({query}) LIMIT {LISTED}")
        count = len(facts[name])
        if count == LISTED:
            [(count,)] = con.execute(f"SELECT count(*) FROM ({query})").fetchall()
        facts[f"n_{name}"] = count
    con.execute("DROP TABLE _kinds")
    return facts


def _records(con: "duckdb.DuckDBPyConnection", query: str) -> list[Facts]:
    result = con.execute(query)  # `sql` would look into the files once more, to know the columns first
    names = [column[0] for column in result.description or ()]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
