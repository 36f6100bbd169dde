"""Logs whose line is one training step, with its fields as columns: lists of one item a response.

ROLL (`rollout_dump_data.step_N.jsonl`) and ms-swift (`completions.jsonl`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import orjson

from data_tools.collecting.prompts import parse_prompt
from data_tools.readers.base import Carries, Log, RecordReader, Refused, Values, first_object, without
from data_tools.readers.reward_columns import RewardColumnsReader

Object = dict[str, Any]


def unzipped(record: Any, leading: Sequence[str]) -> Iterator[tuple[Object, list[str]]]:
    """Yield the rows of a record of columns, with flags; raises Refused unless `leading` are equally long.

    What is no list belongs to every row; a list of another length belongs to none.
    """
    columns = {name: value for name, value in record.items() if isinstance(value, list)}
    lengths = {len(columns[name]) if name in columns else -1 for name in leading}
    count = max(lengths)
    if len(lengths) > 1 or count < 0:
        raise Refused("bad_record", f"{' and '.join(leading)} are not lists of one length")
    if count == 0:
        raise Refused("no_response", "the columns are empty")
    fitting = {name: values for name, values in columns.items() if len(values) == count}
    shared = {name: value for name, value in record.items() if name not in columns}
    flags = ["column_length"] if len(fitting) < len(columns) else []
    for row in zip(*fitting.values(), strict=True):
        yield {**dict(zip(fitting, row, strict=True)), **shared}, list(flags)


def is_columnar(record: Object, *names: str) -> bool:
    """Whether these fields are all there and lists."""
    return all(isinstance(record.get(name), list) for name in names)


class RollReader(RecordReader):
    """One record is one step: its responses, and the parameters that they were sampled with as JSON text."""

    name = "roll"
    title = "ROLL rollout dumps, columns in one line (JSONL)"
    carries = Carries(prompt="messages or text", group="id", reward="scores", version="global_step")
    names: ClassVar[Mapping[str, str]] = {
        "response": "responses",
        "reward": "scores",
        "policy_version": "global_step",
        "group_id": "id",
    }

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record is a dump of columns."""
        return is_columnar(first_object(samples), "responses", "scores", "sampling_params")

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the responses of a step."""
        for row, flags in unzipped(record, ["responses"]):
            prompt, of_prompt = _asked(row)
            parameters = _sampling(row.get("sampling_params"))
            yield {
                "prompt": prompt,
                "response": row["responses"],
                "reward": row.get("scores"),
                "group_id": row.get("id"),
                "policy_version": row.get("global_step"),
                "temperature": parameters.get("temperature"),
                "top_p": parameters.get("top_p"),
                "top_k": parameters.get("top_k"),
                "flags": flags,
                "extra": without(row, of_prompt, "responses", "scores", "global_step", "id"),
            }


def _asked(row: Object) -> tuple[Any, str]:
    """The prompt, and its field: the messages that ROLL's template renders, else the text."""
    messages = row.get("messages")
    if isinstance(messages, str):
        messages = parse_prompt(messages)
    if isinstance(messages, list) and messages:
        return messages, "messages"
    return row.get("prompt"), "prompt"


def _sampling(logged: Any) -> Object:
    """Sampling parameters, which newer versions nest in `generation_config`."""
    if isinstance(logged, str):
        try:
            logged = orjson.loads(logged)
        except orjson.JSONDecodeError:
            return {}
    if not isinstance(logged, dict):
        return {}
    nested = logged.get("generation_config")
    return {**nested, **logged} if isinstance(nested, dict) else logged


class SwiftReader(RewardColumnsReader):
    """One record is one logging step: its responses, rewards by the name of their function, advantages."""

    name = "ms-swift"
    title = "ms-swift completions.jsonl, columns in each line (JSONL)"
    carries = Carries(
        prompt="text or messages",
        group="equal prompts",
        reward="if there is one reward function",
        version="step",
    )
    names: ClassVar[Mapping[str, str]] = {"response": "completion", "policy_version": "step"}

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record is a step of columns."""
        return is_columnar(first_object(samples), "step", "prompt", "completion")

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the responses of a step."""
        for row, flags in unzipped(record, ["prompt", "completion"]):
            yield {
                "prompt": row["prompt"],
                "response": row["completion"],
                "policy_version": row.get("step"),
                "flags": flags,
                "extra": without(row, "step", "prompt", "completion"),
            }
