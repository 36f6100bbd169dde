"""Samples as rows in the columns of a dataset: what an evaluation keeps, and a log that `collect` reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa

from data_tools.errors import ConfigError
from data_tools.schema import ROLLOUTS
from offline_rec.rewards import Judgement, Reward
from offline_rec.sampling.sampler import Progress, Prompt, Sample, Sampler, SamplingParams

LOGGED = (
    *("prompt", "tools", "response", "prompt_ids", "response_ids", "behavior_logprobs", "reward"),
    *("policy", "policy_version", "sampled_at", "temperature", "top_p", "top_k", "logprob_kind"),
    "finish_reason",
)
REASON = "reward_reason"
"""Beside the dataset's columns: why a reward is null."""


@dataclass(frozen=True)
class Task:
    """Prompts with what is known about each: a column has one value for each prompt, such as its answer."""

    prompts: Sequence[str | Prompt]
    columns: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        for name, values in self.columns.items():
            if len(values) != len(self.prompts):
                raise ConfigError(f"column {name} has {len(values)} values for {len(self.prompts)} prompts")
            if name in ROLLOUTS.names or name == REASON:
                raise ConfigError(f"column {name} of the prompts would hide a column of the samples")


def sample_rows(
    sampler: Sampler,
    task: Task,
    n: int,
    params: SamplingParams,
    *,
    reward: Reward | None = None,
    policy: str | None = None,
    policy_version: int | None = None,
    sampled_at: datetime | None = None,
    progress: Progress | None = None,
) -> pa.Table:
    """`n` rows for each prompt, in the order of prompts: `LOGGED`, the task's columns and `REASON`.

    `reward` is given the prompts and the task's columns, each value once for each sample, and what is known
    of the sample itself under the names of a dataset. `sampled_at` is
    what the rows say of their time; the present if not given.
    """
    drawn = sampler.sample(task.prompts, n, params, progress=progress)
    return rows_of(
        drawn,
        task,
        params,
        reward=reward,
        policy=policy,
        policy_version=policy_version,
        sampled_at=sampled_at,
    )


def rows_of(
    drawn: Sequence[Sequence[Sample]],
    task: Task,
    params: SamplingParams,
    *,
    reward: Reward | None = None,
    policy: str | None = None,
    policy_version: int | None = None,
    sampled_at: datetime | None = None,
) -> pa.Table:
    """The rows of samples that were drawn for each prompt of the task, as `sample_rows` gives them."""
    samples = [sample for group in drawn for sample in group]
    prompts = [p if isinstance(p, Prompt) else Prompt(p) for p, _ in _each(task.prompts, drawn)]
    columns = {name: [v for v, _ in _each(values, drawn)] for name, values in task.columns.items()}
    judged = _judge(reward, samples, {"prompt": [p.text for p in prompts], **columns})
    values: dict[str, Any] = {
        "prompt": [p.text for p in prompts],
        "tools": [p.tools for p in prompts],
        "response": [s.text for s in samples],
        "prompt_ids": [s.prompt_ids for s in samples],
        "response_ids": [s.response_ids for s in samples],
        "behavior_logprobs": [np.asarray(s.logprobs, np.float32) for s in samples],
        "reward": judged.rewards,
        "finish_reason": [s.finish_reason for s in samples],
    }
    same = {
        "policy": policy,
        "policy_version": policy_version,
        "sampled_at": sampled_at or datetime.now(UTC),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or None,
        "logprob_kind": "processed",
    }
    values |= {
        name: pa.repeat(pa.scalar(v, ROLLOUTS.field(name).type), len(samples)) for name, v in same.items()
    }
    arrays = {
        name: v if isinstance(v, pa.Array) else pa.array(v, ROLLOUTS.field(name).type)
        for name, v in ((name, values[name]) for name in LOGGED)
    }
    arrays[REASON] = pa.array(judged.reasons, pa.string())
    return pa.table(arrays | {name: _column(v) for name, v in columns.items()})


def write_jsonl(rows: pa.Table, path: str | Path) -> None:
    """Write rows as a log in the dataset's own columns, one JSON object a line; nulls are left out."""
    with open(path, "wb") as file:
        append_jsonl(rows, file)


def append_jsonl(rows: pa.Table, file: BinaryIO) -> None:
    """Write rows to a log that is open."""
    for batch in rows.to_batches(max_chunksize=4096):
        for row in batch.to_pylist():
            kept = {name: value for name, value in row.items() if value is not None}
            file.write(orjson.dumps(kept, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z))


def _column(values: list[Any]) -> pa.Array:
    """Values as Arrow has them, or as JSON where they are not of one type."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if v is None else orjson.dumps(v).decode() for v in values], pa.string())


def _each(values: Sequence[Any], drawn: Sequence[Sequence[Sample]]) -> Iterator[tuple[Any, Sample]]:
    """Each prompt's value with each of its samples."""
    for value, group in zip(values, drawn, strict=True):
        for sample in group:
            yield value, sample


def _judge(reward: Reward | None, samples: list[Sample], columns: Mapping[str, Sequence[Any]]) -> Judgement:
    if reward is None:
        return Judgement([None] * len(samples), [None] * len(samples))
    drawn: dict[str, Sequence[Any]] = {
        "prompt_ids": [s.prompt_ids for s in samples],
        "response_ids": [s.response_ids for s in samples],
        "behavior_logprobs": [s.logprobs for s in samples],
        "finish_reason": [s.finish_reason for s in samples],
        "n_tokens": [len(s.response_ids) for s in samples],
    }
    return reward.judge([s.text for s in samples], **drawn, **columns)


def try_out(reward: Reward, task: Task) -> None:
    """Judge one empty response: a column that the reward lacks is told before hours of sampling."""
    prompts = [p.text if isinstance(p, Prompt) else p for p in task.prompts[:1]]
    columns = {name: values[:1] for name, values in task.columns.items()}
    _judge(reward, [Sample([], [], [], "stop", "") for _ in prompts], {"prompt": prompts, **columns})
