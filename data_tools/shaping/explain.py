"""What a shaping does to the data, in numbers: how many rows every step takes, and who has the weight."""

import math
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from data_tools.shaping.blame import sql_errors_named
from data_tools.shaping.checks import VALID, check_trajectories, invalid, invalid_rows, nothing_left
from data_tools.shaping.fields import Shaping, Split
from data_tools.shaping.presets import EQUAL
from data_tools.shaping.run import Connectable, connected
from data_tools.shaping.statement import UNREWARDED, compile, stages, with_stages

if TYPE_CHECKING:
    import duckdb


class PolicyMass(BaseModel):
    """The part of the weight that one version of one policy has; `share` is null where all weights are 0."""

    model_config = ConfigDict(frozen=True)

    policy: str | None
    policy_version: int | None
    rows: int
    weight: float
    share: float | None


class Explanation(BaseModel):
    """The statement of a shaping, the rows that each step takes, and the weight by policy and version.

    Rows are responses: `population` = `without_reward` (unless kept) + `dropped` + `not_kept` + `kept`.
    """

    model_config = ConfigDict(frozen=True)

    statement: str
    split: Split
    shaping: Shaping
    population: int
    without_reward: int
    rewards: int
    """What the statistics are taken over, one a trajectory."""
    groups: int
    single_groups: int
    """Groups of one reward."""
    zero_variance_groups: int
    """Groups of several rewards, all equal."""
    dropped: int
    not_kept: int
    kept: int
    zero_advantage: int
    """Kept rows of advantage 0: without a regulariser they have no gradient."""
    zero_weight: int
    effective_rows: float | None
    """Kish's effective number of rows, (sum of weights)^2 / sum of squared weights."""
    mass: list[PolicyMass]

    def text(self) -> str:
        """Return the statement and the numbers as lines to read."""
        return "\n".join([self.statement, "", *_count_lines(self), "", *_mass_lines(self.mass)])


def explain(
    source: "Connectable | duckdb.DuckDBPyConnection", shaping: Shaping, *, split: Split = "train"
) -> Explanation:
    """Run the shaping and count.

    Raises ConfigError for a wrong expression, DataError where no row is left or a number cannot be used.
    """
    with connected(source) as con, sql_errors_named(con, shaping, split):
        check_trajectories(con, shaping, split)
        chain = stages(shaping, split)
        mass = _dicts(con, with_stages(chain, _MASS))
        if sum(row["wrong"] for row in mass):
            raise invalid_rows(con, shaping, split)
        if not sum(row["rows"] for row in mass):
            raise nothing_left(con, shaping, split)
        [counts] = _dicts(con, with_stages(chain[:2], _COUNTS))
    left_out = counts["without_reward"] if shaping.unrewarded == "drop" else 0
    weighted, kept = (sum(row[name] for row in mass) for name in ("weighted", "rows"))
    return Explanation(
        statement=compile(shaping, split=split),
        split=split,
        shaping=shaping,
        **counts,
        dropped=counts["population"] - left_out - weighted,
        not_kept=weighted - kept,
        kept=kept,
        zero_advantage=sum(row["zero_advantage"] for row in mass),
        zero_weight=sum(row["zero_weight"] for row in mass),
        effective_rows=_effective_rows(mass),
        mass=_shares(mass),
    )


_COUNTS = f"""SELECT (SELECT count(*) FROM population) AS population,
  (SELECT count(*) FROM ({UNREWARDED})) AS without_reward,
  coalesce(CAST(sum(n) AS BIGINT), 0) AS rewards,
  count(*) AS groups,
  count_if(n = 1) AS single_groups,
  count_if(n > 1 AND equal) AS zero_variance_groups
FROM (
  SELECT count(*) AS n, max(reward) AS group_max, group_max - min(reward) <= {EQUAL} AS equal
  FROM judged GROUP BY group_key
)"""


_MASS = f"""SELECT policy, policy_version,
  count(*) AS weighted,
  count_if(kept) AS rows,
  count_if(kept AND ({" OR ".join(map(invalid, VALID))})) AS wrong,
  count_if(kept AND advantage = 0) AS zero_advantage,
  count_if(kept AND weight = 0) AS zero_weight,
  coalesce(sum(weight ORDER BY weight) FILTER (kept), 0) AS weight,
  coalesce(sum(weight * weight ORDER BY weight) FILTER (kept), 0) AS squares
FROM final GROUP BY policy, policy_version ORDER BY policy, policy_version"""


def _dicts(con: "duckdb.DuckDBPyConnection", query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = con.sql(query).to_arrow_table().to_pylist()
    return found


def _effective_rows(mass: list[dict[str, Any]]) -> float | None:
    weight, squares = (math.fsum(row[name] for row in mass) for name in ("weight", "squares"))
    return weight**2 / squares if squares and math.isfinite(squares) else None


def _shares(mass: list[dict[str, Any]]) -> list[PolicyMass]:
    total = math.fsum(row["weight"] for row in mass)
    names = ("policy", "policy_version", "rows", "weight")
    return [
        PolicyMass(**{name: row[name] for name in names}, share=row["weight"] / total if total else None)
        for row in mass
        if row["rows"]
    ]


def _count_lines(found: Explanation) -> list[str]:
    shaping = found.shaping
    where = "" if shaping.where is None else f" where {shaping.where}"
    fate = "left out" if shaping.unrewarded == "drop" else "kept"
    lines = [
        (found.population, f"rows of split {found.split}{where}"),
        (found.without_reward, f"without a reward, {fate}"),
        (found.groups, f"groups of {found.rewards:,} rewards by {shaping.group_by}"),
        (found.single_groups, "of one reward"),
        (found.zero_variance_groups, "of several equal rewards"),
        (found.dropped, f"rows dropped by drop = {shaping.drop}"),
        (found.not_kept, f"rows not kept by keep = {shaping.keep}"),
        (found.kept, "rows kept"),
        (found.zero_advantage, "with advantage 0"),
        (found.zero_weight, "with weight 0"),
    ]
    width = max(len(f"{count:,}") for count, _ in lines)
    if found.effective_rows is not None:
        lines.append((round(found.effective_rows), "effective rows by weight"))
    return [f"{count:>{width},}  {text}" for count, text in lines]


def _mass_lines(mass: list[PolicyMass]) -> list[str]:
    head = ("policy", "version", "rows", "weight", "share")
    cells = [
        (
            "unknown" if row.policy is None else row.policy,
            "unknown" if row.policy_version is None else str(row.policy_version),
            f"{row.rows:,}",
            f"{row.weight:,.6g}",
            "-" if row.share is None else f"{row.share:.1%}",
        )
        for row in mass
    ]
    widths = [max(len(row[i]) for row in (head, *cells)) for i in range(len(head))]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (head, *cells)
    ]
