"""The SQL text of the views that every statement sees: rollouts, groups, rejects, policies.

A column that a query does not name is not read and costs nothing. Only the later rewards need a join, and
only where there are any: DuckDB has no lazier way to look a row up in another file.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime

import pyarrow as pa

from data_tools.schema import ERASED, REJECTS, REWARDS, ROLLOUTS

MAX_POLICIES_INLINE = 16
"""Up to so many policies their newest versions are constants in the view; more are joined."""


def literal(text: str) -> str:
    """Return a string as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    """Return a name as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def scan(files: Sequence[str], schema: pa.Schema, *, of_any_age: bool = False) -> str:
    """Return the FROM item over Parquet files, with `filename` and `file_row_number`; typed and empty without
    files.

    `of_any_age`: columns that came into the schema after a file was written are null; looks into every file.
    """
    listed = ", ".join(literal(file) for file in files)
    if files and not of_any_age:
        return f"read_parquet([{listed}], filename = true, file_row_number = true)"
    if files:
        files_read = (
            f"read_parquet([{listed}], filename = true, file_row_number = true, union_by_name = true)"
        )
        return f"(FROM {scan([], schema)} UNION ALL BY NAME FROM {files_read})"
    columns = [f"CAST(NULL AS {_sql_type(field.type)}) AS {identifier(field.name)}" for field in schema]
    columns += ["CAST(NULL AS VARCHAR) AS filename", "CAST(NULL AS BIGINT) AS file_row_number"]
    return f"(SELECT {', '.join(columns)} WHERE false)"


_SQL_TYPES = {
    pa.string(): "VARCHAR",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.uint8(): "UTINYINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.timestamp("us", tz="UTC"): "TIMESTAMPTZ",
}


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return _sql_type(kind.value_type) + "[]"
    return _SQL_TYPES[kind]


def split_macro(holdout: float, salt: str) -> str:
    """Return the macro `rec_split(key)`: 'train' or 'holdout' by the salted key of a prompt alone.

    The first 13 hex digits of md5 are an integer below 2^52, exact as a double, so the share is unbiased and
    any other program can recompute it. They are compared as text, which orders digits of one length alike.
    """
    first = math.ceil(holdout * 2.0**52)
    edge = f"{first:013x}" if first < 2**52 else "g"  # behind all digits
    return (
        f"CREATE OR REPLACE MACRO rec_split(key) AS CASE WHEN md5({literal(salt)} || key) < '{edge}' "
        "THEN 'holdout' ELSE 'train' END"
    )


SPLIT_KEYS = {
    "prompt_cluster": (
        "coalesce(r.prompt_cluster, r.prompt_hash)",
        # Of one column at a time: DuckDB then hashes each entry of its dictionary, and not each row.
        "CASE WHEN r.prompt_cluster IS NULL THEN rec_split(r.prompt_hash)"
        " ELSE rec_split(r.prompt_cluster) END",
    ),
    "prompt_hash": ("r.prompt_hash", "rec_split(r.prompt_hash)"),
}
"""What the split of a dataset may go by: the key of a row `r`, and its split. The second is that of datasets
made before there were clusters: a change would move prompts that were trained on into the holdout."""


def rollouts_view(
    files: Sequence[str],
    rewards: Sequence[str],
    *,
    newest: Mapping[str, int],
    now: datetime,
    split_by: str = "prompt_cluster",
) -> list[str]:
    """Return the statements that create `rollouts`, with the later rewards merged in.

    `newest` is the newest version of each policy: staleness counts back from it. `split_by` is one of
    SPLIT_KEYS.
    """
    reward, joins = "r.reward", ""
    if rewards:
        reward = "CASE WHEN l.response_id IS NULL THEN r.reward ELSE l.latest.reward END"
        joins = "LEFT JOIN _later_rewards l ON l.response_id = r.response_id"
    version, join = _newest_version(newest)
    key, split = SPLIT_KEYS[split_by]
    computed = {"reward": f"{reward} AS reward", "prompt_cluster": f"{key} AS prompt_cluster"}
    columns = [computed.get(name, f"r.{identifier(name)}") for name in ROLLOUTS.names]
    age = f"(epoch(TIMESTAMPTZ {literal(now.isoformat())}) - epoch(r.sampled_at)) / 86400.0"
    return [
        f"CREATE VIEW _rollouts AS SELECT * FROM {scan(files, ROLLOUTS)}",
        later_rewards_view(rewards),
        f"""CREATE VIEW rollouts AS SELECT {", ".join(columns)},
            {age} AS age_days,
            {version} - r.policy_version AS staleness,
            {split} AS split,
            parse_filename(r.filename, true) AS file,
            r.file_row_number AS file_row
        FROM _rollouts r {joins} {join}""",
    ]


def _newest_version(newest: Mapping[str, int]) -> tuple[str, str]:
    """Return the expression of the newest version of a row's policy, and the join that it needs, if any."""
    if not newest:
        return "CAST(NULL AS BIGINT)", ""
    if len(newest) > MAX_POLICIES_INLINE:
        listed = ", ".join(f"({literal(policy)}, {version})" for policy, version in newest.items())
        return (
            "n.version",
            f"LEFT JOIN (VALUES {listed}) n(policy, version) ON n.policy = coalesce(r.policy, '')",
        )
    cases = " ".join(f"WHEN {literal(policy)} THEN {version}" for policy, version in newest.items())
    return f"CAST(CASE coalesce(r.policy, '') {cases} END AS BIGINT)", ""


def newest_versions_query(files: Sequence[str]) -> str:
    """Return the SELECT of (file, policy, newest version) over rollouts files.

    Rows that name no policy are one unnamed policy, '': logs of a single run often hold versions alone.
    """
    return f"""SELECT parse_filename(filename, true) AS file, coalesce(policy, '') AS policy,
            max(policy_version) AS version
        FROM {scan(files, ROLLOUTS)} WHERE policy_version IS NOT NULL GROUP BY ALL"""


def later_rewards_view(rewards: Sequence[str]) -> str:
    """Return the view of the reward that counts per response_id: the last by time, then by file and row.

    The struct keeps a null: a later null takes an earlier reward back.
    """
    return f"""CREATE VIEW _later_rewards AS SELECT response_id,
            arg_max({{'reward': reward, 'source': source, 'rewarded_at': rewarded_at}},
                    (rewarded_at, filename, file_row_number)) AS latest
        FROM {scan(rewards, REWARDS)} GROUP BY response_id"""


GROUPS_VIEW = """CREATE VIEW groups AS SELECT group_id,
    count(*) AS n,
    count(reward) AS n_rewarded,
    avg(reward) AS reward_mean,
    stddev_pop(reward) AS reward_std,
    min(reward) AS reward_min,
    max(reward) AS reward_max,
    max(reward) - min(reward) <= 1e-9 * greatest(1, abs(max(reward))) AS zero_variance,
    arg_min(prompt, response_id) AS prompt,
    min(prompt_hash) AS prompt_hash,
    CAST(list_unique(list(policy)) AS BIGINT) AS n_policies,
    min(policy_version) AS min_policy_version,
    max(policy_version) AS max_policy_version,
    min(split) AS split
FROM rollouts GROUP BY group_id"""
"""`zero_variance` is null without a reward; `split` is 'holdout' as soon as one row is. The policies are
counted in a list: unlike count(DISTINCT), DuckDB drops that where it is not asked for."""


def rejects_view(files: Sequence[str]) -> str:
    """Return the view `rejects`."""
    names = ", ".join(REJECTS.names)
    source = scan(files, REJECTS)
    return f"CREATE VIEW rejects AS SELECT {names}, parse_filename(filename, true) AS file FROM {source}"


def erased_view(files: Sequence[str]) -> str:
    """Return the view `_erased` of the hashes of deleted response ids."""
    return f"CREATE VIEW _erased AS SELECT id_hash FROM {scan(files, ERASED)}"


CARD_COLUMNS = ("policy", "model", "revision", "tokenizer", "sampling")


def policies_views(cards: Sequence[Sequence[str | None]]) -> list[str]:
    """Return the statements that create `_cards`, given as rows of CARD_COLUMNS, and `policies`: what the
    rows say joined with the cards.
    """
    nothing = "(" + ", ".join(["CAST(NULL AS VARCHAR)"] * len(CARD_COLUMNS)) + ")"
    rows = [
        "(" + ", ".join("NULL" if value is None else literal(value) for value in card) + ")" for card in cards
    ]
    listed = ", ".join([nothing, *rows])
    named = f"v({', '.join(CARD_COLUMNS)})"
    policies = """CREATE VIEW policies AS
        SELECT coalesce(s.policy, c.policy) AS policy, coalesce(s.n, 0) AS n,
            s.* EXCLUDE (policy, n), c.* EXCLUDE (policy)
        FROM (SELECT policy, count(*) AS n, min(policy_version) AS min_policy_version,
                max(policy_version) AS max_policy_version, min(sampled_at) AS first_sampled_at,
                max(sampled_at) AS last_sampled_at FROM _rollouts GROUP BY policy) s
        FULL JOIN _cards c ON c.policy = s.policy"""
    return [
        f"CREATE VIEW _cards AS SELECT * FROM (VALUES {listed}) {named} WHERE policy IS NOT NULL",
        policies,
    ]
