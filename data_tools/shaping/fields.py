"""The fields of a shaping: which rows are learned from, against which baseline and with which weight."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from data_tools.errors import ConfigError

Split = Literal["train", "holdout", "all"]


def _text(value: Any) -> Any:
    """YAML and Python callers write `1` or `true` where SQL text is meant."""
    return str(value).lower() if isinstance(value, bool | int | float) else value


Sql = Annotated[str, BeforeValidator(_text), Field(min_length=1)]
"""The name of a preset or a DuckDB expression."""


class Shaping(BaseModel):
    """How rows become advantages and weights; each field is a preset name or a DuckDB expression.

    The fields apply in the order in which they stand here. A condition (`where`, `drop`, `keep`, `expert`)
    acts on the rows for which it is true; null counts as false. From `baseline` on, `reward` is the reward of
    the trajectory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    where: Sql | None = Field(None, description="Condition that selects the population; null = every row.")
    group_by: Sql = Field(
        "group_id", description="Group key: one expression, or several separated by commas."
    )
    expert: Sql = Field("false", description="Condition that marks rows as demonstrations of an expert.")
    unrewarded: Literal["drop", "keep"] = Field(
        "drop", description="Rows without a reward; kept ones need an `advantage` that does not use it."
    )
    baseline: Sql = Field("mean", description="mean, loo, global, shrunk, logavgexp, none, or an expression.")
    shift: float = Field(0.0, allow_inf_nan=False, description="Constant added to the baseline.")
    scale: Sql = Field("none", description="none, std, or an expression that divides the advantage.")
    drop: Sql = Field("none", description="none, balance, zero-variance, or a condition on the row to drop.")
    advantage: Sql = Field("advantage", description="Expression that replaces the advantage found so far.")
    weight: Sql = Field("1", description="Weight of a row, at least 0; may use the advantage.")
    keep: Sql = Field("true", description="Condition for a row to be trained on, applied last.")
    priority: Sql | None = Field(None, description="How often a row's group is visited, at least 0.")

    shrink_k: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="`shrunk`: responses that the global mean counts as."
    )
    tau: float = Field(1.0, gt=0, allow_inf_nan=False, description="`logavgexp`: temperature.")
    eps: float = Field(1e-6, ge=0, allow_inf_nan=False, description="`std`: added to the deviation.")
    seed: int = Field(0, description="`balance`: seed of the choice of what to drop.")

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """Return the shaping with these fields; ConfigError names the one that is wrong."""
        try:
            return cls(**fields)
        except ValidationError as error:
            first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] != "extra_forbidden":
            raise ConfigError(f"shaping: {name} = {first['input']!r}: {first['msg']}", _describe(cls, name))
        near = difflib.get_close_matches(name, cls.model_fields, 1)
        hint = f"did you mean {near[0]}?" if near else "the fields are: " + ", ".join(cls.model_fields)
        raise ConfigError(f"shaping has no field {name!r}", hint)


def _describe(model: type[BaseModel], name: str) -> str:
    field = model.model_fields.get(name)
    return (field.description or "") if field else ""
