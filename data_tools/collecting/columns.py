"""Names: which field of a log is which column of a dataset, as one table of data.

A *loose* column is what readers hand over: a dataset column, or one of the few hints that rules need besides.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from data_tools.logs.packed import NumberKind

ColumnKind = Literal[
    "text", "prompt", "key", "label", "json", "int32", "int64", "float", "reward", "time", "bool",
    "ids", "logprobs", "mask", "texts",
]  # fmt: skip

LOOSE: dict[str, ColumnKind] = {
    "response_id": "key",
    "group_id": "key",
    "run": "key",
    "trajectory_id": "key",
    "turn": "int32",
    "prompt": "prompt",
    "tools": "json",
    "response": "text",
    "response_messages": "json",
    "prompt_ids": "ids",
    "response_ids": "ids",
    "behavior_logprobs": "logprobs",
    "loss_mask": "mask",
    "reward": "reward",
    "policy": "label",
    "policy_version": "int64",
    "sampled_at": "time",
    "temperature": "float",
    "top_p": "float",
    "top_k": "int32",
    "logprob_kind": "label",
    "finish_reason": "label",
    "truncated": "bool",
    "ids_source": "label",
    "logprob_tokens": "texts",
    "flags": "texts",
}
"""Loose columns and how their values are read (coerce.py). A row may have `extra` too: a dict of the rest.

`response_id` and `group_id` are the log's own keys here; ids.py makes them unique. `run` scopes such keys.
`logprob_tokens` are the texts of the tokens that have log-probs, by which a surplus is told.
`ids_source` other than `engine` says that a client made the ids from text.
`response` may be a text, a message or a list of messages.
"""

ALIASES: dict[str, tuple[str, ...]] = {
    "response_id": ("completion_id", "generation_id"),
    "group_id": (
        "group", "group_key", "prompt_id", "problem_id", "question_id", "example_id", "task_id", "doc_id",
        "instance_id",
    ),
    "run": ("run_id", "run_name", "experiment"),
    "trajectory_id": ("episode_id", "trajectory"),
    "turn": ("turn_index",),
    "prompt": (
        "prompt_text", "prompt_messages", "input", "input_prompt", "question", "problem", "query",
        "messages", "conversation",
    ),
    "tools": ("tool_defs",),
    "response": (
        "response_text", "completion", "completion_text", "output", "output_text", "output_response",
        "generation", "generated_text", "model_output",
    ),
    "response_messages": ("completion_messages", "output_messages"),
    "prompt_ids": ("prompt_token_ids", "input_token_ids"),
    "response_ids": (
        "response_token_ids", "completion_ids", "completion_token_ids", "output_ids", "output_token_ids",
        "token_ids",
    ),
    "behavior_logprobs": (
        "behaviour_logprobs", "logprobs", "log_probs", "response_logprobs", "completion_logprobs",
        "token_logprobs", "output_logprobs", "rollout_logprobs", "rollout_log_probs", "sampling_logprobs",
        "inference_logprobs", "generation_logprobs", "old_logprobs", "old_log_probs",
    ),
    "loss_mask": ("response_mask", "completion_mask", "action_mask", "assistant_mask"),
    "reward": ("score", "total_reward", "final_reward", "rewards", "is_correct"),
    "policy": ("policy_name", "model", "model_name", "sampler"),
    "policy_version": ("model_version", "weight_version", "global_step", "training_step", "step"),
    "sampled_at": ("timestamp", "created_at", "created", "time"),
    "temperature": (),
    "top_p": (),
    "top_k": (),
    "logprob_kind": ("logprobs_mode",),
    "finish_reason": ("stop_reason", "finish"),
    "truncated": ("is_truncated",),
    "ids_source": ("token_ids_source",),
    "logprob_tokens": ("token_texts",),
    "flags": (),
}  # fmt: skip
"""Column -> names it goes by in logs, the surest first; the column's own name comes before all of them."""

CONVERSATION = ("messages", "conversation")
"""Aliases of `prompt` whose last turns are the response where the log has no field for that."""

MAPPED = "map:"
"""Prefix of a field that the user mapped to a column; it goes before the column's own name."""

MERGED = "extra"
"""A log's own field of this name is merged into the column instead of nested in it."""


def candidates(fields: Iterable[str]) -> dict[str, list[str]]:
    """For each loose column that some of `fields` can fill: those fields, the surest first."""
    present = set(fields)
    found = {column: [name for name in names_of(column) if name in present] for column in LOOSE}
    return {column: names for column, names in found.items() if names}


@cache
def names_of(column: str) -> tuple[str, ...]:
    """Every name of a column, the surest first."""
    return (MAPPED + column, column, *ALIASES[column])


def number_fields() -> "dict[str, NumberKind]":
    """The fields of every name whose column holds lists of numbers, and the numbers of which kind."""
    kinds: dict[ColumnKind, NumberKind] = {"ids": "i", "mask": "i", "logprobs": "d"}
    return {name: kinds[kind] for column, kind in LOOSE.items() if kind in kinds for name in names_of(column)}


def pick(record: Mapping[str, Any], names: list[str], column: str) -> str | None:
    """The field of a record that fills `column`: the first one with a value, else the first one present.

    A reward that is present and null says "not judged", so no other field may stand in for it.
    """
    present = [name for name in names if name in record]
    if not present or column == "reward":
        return present[0] if present else None
    return next((name for name in present if record[name] is not None), present[0])


def is_response(fields: Iterable[str]) -> bool:
    """Whether fields of these names can make a row: a prompt and a response, or a conversation of both."""
    found = candidates(fields)
    prompt = "prompt" in found or "prompt_ids" in found
    response = any(column in found for column in ("response", "response_ids", "response_messages"))
    return prompt and (response or any(name in CONVERSATION for name in found.get("prompt", ())))
