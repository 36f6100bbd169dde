"""The facts of `rec stats`, each an aggregate over scalar columns: memory does not grow with the data."""

from typing import TYPE_CHECKING, Any

from data_tools.store.swaps import SIDECAR_KINDS, sidecar_folders

if TYPE_CHECKING:
    import duckdb

    from data_tools.store.dataset import StoredDataset
    from data_tools.store.storage import Storage

Facts = dict[str, Any]

QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}

_FOLDERS = ("rollouts", "rejects", "rewards", *SIDECAR_KINDS)


def dataset_stats(dataset: "StoredDataset") -> Facts:
    """Return the facts about a dataset as JSON-able values.

    Lengths are in tokens. A quantile is a value that occurs: the smallest that at least this share does not
    exceed. What has no data is null.
    """
    batches = dataset.batches()
    with dataset.connect() as con:
        return {
            "path": dataset.path,
            "format_version": dataset.info.format_version,
            "created": dataset.info.created.isoformat(),
            "bytes": {folder: dataset.storage.total_size(folder) for folder in _FOLDERS},
            "batches": len(batches),
            **_first(con, "SELECT count(*) AS rows FROM rollouts"),
            **_first(con, "SELECT count(*) AS prompts FROM (SELECT DISTINCT prompt_hash FROM rollouts)"),
            "groups": _groups(con),
            "rewards": _rewards(con),
            "logprobs": _logprobs(con),
            "lengths": _lengths(con),
            "policies": _rows(con, _POLICIES),
            "staleness": _summary(con, "SELECT staleness FROM rollouts"),
            "age_days": _summary(con, "SELECT round(age_days, 2) FROM rollouts"),
            "splits": _splits(con),
            "finish_reasons": _counts(con, "SELECT finish_reason FROM rollouts"),
            "flags": _counts(con, "SELECT unnest(flags) FROM rollouts"),
            "rejects": _counts(con, "SELECT reason FROM rejects"),
            "sidecars": _sidecars(dataset.storage, batches),
        }


def _groups(con: "duckdb.DuckDBPyConnection") -> Facts:
    """Return group facts; the zero-variance share is of the groups with at least two rewards."""
    facts = _first(
        con,
        """SELECT count(*) AS count, count(*) FILTER (n = 1) AS single,
            count(*) FILTER (n_rewarded > 1) AS comparable,
            count(*) FILTER (n_rewarded > 1 AND zero_variance) AS zero_variance FROM groups""",
    )
    facts["zero_variance_share"] = _share(facts["zero_variance"], facts["comparable"])
    facts["sizes"] = _summary(con, "SELECT n FROM groups")
    return facts


def _rewards(con: "duckdb.DuckDBPyConnection") -> Facts:
    facts = _first(
        con,
        """SELECT count(reward) AS count, count(*) - count(reward) AS "null", avg(reward) AS mean,
            stddev_pop(reward) AS std FROM rollouts""",
    )
    facts["null_share"] = _share(facts["null"], facts["null"] + facts["count"])
    return facts | (_summary(con, "SELECT reward FROM rollouts") or {})


def _logprobs(con: "duckdb.DuckDBPyConnection") -> Facts:
    """Return how many rows have token ids and usable log-probs (none missing where the mask is 1)."""
    facts = _first(
        con,
        """SELECT count(*) AS rows, count(n_tokens) AS with_ids, count(behavior_logprob) AS with_logprobs
        FROM rollouts""",
    )
    rows = facts.pop("rows")
    facts["ids_share"] = _share(facts["with_ids"], rows)
    facts["logprobs_share"] = _share(facts["with_logprobs"], rows)
    facts["kinds"] = _counts(con, "SELECT logprob_kind FROM rollouts WHERE behavior_logprob IS NOT NULL")
    return facts


def _lengths(con: "duckdb.DuckDBPyConnection") -> Facts:
    """Return lengths in tokens, and of the responses without ids in characters."""
    return {
        "prompt_tokens": _summary(con, "SELECT n_prompt_tokens FROM rollouts"),
        "response_tokens": _summary(con, "SELECT n_tokens FROM rollouts"),
        "response_characters": _summary(con, "SELECT length(response) FROM rollouts WHERE n_tokens IS NULL"),
    }


_POLICIES = """SELECT policy, count(*) AS rows,
    min(policy_version) AS min_version, max(policy_version) AS max_version,
    avg(reward) AS mean_reward, count(behavior_logprob) / count(*) AS logprobs_share,
    CAST(min(sampled_at) AS VARCHAR) AS first_sampled_at, CAST(max(sampled_at) AS VARCHAR) AS last_sampled_at
    FROM rollouts GROUP BY policy ORDER BY rows DESC, policy"""


def _splits(con: "duckdb.DuckDBPyConnection") -> Facts:
    query = """SELECT split, sum(n)::BIGINT AS rows, count(*) AS prompts
        FROM (SELECT prompt_hash, min(split) AS split, count(*) AS n FROM rollouts GROUP BY prompt_hash)
        GROUP BY split ORDER BY split DESC"""
    return {row.pop("split"): row for row in _rows(con, query)}


def _sidecars(storage: "Storage", batches: list[str]) -> Facts:
    """Return for each folder of sidecars how many batches it covers and lacks."""
    facts = {}
    for folder in sidecar_folders(storage):
        present = len(set(storage.stems(folder, ".parquet")) & set(batches))
        facts[folder] = {"batches": present, "missing": len(batches) - present}
    return facts


def _summary(con: "duckdb.DuckDBPyConnection", values: str) -> Facts | None:
    """Return mean, extremes and quantiles of the one column of a SELECT, None where all is null.

    Counting equal values first keeps it exact, and lets DuckDB spill to disk, which its quantile functions
    cannot.
    """
    listed = ", ".join(f"({share})" for share in QUANTILES.values())
    query = f"""WITH counted AS MATERIALIZED (
            SELECT x, count(*) AS n FROM ({values}) v(x) WHERE x IS NOT NULL GROUP BY x),
        running AS (SELECT x, sum(n) OVER (ORDER BY x) AS upto FROM counted),
        total AS (
            SELECT sum(n) AS n, sum(x * n) / sum(n) AS mean, min(x) AS least, max(x) AS most FROM counted)
        SELECT mean, least, most, list(x ORDER BY share) FROM total,
            (SELECT share, min(x) AS x FROM running, total, (VALUES {listed}) q(share)
             WHERE upto >= greatest(1, ceil(share * total.n)) GROUP BY share)
        GROUP BY ALL"""
    found = con.sql(query).fetchall()
    if not found:
        return None
    mean, least, most, quantiles = found[0]
    return {"mean": mean, "min": least, **dict(zip(QUANTILES, quantiles, strict=True)), "max": most}


def _counts(con: "duckdb.DuckDBPyConnection", values: str) -> dict[str, int]:
    """Return how often each value of the one column of a SELECT occurs, the most frequent first; null as
    'null'.
    """
    query = f"SELECT coalesce(x, 'null'), count(*) AS n FROM ({values}) v(x) GROUP BY x ORDER BY n DESC, x"
    return dict(con.sql(query).fetchall())


def _rows(con: "duckdb.DuckDBPyConnection", query: str) -> list[Facts]:
    result = con.sql(query)
    return [dict(zip(result.columns, row, strict=True)) for row in result.fetchall()]


def _first(con: "duckdb.DuckDBPyConnection", query: str) -> Facts:
    return _rows(con, query)[0]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
