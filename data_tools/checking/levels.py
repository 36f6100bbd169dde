"""Rules that are one SQL condition each, over rows, groups or prompts: a level is one statement for them all.

Each is an aggregate over scalar columns, so memory does not grow with the data (groups spill to disk).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from data_tools.checking.findings import EXAMPLES, Findings, Rule

if TYPE_CHECKING:
    import duckdb

Level = Literal["rows", "groups", "prompts"]

_GROUPS = """SELECT group_id, count(*) AS n, min(response_id) AS id, min(prompt_hash) AS prompt_hash,
        min(prompt_hash) <> max(prompt_hash) AS mixed, bool_or(trajectory_id IS NOT NULL) AS turns,
        count(reward) AS n_rewarded, coalesce(max(reward) - min(reward), 0) AS spread,
        max(abs(reward)) AS most
    FROM checked GROUP BY group_id"""

_LEVELS: dict[Level, str] = {
    "rows": """WITH usual AS (SELECT approx_quantile(abs(reward), 0.9) AS usual_reward FROM checked)
        SELECT *, response_id AS id FROM checked, usual""",
    "groups": f"""WITH found AS MATERIALIZED ({_GROUPS}), usual AS (SELECT mode(n) AS usual_n FROM found)
        SELECT * FROM found, usual""",
    "prompts": f"""SELECT prompt_hash, count(*) AS n_groups, min(n) AS smallest, min(id) AS id
        FROM ({_GROUPS}) WHERE NOT mixed AND NOT turns GROUP BY prompt_hash""",
}


@dataclass(frozen=True, slots=True)
class Condition:
    """A rule, and the condition under which a row, group or prompt breaks it; `least`: share to be named."""

    rule: Rule
    level: Level
    sql: str
    least: float = 0.0


def find_conditions(
    con: "duckdb.DuckDBPyConnection", conditions: Sequence[Condition], findings: Findings
) -> None:
    """Note what the conditions find in the view `checked`."""
    for level, source in _LEVELS.items():
        of_level = [condition for condition in conditions if condition.level == level]
        wanted = ", ".join(
            f"count(*) FILTER ({c.sql}), min(id, {EXAMPLES}) FILTER ({c.sql})" for c in of_level
        )
        [(total, *found)] = con.sql(f"SELECT count(*), {wanted} FROM ({source})").fetchall()
        for condition, count, rows in zip(of_level, found[::2], found[1::2], strict=True):
            if count >= condition.least * total:
                findings.add(condition.rule, count, rows, of=total)
