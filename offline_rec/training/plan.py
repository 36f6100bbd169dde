"""What a configuration means: its algorithm, shaping and objective, and whether the data has what they need.

Everything here is asked of scalar columns in SQL, before a model is loaded. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import data_tools
from data_tools.errors import ConfigError, DataError
from data_tools.shaping import Shaping, compile
from data_tools.shaping.expressions import closed, parse_expression
from data_tools.store.sql_errors import sql_errors
from offline_rec.algorithms import Algorithm, algorithm
from offline_rec.config import FitConfig
from offline_rec.objectives.composition import Composition

if TYPE_CHECKING:
    import duckdb

    from data_tools.dataset import Dataset

SHAPING_FIELDS = ("where", "group_by", "baseline", "shift", "scale", "drop", "weight", "keep", "priority")
"""Fields of the configuration that replace the algorithm's own."""

NAMED_ANCHORS = ("behavior", "start", "none")


def dataset_of(config: FitConfig) -> "Dataset":
    """The dataset of a fit, with staleness as its configuration counts it."""
    ds = data_tools.open(config.dataset)
    if config.newest:
        ds.newest.update(config.newest)
    return ds


@dataclass(frozen=True)
class Plan:
    """An algorithm with the overrides of a configuration applied.

    `needs_logprobs`: whether ratios to the anchor are needed. `judging` selects the rows that held-out
    measurements are taken on: the same population, nothing dropped or weighted.
    """

    algorithm: Algorithm
    composition: Composition
    shaping: Shaping
    judging: Shaping
    needs_logprobs: bool
    needs_reference: bool

    @classmethod
    def of(cls, config: FitConfig) -> "Plan":
        """The plan of a configuration; `ConfigError` names an unknown algorithm, field or parameter."""
        row = algorithm(config.algorithm)
        composition = row.composition.changed(**objective_parameters(config))
        shaping = Shaping.parse(shaping_fields(config, row.shaping))
        population = shaping.model_dump(include={"where", "group_by", "expert", "unrewarded"})
        needs = composition.needs
        if "expert" in needs and shaping.expert.strip() == "false":
            raise ConfigError(
                f"{row.name} treats the rows that an expert wrote apart, and no row is said to be one",
                "say which: --set \"shaping.expert=policy = 'teacher'\"",
            )
        _check_anchor(config, needs_logprobs="behavior_logprobs" in needs)
        return cls(
            algorithm=row,
            composition=composition,
            shaping=shaping,
            judging=Shaping.parse(population | {"advantage": "0"}),
            needs_logprobs="behavior_logprobs" in needs,
            needs_reference="reference" in needs,
        )

    @property
    def row_filter(self) -> str | None:
        """`where` as a plain condition on rows, None (all of them) where it is more than that."""
        where = self.shaping.where
        if where is None:
            return None
        parsed = parse_expression("where", where)
        return None if parsed.windowed or parsed.text != where else closed(where)

    def statement(self, config: FitConfig) -> str:
        """The one statement that yields the rows to train on."""
        return compile(self.shaping, split=config.split)


def objective_parameters(config: FitConfig) -> dict[str, Any]:
    """The overrides of the objective, with the KL term of the configuration's own fields."""
    kl = {"kl_coef": config.kl_coef, "kl_kind": config.kl_kind} if config.kl_coef else {}
    return {**config.objective, **kl}


def shaping_fields(config: FitConfig, preset: Mapping[str, Any]) -> dict[str, Any]:
    """The algorithm's shaping with what the configuration says instead."""
    own = {name: value for name in SHAPING_FIELDS if (value := getattr(config, name)) is not None}
    return {"seed": config.seed, **preset, **config.shaping, **own}


def check_logprobs(con: "duckdb.DuckDBPyConnection", plan: Plan, config: FitConfig) -> None:
    """Stop before training where ratios to logged log-probs are needed and rows lack them.

    `DataError` names how many of how many rows of the population, in all splits, and the three ways out.
    """
    if not plan.needs_logprobs or config.anchor != "behavior":
        return
    absent = "true" if config.retokenise else "behavior_logprob IS NULL"
    if not _count(con, "FROM rollouts", absent)[0]:
        return
    lacking = f"{absent} AND NOT expert"
    if not _count(con, f"FROM ({plan.statement(config)})", lacking)[0]:
        return
    population = compile(plan.judging, split="all")
    missing, rows = _count(con, f"FROM ({population})", lacking)
    same = f"FROM rollouts SEMI JOIN ({population}) USING (response_id)"
    raw, _ = _count(con, same, "list_contains(flags, 'raw_at_temperature')")
    why = f" that can be used ({raw} have them from before a temperature other than 1)" if raw else ""
    why = " of ids made from text" if config.retokenise else why
    raise DataError(
        f"{plan.algorithm.name} takes ratios to the policy that sampled a response, and {missing} of {rows} "
        f"rows have no log-probs{why}",
        f"score them: `rec score {config.dataset} --model SAMPLER`, then --anchor SAMPLER; take ratios to "
        'the start: --anchor start; or leave them out: --where "behavior_logprob is not null"',
    )


def _count(con: "duckdb.DuckDBPyConnection", source: str, condition: str) -> tuple[int, int]:
    with sql_errors("shaping"):
        found = con.execute(f"SELECT count(*) FILTER ({condition}), count(*) {source}").fetchall()[0]
    return int(found[0]), int(found[1])


def check_guards(con: "duckdb.DuckDBPyConnection", config: FitConfig) -> None:
    """Refuse a drift guard that could never measure anything."""
    guards = [name for name in ("max_kl", "min_ess") if getattr(config, name) is not None]
    if not guards or config.anchor not in ("behavior", "none"):
        return
    usable = f"behavior_logprob IS NOT NULL AND {'false' if config.retokenise else 'true'}"
    if config.anchor == "none" or not _count(con, "FROM rollouts", usable)[0]:
        raise ConfigError(
            f"{guards[0]} needs log-probs to measure the drift from, and there are none",
            "measure it from the starting model with --anchor start, or leave the guard out",
        )


REMARKS = {
    "logprob_kind = 'unknown'": "{rows} rows have log-probs of unknown kind, read as raw "
    "(policies: {policies}): `rec check` tells what they are",
    "top_p < 1 OR top_k > 0": "{rows} rows were sampled with top-p or top-k (policies: {policies}): their "
    "ratios are taken without truncation",
}
"""Which rows are worth a remark, and the remark."""


def remarks(con: "duckdb.DuckDBPyConnection", plan: Plan, config: FitConfig) -> list[str]:
    """What is worth knowing about the rows whose logged log-probs are used, with counts and policies."""
    if not plan.needs_logprobs or config.anchor != "behavior":
        return []
    return remarks_on(con, f"rollouts SEMI JOIN ({plan.statement(config)}) USING (response_id)")


def remarks_on(con: "duckdb.DuckDBPyConnection", rows: str) -> list[str]:
    """The same about the rows of a FROM item."""
    any_of = " OR ".join(f"({condition})" for condition in REMARKS)
    counted = ", ".join(
        f"count(*) FILTER ({condition}), array_to_string(list_sort("
        f"list(DISTINCT coalesce(policy, 'unnamed')) FILTER ({condition})), ', ')"
        for condition in REMARKS
    )
    with sql_errors("shaping"):
        # The rows are not chosen again unless there is something to remark on.
        if not con.execute(f"SELECT count(*) FROM rollouts WHERE {any_of}").fetchall()[0][0]:
            return []
        found = con.execute(f"SELECT {counted} FROM {rows} WHERE behavior_logprob IS NOT NULL").fetchall()[0]
    pairs = zip(REMARKS.values(), found[::2], found[1::2], strict=True)
    return [text.format(rows=count, policies=policies) for text, count, policies in pairs if count]


def _check_anchor(config: FitConfig, *, needs_logprobs: bool) -> None:
    anchor = config.anchor
    if anchor == "none" and needs_logprobs:
        raise ConfigError(
            f"{config.algorithm} needs ratios, and anchor is none", "use --anchor behavior or --anchor start"
        )
    if anchor not in NAMED_ANCHORS and not Path(anchor).is_dir():
        raise ConfigError(
            f"anchor {anchor!r} is neither behavior, start nor none, nor a model directory",
            "logged log-probs: behavior; those of the starting model: start",
        )
