"""What `rec fit` takes: one flat, frozen model, checked on creation, importable without torch."""

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from data_tools.errors import ConfigError

CONFIG_FILE = "config.yaml"
"""The file of a run directory that holds its configuration, resolved."""

MOST_TOKENS = 16_384
"""Tokens of a micro-batch where neither a configuration nor memory says less."""

Scalar = bool | int | float | str
"""The value of a parameter of an objective or of a shaping preset."""


def _sql(value: Any) -> Any:
    """YAML reads a bare `true` or `1` where SQL text is meant."""
    return str(value).lower() if isinstance(value, bool | int | float) else value


Sql = Annotated[str, BeforeValidator(_sql)]
"""The name of a shaping preset or a DuckDB expression."""


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


PathText = Annotated[str, BeforeValidator(_path)]
"""A path as text; anything that is a path is taken."""


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads `1e-3` as text; a parameter that looks like a number is one."""
    if not isinstance(value, Mapping):
        return value
    return {key: _number(item) for key, item in value.items()}


def _number(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


Parameters = Annotated[dict[str, Scalar], BeforeValidator(_numbers)]
"""Values by name, numbers where they look like numbers."""


class FitConfig(BaseModel):
    """Everything that decides a fit; written resolved to `config.yaml` of the run directory.

    A shaping field left at null takes the algorithm's own preset.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dataset: PathText = Field(description="Dataset to learn from.")
    model: PathText = Field(description="Hugging Face model directory to start from.")
    out: PathText = Field(description="Run directory to write.")
    algorithm: str = Field(
        "rec-oneside-nois", description="Preset of shaping and objective; `rec algorithms` lists them."
    )
    objective: Parameters = Field(
        {}, description="Parameters of the algorithm's objective to override, such as epsilon_low."
    )

    where: Sql | None = Field(None, description="Condition that selects the population of rows.")
    group_by: Sql | None = Field(None, description="Group key: expressions separated by commas.")
    baseline: Sql | None = Field(
        None, description="Baseline preset or expression; reward minus it is the advantage."
    )
    scale: Sql | None = Field(None, description="Scale preset or expression that divides the advantage.")
    drop: Sql | None = Field(None, description="Drop preset or expression, applied before the weight.")
    weight: Sql | None = Field(None, description="Weight of a row, an expression that may use `advantage`.")
    keep: Sql | None = Field(None, description="Condition for a row to be trained on, applied last.")
    priority: Sql | None = Field(
        None, description="How often a group is visited: its mean priority over that of all groups."
    )
    shift: float | None = Field(None, description="Constant added to the baseline.")
    shaping: Parameters = Field(
        {}, description="Other fields of the shaping, such as expert, tau or shrink_k."
    )
    split: Literal["train", "holdout", "all"] = Field("train", description="Part of the dataset to train on.")
    newest: dict[str, int] | None = Field(
        None, description="Version of a policy that staleness counts back from; null = its newest."
    )
    max_tokens: int | None = Field(
        None, ge=2, description="Longest row, prompt and response; longer rows are left out and counted."
    )
    retokenise: bool = Field(
        False, description="Make token ids from the text, and treat logged log-probs as absent."
    )

    anchor: PathText = Field(
        "behavior",
        description="What ratios are taken against: behavior (logged), start, none, or a model directory.",
    )
    reference: PathText | None = Field(
        None, description="Reference policy, a model directory; null = the start."
    )
    kl_coef: float = Field(0.0, ge=0, description="Coefficient of the KL term to the reference policy.")
    kl_kind: Literal["k2", "k3"] = Field("k3", description="Estimator of the KL term to the reference.")

    continue_from: PathText | None = Field(
        None,
        description="Checkpoint of another run, to begin with its weights, optimizer and number of updates.",
    )
    no_signal: Literal["refuse", "train"] = Field(
        "refuse", description="Where no row has an advantage: refuse, or update all the same."
    )

    steps: int | None = Field(None, ge=1, description="Number of updates; excludes epochs.")
    epochs: float | None = Field(None, gt=0, description="Passes over the groups; 1 when steps is null too.")
    groups_per_step: int = Field(32, ge=1, description="Groups of responses in one update.")
    tokens_per_micro_batch: int | None = Field(
        None,
        ge=1,
        description="Tokens of a micro-batch, a shared prompt once: memory and speed, not the result; "
        "null = 16384, on a CPU fewer where their activations would take more than all the rest.",
    )
    lr: float = Field(1e-6, ge=0, description="Peak learning rate of AdamW.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="Decay rates of AdamW's two moments."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Updates over which the learning rate rises linearly.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after the warm-up: constant, or falling to 0 at the end."
    )
    schedule_steps: int | None = Field(
        None, ge=1, description="Updates over which it falls; null = those of the run."
    )
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="Norm to which the gradient is clipped; null = any."
    )
    seed: int = Field(0, ge=0, description="Seed of the order of groups and of every random choice.")
    shuffle_blocks: int = Field(
        8, ge=1, description="Row groups whose groups are shuffled together; bounds what is read."
    )

    lora_rank: int | None = Field(
        None, ge=1, description="Rank of the low-rank adapters that are fitted; null = fit all weights."
    )
    lora_alpha: float = Field(32.0, gt=0, description="Scale of the adapters: alpha / rank multiplies them.")
    lora_targets: tuple[str, ...] | None = Field(
        None, min_length=1, description="Names of the layers with an adapter; null = all linear but the head."
    )
    quantise: Literal["4bit", "8bit"] | None = Field(
        None, description="Keep the frozen weights below the adapters in so many bits (bitsandbytes)."
    )

    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Type of the weights in a forward pass; auto = bfloat16 on a GPU."
    )
    device: str = Field("auto", description="Torch device; auto = a GPU where there is one.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations: less memory, slower.")
    kernels: tuple[Literal["flex", "triton"], ...] = Field(
        (), description="GPU kernels to use: flex (micro-batches as one packed row), triton (log-probs)."
    )
    engine: Literal["auto", "torch", "ddp", "deepspeed"] = Field(
        "auto",
        description="What computes gradients; auto = torch, ddp in many processes, deepspeed with ZeRO.",
    )
    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        None, description="What DeepSpeed's ranks share out, 0 to 3; null = 2 if the engine is deepspeed."
    )
    offload: bool = Field(False, description="Keep the optimizer of ZeRO 1, 2 or 3 in the memory of the CPU.")

    memory_check: bool = Field(
        True, description="Stop before training where the memory it takes, as estimated, is not free."
    )
    trackers: tuple[str, ...] | None = Field(
        None, description="Where metrics go besides metrics.jsonl; null = TensorBoard if it is installed."
    )

    save_every: int = Field(100, ge=1, description="Updates between checkpoints.")
    keep_checkpoints: int = Field(2, ge=1, description="Latest checkpoints to keep, besides the best.")
    eval_every: int | None = Field(
        50, ge=1, description="Updates between measurements on held-out groups; null = never."
    )
    eval_groups: int = Field(64, ge=1, description="Held-out groups to measure on.")
    max_kl: float | None = Field(
        None, gt=0, description="Stop once the KL divergence to the anchor exceeds this, in nats per token."
    )
    min_ess: float | None = Field(
        None, gt=0, le=1, description="Stop once the effective share of responses falls below this."
    )
    max_skipped: int = Field(3, ge=1, description="Stop after so many non-finite updates in a row.")
    on_new_data: Literal["refuse", "ignore"] = Field(
        "refuse", description="A resume on a dataset that has grown: refuse, or use the rows of the start."
    )

    @property
    def token_budget(self) -> int:
        """Tokens of a micro-batch; the most there may be where that is not settled yet."""
        return self.tokens_per_micro_batch or MOST_TOKENS

    @model_validator(mode="before")
    @classmethod
    def _name_nearest_key(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            check_keys(values, cls.model_fields, "configuration key")
        return values

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ConfigError("steps and epochs are both given", "give one of them")
        return self

    @model_validator(mode="after")
    def _engine_shards(self) -> Self:
        sharding = "offload" if self.offload else f"zero_stage {self.zero_stage}"
        if self.engine in ("torch", "ddp") and (self.offload or self.zero_stage is not None):
            told = f"{sharding} is for DeepSpeed, and engine is {self.engine}"
            raise ConfigError(told, "use engine=deepspeed, or leave it at auto")
        if self.offload and self.zero_stage == 0:
            raise ConfigError("ZeRO stage 0 offloads nothing", "use zero_stage 1, 2 or 3 with offload")
        return self

    @model_validator(mode="after")
    def _quantised_weights_stay(self) -> Self:
        if self.quantise is not None and self.lora_rank is None:
            raise ConfigError(
                f"quantise={self.quantise} without adapters leaves nothing to fit",
                "give lora_rank, such as 16",
            )
        return self


OUT_OF_THE_UPDATE = frozenset(
    {
        *("dataset", "out", "device", "tokens_per_micro_batch", "gradient_checkpointing", "on_new_data"),
        *("engine", "zero_stage", "offload", "kernels"),
        *("memory_check", "trackers"),
        *("save_every", "keep_checkpoints", "eval_every", "eval_groups", "max_kl", "min_ess", "max_skipped"),
    }
)
"""Fields that a resume may change: none decides what an update is (`snapshot.json` guards the dataset)."""


def check_keys(given: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    """Refuse the first key that is not known, naming the nearest one that is."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown {what} {key!r}", hint)


def fit_config(
    file: str | Path | None = None, *, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> FitConfig:
    """The configuration of a YAML file, then `KEY=VALUE` texts, then flags that are not None on top.

    `ConfigError` names the file, the key and what is wrong with it.
    """
    values = read_yaml(file) if file is not None else {}
    check_keys(values, FitConfig.model_fields, "configuration key")
    for text in overrides:
        override(values, text, FitConfig.model_fields)
    for key, value in (flags or {}).items():
        if value is not None:
            old = values.get(key)
            values[key] = {**old, **value} if isinstance(value, Mapping) and isinstance(old, dict) else value
    try:
        return FitConfig(**values)
    except ValidationError as error:
        raise readable(error, FitConfig.model_fields) from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file that holds one mapping; `ConfigError` if it does not."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"configuration {path} cannot be read: {_told(error)}", "give a YAML file of KEY: VALUE lines"
        ) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"configuration {path} is not a mapping", "write one KEY: VALUE a line")
    return values


def _told(error: Exception) -> str:
    """What is wrong with a file, in one line, and where in it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def to_yaml(config: BaseModel) -> str:
    """The resolved configuration as YAML, every field in the order of its definition."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


def describe_fields(model: type[BaseModel] = FitConfig) -> list[tuple[str, str, str]]:
    """Name, default (as YAML would show it) and description of every field, for documentation."""
    rows = []
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else _shown(field.default)
        rows.append((name, default, field.description or ""))
    return rows


def changed_fields(before: FitConfig, now: FitConfig) -> list[str]:
    """The fields that decide the updates and differ, as `name: before -> now`.

    A longer run is the same run as long as the learning rate does not depend on its length.
    """
    free = set(OUT_OF_THE_UPDATE)
    if before.schedule == now.schedule == "constant":
        free |= {"steps", "epochs"}
    old, new = before.model_dump(), now.model_dump()
    return [f"{key}: {old[key]!r} -> {new[key]!r}" for key in old if key not in free and old[key] != new[key]]


def override(values: dict[str, Any], text: str, fields: Mapping[str, FieldInfo]) -> None:
    """Set one `KEY=VALUE` of a configuration; `objective.epsilon_low=0.6` reaches into a mapping."""
    key, equals, value = text.partition("=")
    first, dot, rest = key.strip().partition(".")
    if not equals or not first or (dot and not rest):
        raise ConfigError(
            f"--set {text!r} is not KEY=VALUE", "write --set lr=1e-5 or --set objective.epsilon_low=0.6"
        )
    check_keys({first: None}, fields, "configuration key")
    if not dot:
        values[first] = _parse(first, value, fields)
        return
    if get_origin(fields[first].annotation) is not dict:
        raise ConfigError(f"--set {text!r}: {first} holds no parameters", f"write --set {first}=VALUE")
    values[first] = {**(values.get(first) or {}), rest: _yaml_value(key, value)}


def _parse(key: str, value: str, fields: Mapping[str, FieldInfo]) -> Any:
    """SQL and paths are taken as they stand, since YAML would find mappings and comments in them."""
    annotation = fields[key].annotation
    if annotation is str or (
        {str, Sql, PathText} & set(get_args(annotation)) and get_origin(annotation) is not dict
    ):
        return None if value.strip().lower() == "null" else value
    return _yaml_value(key, value)


def _yaml_value(key: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: {value!r} is not a YAML value") from error


def _shown(default: Any) -> str:
    plain = list(default) if isinstance(default, tuple) else default
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()


def readable(error: ValidationError, fields: Mapping[str, FieldInfo]) -> ConfigError:
    """The first problem that pydantic found, in the words of a user of the command line."""
    problem = error.errors(include_url=False)[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    field, *rest = [str(part) for part in problem["loc"] if part != "constrained-str"]
    told = problem["msg"].lower()
    if fields[field].annotation == dict[str, Scalar] and rest:
        # Which of the types of a parameter was tried last says nothing.
        field, rest, told = f"{field}.{rest[0]}", [], "input should be a finite number, a text, true or false"
    key = ".".join([field, *rest])
    if problem["type"] == "missing":
        return ConfigError(f"{key} is missing", f"give it in the file or with --set {field}=VALUE")
    return ConfigError(f"{key}: {told}, got {problem.get('input')!r}", f"--set {field}=VALUE overrides it")
