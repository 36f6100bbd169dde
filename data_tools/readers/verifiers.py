"""verifiers before its version 1: results.jsonl, one rollout a line, and the metadata.json beside it.

metadata.json names the model and its sampling parameters. Where the state column `trajectory` was saved,
each of its steps is a completion of its own, with the engine's ids; else a rollout is one response.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from os.path import dirname
from typing import Any

from data_tools.collecting.ids import digest
from data_tools.collecting.reasons import Refused
from data_tools.logs.jsontext import canonical
from data_tools.logs.records import samples
from data_tools.readers.base import Carries, Log, Passed, RecordReader, Row, first_object, without
from data_tools.readers.sequences import partial_mask

Object = dict[str, Any]

ROLLOUT = {"example_id", "prompt", "completion", "reward"}
WRITTEN = {"timing", "metrics", "is_completed", "is_truncated", "stop_condition", "trajectory"}
METADATA = {"env_id", "model", "rollouts_per_example"}

_USED = (
    "example_id",
    "prompt",
    "completion",
    "reward",
    "tool_defs",
    "is_truncated",
    "trajectory",
    "trajectory_id",
)
_OF_STEP = ("prompt", "completion", "tokens", "is_truncated", "trajectory_id")


class VerifiersReader(RecordReader):
    """One record is one rollout; rollouts of one example of a file are a group."""

    name = "verifiers"
    title = "verifiers results.jsonl with its metadata.json, and the state column trajectory"
    carries = Carries(
        prompt="yes",
        group="example_id",
        reward="yes",
        ids="state column trajectory",
        logprobs="state column trajectory",
        time="yes",
    )

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record is a rollout, or the metadata of some."""
        first = first_object(samples).keys()
        return first >= METADATA or (first >= ROLLOUT and bool(WRITTEN & first))

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Join the metadata of a folder to its rollouts."""
        metadata = {dirname(log.name): log for log in logs if first_object(samples(log)).keys() >= METADATA}
        described = set(metadata.values())
        rollouts = [log for log in logs if log not in described]
        for log in rollouts:
            if dirname(log.name) in metadata:
                log.companions["metadata"] = metadata[dirname(log.name)]
        joined = {dirname(log.name) for log in rollouts}
        return [log for log in logs if log in rollouts or dirname(log.name) not in joined]

    def rows(self, record: Any, log: Log) -> Iterator[Row]:
        """Yield the steps of a rollout, or all of it as one response."""
        if not isinstance(record, dict):
            raise Refused("not_an_object", "an element that is no object")
        if record.keys() >= METADATA:
            yield Passed("not_a_rollout")
            return
        shared = _settings(log.companions.get("metadata")) | _shared(record)
        steps = record.get("trajectory")
        if isinstance(steps, list) and steps:
            yield from _steps(steps, record, shared)
            return
        yield shared | {
            "prompt": record.get("prompt"),
            "response": record.get("completion") or None,
            "trajectory_id": record.get("trajectory_id"),
            "truncated": record.get("is_truncated"),
        }


@lru_cache(maxsize=64)
def _settings(metadata: Log | None) -> Object:
    """Who sampled the rollouts, and how, according to their metadata."""
    said = first_object(samples(metadata)) if metadata else {}
    sampling = said.get("sampling_args")
    sampling = sampling if isinstance(sampling, dict) else {}
    beyond = sampling.get("extra_body")
    sampling = {**beyond, **sampling} if isinstance(beyond, dict) else sampling
    return {"policy": said.get("model")} | {
        name: sampling.get(name) for name in ("temperature", "top_p", "top_k")
    }


def _shared(record: Object) -> Object:
    """Columns of every response of a rollout."""
    timing, metrics = record.get("timing"), record.get("metrics")
    scored = metrics if isinstance(metrics, dict) else {}
    repeated = [name for name, value in scored.items() if record.get(name) == value]
    # A rollout that failed, or whose rubric has no function, is written with a reward of 0.
    unscored = record.get("reward") == 0 and (bool(record.get("error")) or metrics == {})
    return {
        "group_id": record.get("example_id"),
        "reward": None if unscored else record.get("reward"),
        "tools": as_tools(record.get("tool_defs")),
        "sampled_at": timing.get("start_time") if isinstance(timing, dict) else None,
        "flags": ["unscored"] if unscored else [],
        "extra": without(record, *_USED, *repeated),
    }


def _steps(steps: list[Any], record: Object, shared: Object) -> Iterator[Row]:
    """Each step as a completion; the reward of the rollout is that of every step."""
    known = record.get("trajectory_id")
    if known is None and len(steps) > 1:
        known = digest("trajectory", canonical(record)).hex()
    for turn, step in enumerate(steps):
        if not isinstance(step, dict):
            yield Refused("bad_record", f"step {turn + 1} is no object but {type(step).__name__}")
            continue
        tokens = step.get("tokens")
        tokens = tokens if isinstance(tokens, dict) else {}
        mask = tokens.get("completion_mask")
        row = {
            "prompt": step.get("prompt"),
            "response": step.get("completion") or None,
            "prompt_ids": tokens.get("prompt_ids"),
            "response_ids": tokens.get("completion_ids"),
            "behavior_logprobs": tokens.get("completion_logprobs"),
            "loss_mask": partial_mask(mask) if mask else None,
            "truncated": tokens.get("is_truncated", step.get("is_truncated")),
            "trajectory_id": step.get("trajectory_id", known),
            "turn": turn,
        }
        yield shared | row | {"extra": shared["extra"] | {"step": without(step, *_OF_STEP)}}


def as_tools(definitions: Any) -> Any:
    """Tool definitions in the form of OpenAI's API, which chat templates know."""
    if not isinstance(definitions, list) or not definitions:
        return None
    return [
        {"type": "function", "function": tool} if isinstance(tool, dict) and "function" not in tool else tool
        for tool in definitions
    ]
