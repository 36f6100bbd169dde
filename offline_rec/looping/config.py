"""What `rec loop` takes: one frozen model, checked on creation, importable without torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from data_tools.errors import ConfigError
from offline_rec.config import (
    FitConfig,
    Parameters,
    PathText,
    Sql,
    check_keys,
    override,
    read_yaml,
    readable,
)

OWN = frozenset(
    {
        *("dataset", "model", "out", "seed", "split"),
        *("steps", "epochs", "continue_from", "schedule_steps", "no_signal", "newest", "on_new_data"),
    }
)
"""Fields of a fit that the loop itself sets."""


class LoopConfig(BaseModel):
    """Everything that decides a loop; written resolved to `config.yaml` of its directory.

    Batch b, trained on by update b, is sampled by the weights after interval * max(0, floor((b - 1 - lag) /
    interval)) updates, the interval being `steps_per_round`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: PathText = Field(description="Hugging Face model directory to start from.")
    dataset: PathText = Field(description="Dataset that gets the samples; made if there is none.")
    out: PathText = Field(description="Directory of the loop to write.")
    prompts: PathText | None = Field(
        None, description="File of prompts, or a dataset whose training prompts are taken; null = `dataset`."
    )
    where: Sql | None = Field(None, description="Condition on the rows of `prompts`, where it is a dataset.")
    columns: dict[str, Sql] | None = Field(
        None, description="What rewards need of a dataset's prompts: name to SQL; null = answers, if there."
    )
    policy: str = Field("policy", min_length=1, description="Name of the policy in the dataset.")

    reward: str | None = Field(None, description="Reward by name, or MODULE:FUNCTION.")
    reward_options: Parameters = Field({}, description="Options of the reward.")

    rounds: int = Field(1, ge=1, description="Rounds of sampling and fitting.")
    steps_per_round: int = Field(
        1, ge=1, description="Updates between two versions of the sampling policy (sync_interval)."
    )
    lag: int = Field(
        0, ge=0, description="Batches that sampling is ahead of training from the start (sync_offset)."
    )
    replay: int = Field(0, ge=0, description="Older versions whose rows are trained on again in each round.")
    replay_weight: Sql = Field(
        "staleness_halflife(2)", description="Weight of a row under replay, on top of the fit's own."
    )
    offline: bool = Field(False, description="Sample nothing: fit on the rows that the dataset has.")

    n: int = Field(8, ge=1, description="Responses to a prompt.")
    temperature: float = Field(1.0, ge=0, description="Temperature of sampling.")
    top_p: float = Field(1.0, gt=0, le=1, description="Share of the distribution that is sampled from.")
    top_k: int = Field(0, ge=0, description="Tokens that are sampled from; 0 = all.")
    max_tokens: int = Field(256, ge=1, description="Longest response, its end included.")
    sampler: dict[str, Any] = Field({}, description="Settings of the sampler, such as engine or urls.")
    keep_sampler: bool | None = Field(
        None, description="Keep the engine over all rounds; null = vLLM, unless it shares a GPU with the fit."
    )
    side_by_side: bool = Field(
        False, description="Sample in a process of its own, beside the fit on batches that are there (lag)."
    )
    sampler_devices: str | None = Field(
        None, description="CUDA_VISIBLE_DEVICES of that process; null = as of the fit."
    )

    fit: dict[str, Any] = Field({}, description="Fields of a fit, such as algorithm, lr or groups_per_step.")
    keep_rounds: int = Field(2, ge=1, description="Latest rounds whose checkpoints and models are kept.")
    seed: int = Field(0, ge=0, description="Seed of prompts, sampling and fitting.")

    @model_validator(mode="before")
    @classmethod
    def _name_nearest_key(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            check_keys(values, cls.model_fields, "configuration key")
        return values

    @field_validator("fit")
    @classmethod
    def _is_of_a_fit(cls, fit: dict[str, Any]) -> dict[str, Any]:
        check_keys(fit, FitConfig.model_fields, "configuration key of the fit")
        own = sorted(OWN & fit.keys())
        if own:
            raise ConfigError(f"fit.{own[0]} is set by the loop", "leave it out")
        return _fit_config({"dataset": "", "model": "", "out": ""} | fit).model_dump(include=set(fit))

    @model_validator(mode="after")
    def _needs_what_it_samples(self) -> Self:
        if self.offline and (self.lag or self.replay):
            raise ConfigError(
                "offline samples nothing, so that lag and replay mean nothing", "leave them out"
            )
        if self.side_by_side and not self.lag:
            why = "samples nothing" if self.offline else "trains on a batch as soon as it is there"
            raise ConfigError(
                f"side_by_side has nothing to do: the loop {why}",
                "leave it out, or set a lag, best of at least steps_per_round",
            )
        if self.sampler_devices is not None and not self.side_by_side:
            raise ConfigError(
                "sampler_devices are those of side_by_side", "set it to true, or leave them out"
            )
        if not self.offline and self.reward is None:
            raise ConfigError("reward is missing", "name one, such as exact or MODULE:FUNCTION")
        return self

    @property
    def steps(self) -> int:
        """Updates of the whole loop."""
        return self.rounds * self.steps_per_round

    @property
    def groups_per_step(self) -> int:
        """Prompts of a batch."""
        default: int = FitConfig.model_fields["groups_per_step"].default
        return int(self.fit.get("groups_per_step", default))

    def fit_config(self, out: str | Path, **changes: Any) -> FitConfig:
        """The configuration of one fit, with what the loop says on top of the user's own."""
        basis: dict[str, Any] = {
            "dataset": self.dataset,
            "model": self.model,
            "seed": self.seed,
            "eval_every": None,
        }
        basis["trackers"] = ()  # the records of all rounds together are those of the loop
        return _fit_config(basis | self.fit | {"out": out} | changes)


def _fit_config(values: dict[str, Any]) -> FitConfig:
    try:
        return FitConfig(**values)
    except ValidationError as error:
        raise readable(error, FitConfig.model_fields) from error


def loop_config(file: str | Path, *, overrides: Sequence[str] = ()) -> LoopConfig:
    """The configuration of a YAML file with `KEY=VALUE` texts on top; `fit.lr=1e-5` reaches into the fit.

    `ConfigError` names the file, the key and what is wrong with it.
    """
    values = read_yaml(file)
    check_keys(values, LoopConfig.model_fields, "configuration key")
    for text in overrides:
        inner = text.strip().removeprefix("fit.")
        if inner == text.strip():
            override(values, text, LoopConfig.model_fields)
        else:
            values["fit"] = dict(values.get("fit") or {})
            override(values["fit"], inner, FitConfig.model_fields)
    try:
        return LoopConfig(**values)
    except ValidationError as error:
        raise readable(error, LoopConfig.model_fields) from error
