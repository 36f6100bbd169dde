"""Dumps of verl: rollouts of training (`rollout_data_dir`) and of validation (`validation_data_dir`).

One file a step, one line a response. `score` is the reward, the sum of the token scores. The older trainer
logs no group, so equal prompts are one; the newer one writes `uid` as sample_rollout_output, whose first part
is the group. Prompts and responses are decoded without special tokens, so chat markers are missing from both.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from data_tools.readers.base import Carries, Log, RecordReader, Refused, Values, first_object, without

_UID = re.compile(r"(.+)_\d+_\d+", re.S)
FIELDS = {"input", "output", "gts", "score", "step"}


class VerlReader(RecordReader):
    """One record is one response; what the reward function told besides is in `extra`."""

    name = "verl"
    title = "verl rollout and validation dumps (JSONL)"
    carries = Carries(
        prompt="text without chat markers",
        group="uid, else equal prompts",
        reward="score",
        version="step",
    )
    names: ClassVar[Mapping[str, str]] = {
        "prompt": "input",
        "response": "output",
        "reward": "score",
        "policy_version": "step",
    }

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record has the five fields that every version writes."""
        return first_object(samples).keys() >= FIELDS

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the response of a record."""
        yield {
            "prompt": record.get("input"),
            "response": record.get("output"),
            "reward": record.get("score"),
            "policy_version": record.get("step"),
            "group_id": _group(record.get("uid"), record.get("step")),
            "flags": ["no_special_tokens"],
            "extra": _extra(record),
        }


def _group(uid: Any, step: Any) -> str | None:
    """The sample of a uid, within its step: other steps sample by other policies."""
    match = _UID.fullmatch(uid) if isinstance(uid, str) else None
    return f"{step}/{match[1]}" if match else None


def _extra(record: dict[str, Any]) -> dict[str, Any]:
    """The other fields; validation dumps repeat the score as `reward`."""
    extra = without(record, "input", "output", "score", "step")
    if "reward" in extra and extra["reward"] == record.get("score"):
        del extra["reward"]
    return extra
