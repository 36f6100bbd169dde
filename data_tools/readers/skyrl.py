"""Dumps of SkyRL's evaluations (`dump_eval_results`): one file a data source, one line a response.

`score` is a number, or a list of one reward per token. Such a list is read where it says one thing only: all
zeros but the last. Otherwise its sum is a choice, which `--reward` can make; the list is in `extra`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from data_tools.readers.base import Carries, Log, RecordReader, Refused, Values, first_object, without

FIELDS = {"input_prompt", "output_response", "score", "env_class"}
USED = ("input_prompt", "output_response", "score", "stop_reason")
_STEP = re.compile(r"global_step_(\d+)_evals")


class SkyRLReader(RecordReader):
    """One record is one response; the step is that of the folder that SkyRL writes the file into."""

    name = "skyrl"
    title = "SkyRL evaluation dumps (JSONL)"
    carries = Carries(
        prompt="text, special tokens kept",
        group="equal prompts",
        reward="score, or its last token's",
        version="in the folder's name",
    )
    names: ClassVar[Mapping[str, str]] = {
        "prompt": "input_prompt",
        "response": "output_response",
        "reward": "score",
        "finish_reason": "stop_reason",
    }

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record has the fields of an evaluation."""
        return first_object(samples).keys() >= FIELDS

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the response of a record."""
        score = record.get("score")
        step = _STEP.search(log.name)
        at_token = _is_at_last_token(score)
        yield {
            "prompt": record.get("input_prompt"),
            "response": record.get("output_response"),
            "reward": score[-1] if at_token else score,
            "finish_reason": record.get("stop_reason"),
            "policy_version": int(step[1]) if step else None,
            "notes": ["reward_at_token"] if at_token else [],
            "extra": without(record, *USED),
        }


def _is_at_last_token(score: Any) -> bool:
    """Whether these are rewards per token of which only the last can be other than 0."""
    if not isinstance(score, list) or not score:
        return False
    return all(type(item) in (int, float) for item in score) and not any(score[:-1])
