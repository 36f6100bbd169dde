"""Trajectories that AReaL dumps (`rollout.dump_to_file`): one file a group, one line a response.

`head_version` and `tail_version` are those of the oldest and the newest token. The stock workflows count
prompt tokens too, as -1, which hides the oldest: the newest is taken then, and both stay in `extra`. Texts
hold their special tokens; those of several turns are cut by counting tokens: both parts may be off by some.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from data_tools.readers.base import Carries, Log, RecordReader, Refused, Values, first_object, without

FIELDS = {"task_id", "sample_idx", "tail_version", "prompt", "completion"}


class ArealReader(RecordReader):
    """One record is one response; `task_id` begins anew in every run."""

    name = "areal"
    title = "AReaL rollout dumps (JSONL)"
    carries = Carries(
        prompt="text, special tokens kept",
        group="task_id",
        reward="reward",
        version="head_version, else tail_version",
    )
    names: ClassVar[Mapping[str, str]] = {"response": "completion", "group_id": "task_id"}

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record has the fields of a trajectory."""
        return first_object(samples).keys() >= FIELDS

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the response of a record."""
        yield {
            "prompt": record.get("prompt"),
            "response": record.get("completion"),
            "reward": record.get("reward"),
            "group_id": record.get("task_id"),
            "policy_version": _version(record.get("head_version"), record.get("tail_version")),
            "extra": without(record, "prompt", "completion", "reward", "task_id"),
        }


def _version(head: Any, tail: Any) -> Any:
    known = isinstance(head, int) and not isinstance(head, bool) and head >= 0
    return head if known else tail
