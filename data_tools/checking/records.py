"""What takes a look across rows: equal ones, flags, versions against time, scales of rewards."""

from typing import TYPE_CHECKING, Any

from data_tools.checking.findings import EXAMPLES, Findings, Rule
from data_tools.collecting.reasons import FLAGS

if TYPE_CHECKING:
    import duckdb

IMPROBABLE = -12.0
"""Log-prob of a response that is not drawn twice by chance (6 in a million)."""

LONG_RESPONSE = 200
"""Characters of a response that stands for an improbable one where log-probs are missing."""

SCALE_RATIO = 10.0

COUNTED_ELSEWHERE = frozenset({"truncated", "raw_at_temperature", "greedy"})
DAMAGED = frozenset(
    {
        *("retokenised", "bad_ids", "bad_prompt_ids", "missing_logprobs", "positive_logprobs"),
        *("logprob_length", "logprobs_without_ids", "broken_tool_arguments", "mixed_sampling"),
        *("not_trained", "doubtful_reward", "no_special_tokens", "column_length"),
    }
)

_SHOW_FLAG = (
    'rec sql {dataset} "SELECT response_id, source_file, source_row FROM rollouts'
    " WHERE list_contains(flags, '{flag}')\""
)
FLAGGED = Rule(
    "flagged",
    "warning",
    "collecting found the ids, log-probs, texts or reward of the row damaged",
    _SHOW_FLAG,
)
MARKED = Rule("marked", "info", "collecting flagged something about the row", _SHOW_FLAG)
DUPLICATE_ID = Rule(
    "duplicate_id",
    "error",
    "several rows have one response id: a batch was copied by hand",
    "rec delete {dataset} --where \"file = '{file}'\"",
)
DUPLICATE = Rule(
    "duplicate",
    "warning",
    "the same response of the same policy to the same prompt, too improbable to be drawn twice: a log was"
    " collected twice under another first record",
    "rec delete {dataset} --where \"source_file = 'FILE'\"",
)
TIME_ORDER = Rule(
    "time_order",
    "warning",
    "a newer policy version sampled earlier than an older one: versions or times are mixed up",
    'rec sql {dataset} "SELECT policy, policy_version, min(sampled_at), max(sampled_at) FROM rollouts'
    ' GROUP BY ALL ORDER BY ALL"',
    "versions",
)
MISSING_VERSION = Rule(
    "missing_version",
    "warning",
    "no policy version, although other rows of the policy have one: its staleness is unknown",
    "rec collect LOGS --into NEW --policy-version NUMBER",
)
REWARD_SCALES = Rule(
    "reward_scales",
    "warning",
    "rewards of one source are more than ten times as large as those of another",
    'rec sql {dataset} "SELECT source_file, min(reward), max(reward) FROM rollouts GROUP BY ALL"',
    "sources",
)

RECORD_RULES = (FLAGGED, MARKED, DUPLICATE_ID, DUPLICATE, TIME_ORDER, MISSING_VERSION, REWARD_SCALES)

_DUPLICATE_IDS = f"""SELECT coalesce(sum(n - 1), 0)::BIGINT, min(id, {EXAMPLES}), min(file) FROM (
    SELECT response_id AS id, count(*) AS n, max(file) AS file FROM checked GROUP BY ALL HAVING n > 1)"""

_DUPLICATES = f"""SELECT coalesce(sum(n - 1), 0)::BIGINT, min(id, {EXAMPLES}) FROM (
    SELECT count(*) AS n, max(response_id) AS id FROM checked
    WHERE temperature IS DISTINCT FROM 0
        AND coalesce(behavior_logprob < {IMPROBABLE}, length(response) > {LONG_RESPONSE})
    GROUP BY prompt_hash, md5(response), behavior_logprob, policy, policy_version HAVING n > 1)"""

_VERSIONS = """SELECT policy, policy_version, avg(epoch(sampled_at)) AS sampled, min(response_id) AS id
    FROM checked WHERE policy_version IS NOT NULL AND sampled_at IS NOT NULL GROUP BY ALL"""

_TIME_ORDER = f"""SELECT count(*) FILTER (late), min(id, {EXAMPLES}) FILTER (late), count(*) FROM (
    SELECT id, sampled < lag(sampled) OVER (PARTITION BY policy ORDER BY policy_version) AS late
    FROM ({_VERSIONS}))"""

_MISSING_VERSIONS = f"""SELECT coalesce(sum(lacking), 0)::BIGINT, min(id, {EXAMPLES}) FROM (
    SELECT count(*) FILTER (policy_version IS NULL) AS lacking, count(policy_version) AS known,
        min(response_id) FILTER (policy_version IS NULL) AS id
    FROM checked WHERE policy IS NOT NULL GROUP BY policy HAVING lacking > 0 AND known > 0)"""

_SCALES = f"""SELECT count(*) FILTER (most > {SCALE_RATIO} * least),
        min(id, {EXAMPLES}) FILTER (most > {SCALE_RATIO} * least), count(*) FROM (
    SELECT most, id, min(most) OVER () AS least FROM (
        SELECT max(abs(reward)) AS most, min(response_id) AS id FROM checked
        WHERE isfinite(reward) GROUP BY source_file HAVING most > 0))"""


def find_records(con: "duckdb.DuckDBPyConnection", total: int, findings: Findings) -> None:
    """Note what is found across the `total` rows of the view `checked`."""
    [(copies, rows, file)] = con.sql(_DUPLICATE_IDS).fetchall()
    findings.add(DUPLICATE_ID, copies, rows, of=total, file=file)
    findings.add(DUPLICATE, *_found(con, _DUPLICATES), of=total)
    findings.add(MISSING_VERSION, *_found(con, _MISSING_VERSIONS), of=total)
    for rule, query in ((TIME_ORDER, _TIME_ORDER), (REWARD_SCALES, _SCALES)):
        count, rows, of = _found(con, query)
        findings.add(rule, count, rows, of=of)
    _flags(con, total, findings)


def reward_facts(con: "duckdb.DuckDBPyConnection") -> dict[str, Any]:
    """Range and type of the rewards: `binary` (0 and 1), `whole` numbers, `continuous`, or None."""
    found = con.sql(
        """SELECT count(reward), min(reward), max(reward), avg(reward),
            CASE WHEN count(reward) = 0 THEN NULL WHEN bool_and(reward IN (0, 1)) THEN 'binary'
            WHEN bool_and(reward = round(reward)) THEN 'whole' ELSE 'continuous' END
        FROM checked WHERE reward IS NULL OR isfinite(reward)"""
    ).fetchall()[0]
    return dict(zip(("count", "min", "max", "mean", "type"), found, strict=True))


def _found(con: "duckdb.DuckDBPyConnection", query: str) -> Any:
    return con.sql(query).fetchall()[0]


def _flags(con: "duckdb.DuckDBPyConnection", total: int, findings: Findings) -> None:
    query = f"""SELECT flag, count(*) AS n, min(response_id, {EXAMPLES})
        FROM (SELECT response_id, unnest(flags) AS flag FROM checked) GROUP BY flag ORDER BY n DESC, flag"""
    for flag, count, rows in con.sql(query).fetchall():
        if flag in COUNTED_ELSEWHERE:
            continue
        rule = FLAGGED if flag in DAMAGED else MARKED
        detail = f"{flag}: {FLAGS.get(flag, 'a flag of the log itself')}"
        findings.add(rule, count, rows, of=total, detail=detail, flag=flag.replace("'", "''"))
