"""Compiles a shaping to one SQL statement: a chain of stages from the population to weighted rows.

    population, judged, balanced, statistics, measured, scored, units, turns, weighted, final

`judged` holds one row a trajectory, the one whose reward counts, so that every statistic counts a trajectory
once; `turns` hands its advantage to the other turns. Only scalar columns pass through, and wide ones (prompt,
response, extra) only where an expression needs them together with a statistic.
"""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from data_tools.shaping.columns import ADVANTAGE, COLUMNS, FIELDS, POPULATION, ROW_COLUMNS
from data_tools.shaping.expressions import Expression, bracketed, closed, parse_expression
from data_tools.shaping.fields import Shaping, Split
from data_tools.shaping.presets import EQUAL, GROUP_STATISTICS, GROUP_WINDOW, POSITIVE, preset

_NEXT = ",\n    "
NULL_KEY = "group_by is null for the response "
"""How the statement's own error about a row without a group key begins."""

_CARRIED = (*(name for name in COLUMNS if name in ROW_COLUMNS), "trajectory_id", "turn")
_ABSENT = {"where": "true", "priority": "1"}


@dataclass(frozen=True)
class Stage:
    """One common table expression of the statement."""

    name: str
    purpose: str
    sql: str
    materialized: bool = False


def compile(shaping: Shaping, *, split: Split = "train") -> str:
    """Return the statement that shapes the rows of a split: the columns COLUMNS, a row per kept response.

    It reads the view `rollouts` and needs the macros of `prepare`. Rows come sorted by group and response id.
    Raises ConfigError for what is not one expression; names of columns are checked where the statement runs.
    """
    last = f"SELECT {_listed(COLUMNS)}\nFROM final\nWHERE kept\nORDER BY group_key, response_id"
    return with_stages(stages(shaping, split), last)


def keeps_groups_whole(shaping: Shaping, *, turns: bool) -> bool:
    """Return whether `final` keeps, of every group, all rows that its statistics are taken over, or none."""
    of_groups = shaping.drop.strip() in ("none", "balance", "zero-variance")
    return of_groups and shaping.keep.strip() == "true" and shaping.unrewarded == "drop" and not turns


def with_stages(chain: list[Stage], select: str) -> str:
    """Return a statement of the stages and a last SELECT over them."""
    tables = [
        f"-- {stage.purpose}\n{stage.name} AS{' MATERIALIZED' * stage.materialized} (\n{stage.sql}\n)"
        for stage in chain
    ]
    return "WITH\n" + ",\n".join(tables) + "\n" + select


def stages(
    shaping: Shaping, split: Split, *, turns: bool = True, also: Mapping[str, str] | None = None
) -> list[Stage]:
    """Return the stages of the statement; `final` holds every row that got a weight, and `kept` for each.

    Where no row is a turn of a trajectory, the same comes of less: without `turns` each row is read by one
    stage alone, so that none of them has to be kept for another. `also` names further statistics of each
    group, over the window `grp`.
    """
    fields = {name: _expression(shaping, name) for name in FIELDS}
    placed = {name: bracketed(expression) for name, expression in fields.items()}
    late = [expression for name, expression in fields.items() if FIELDS[name]]
    used = {column for expression in late for column in expression.columns & ROW_COLUMNS}
    hoisted = {name: sql for expression in late for name, sql in expression.hoisted.items()}
    once = not turns and shaping.unrewarded == "drop"
    return [
        _population(split, fields, [*_CARRIED, *sorted(used - set(_CARRIED))], hoisted, once=once),
        _judged() if turns else Stage("judged", "rows with a reward", f"  {REWARDED}"),
        *_statistics(shaping, placed, {**GROUP_STATISTICS, **(also or {})}),
        *_scored(shaping, placed),
        *_units(shaping, placed, turns=turns),
        *_final(placed, turns=turns),
    ]


def _expression(shaping: Shaping, name: str) -> Expression:
    ready = preset(shaping, name)
    if ready is not None:
        return Expression(ready)
    text = getattr(shaping, name)
    # Not `several=False`: what is parsed is kept by how it was asked for.
    several = {"several": True} if name == "group_by" else {}
    return parse_expression(name, _ABSENT[name] if text is None else text, **several)


def _population(
    split: Split, fields: dict[str, Expression], columns: list[str], hoisted: dict[str, str], *, once: bool
) -> Stage:
    where = fields["where"]
    condition = [] if where.text == "true" else [bracketed(where)]
    in_split = [] if split == "all" else [f"split = '{split}'"]
    clauses = (
        [("WHERE", in_split), ("QUALIFY", condition)] if where.windowed else [("WHERE", in_split + condition)]
    )
    filters = "".join(f"\n  {word} {' AND '.join(parts)}" for word, parts in clauses if parts)
    computed = [
        *(f"{sql} AS {name}" for name, sql in hoisted.items()),
        f"{_condition(bracketed(fields['expert']))} AS expert",
        _group_key(fields["group_by"]),
    ]
    sql = f"  SELECT {_listed(columns)},\n    {_NEXT.join(computed)}\n  FROM rollouts{filters}"
    return Stage("population", "the rows to choose from", sql, materialized=not once)


def _group_key(group: Expression) -> str:
    if group.several:
        return f"CAST(json_array({closed(group.text)}) AS VARCHAR) AS group_key"
    key = f"CAST({bracketed(group)} AS VARCHAR)"
    if group.text.strip() == "group_id":
        return f"{key} AS group_key"
    # Rows without a key are not one another's group.
    return f"coalesce({key}, error('{NULL_KEY}' || response_id)) AS group_key"


def _judged() -> Stage:
    return Stage(
        "judged",
        "one reward a trajectory: that of its last turn that has one",
        """  SELECT * FROM population
  WHERE reward IS NOT NULL AND trajectory_id IS NULL
  UNION ALL
  SELECT * FROM population
  WHERE reward IS NOT NULL AND trajectory_id IS NOT NULL
  QUALIFY row_number() OVER (
    PARTITION BY group_key, trajectory_id ORDER BY turn DESC NULLS LAST, response_id DESC
  ) = 1""",
    )


def _statistics(shaping: Shaping, placed: dict[str, str], wanted: Mapping[str, str]) -> list[Stage]:
    source, balanced = "judged", []
    if shaping.drop.strip() == "balance":
        source = "balanced\n  WHERE NOT dropped"
        sql = f"""  SELECT *, {placed["drop"]} AS dropped
  FROM (
    SELECT *, {POSITIVE} AS positive
    FROM judged {GROUP_WINDOW}
  )
  {GROUP_WINDOW}"""
        balanced = [Stage("balanced", "drop = balance: no more negatives than positives in a group", sql)]
    listed = _NEXT.join(f"{sql} AS {name}" for name, sql in wanted.items())
    sql = f"  SELECT *,\n    {listed}\n  FROM {source}\n  {GROUP_WINDOW}"
    return [*balanced, Stage("statistics", "of each group", sql)]


def _scored(shaping: Shaping, placed: dict[str, str]) -> list[Stage]:
    measured = f"""  SELECT *,
    CAST({placed["baseline"]} AS DOUBLE) AS baseline,
    CAST({placed["scale"]} AS DOUBLE) AS divisor
  FROM statistics
  {GROUP_WINDOW}"""
    shift = f" - {shaping.shift!r}" if shaping.shift else ""
    scored = f"""  SELECT * EXCLUDE (divisor),
    (
      CASE WHEN abs(reward - baseline) <= {EQUAL}
      THEN 0 ELSE reward - baseline END{shift}
    ) / divisor AS advantage
  FROM measured"""
    return [
        Stage("measured", "baseline and scale", measured),
        Stage("scored", "advantage; what is smaller than rounding is 0", scored),
    ]


def _units(shaping: Shaping, placed: dict[str, str], *, turns: bool) -> list[Stage]:
    chain, source = [], "scored"
    if shaping.drop.strip() not in ("none", "balance"):
        sql = f"  SELECT *, {_condition(placed['drop'])} AS dropped FROM scored"
        chain, source = [Stage("marked", "drop", sql)], "marked WHERE NOT dropped"
    sql = f"  SELECT * FROM {source}"
    if shaping.unrewarded == "keep":
        sql += f"\n  UNION ALL BY NAME\n  {UNREWARDED if turns else ALONE_UNREWARDED}"
    if placed["advantage"] != "advantage":
        advantage = f"CAST({placed['advantage']} AS DOUBLE) AS advantage"
        sql = f"  SELECT * REPLACE ({advantage})\n  FROM (\n{sql}\n  )"
    return [*chain, Stage("units", "what a reward was given to, with its advantage", sql, materialized=turns)]


REWARDED = "SELECT * FROM population\n  WHERE reward IS NOT NULL"
ALONE_UNREWARDED = "SELECT * FROM population\n  WHERE reward IS NULL"


UNREWARDED = """SELECT * FROM population p
  WHERE reward IS NULL AND NOT EXISTS (
    FROM judged j WHERE j.group_key = p.group_key AND j.trajectory_id = p.trajectory_id
  )"""
"""The rows of the population that nobody has judged."""


def _final(placed: dict[str, str], *, turns: bool) -> list[Stage]:
    replaced = _listed(f"units.{name}" for name in ("reward", *ADVANTAGE[len(POPULATION) :]))
    handed = f"""  SELECT * FROM units WHERE trajectory_id IS NULL OR reward IS NULL
  UNION ALL BY NAME
  SELECT population.* EXCLUDE (reward),
    {replaced}
  FROM population JOIN units USING (group_key, trajectory_id)
  WHERE units.reward IS NOT NULL"""
    weighted = f"  SELECT *, CAST({placed['weight']} AS DOUBLE) AS weight FROM turns"
    final = f"""  SELECT *,
    {_condition(placed["keep"])} AS kept,
    CAST({placed["priority"]} AS DOUBLE) AS priority
  FROM weighted"""
    return [
        Stage(
            "turns",
            "every turn has the reward and the advantage of its trajectory",
            handed if turns else "  SELECT * FROM units",
        ),
        Stage("weighted", "weight", weighted),
        Stage("final", "keep and priority", final),
    ]


def _condition(sql: str) -> str:
    return sql if sql in ("true", "false") else f"coalesce(CAST({sql} AS BOOLEAN), false)"


def _listed(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(names), 100, subsequent_indent="    ", break_long_words=False)
