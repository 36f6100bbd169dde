"""prime-rl's token exports: rank_R.jsonl, one trained sequence a line, as lists of equal length.

They hold no text, no group and no reward: prompts of equal ids are a group. A folder is whole once a file
named STABLE stands in it. Other lists are kept over the response alone.
"""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from data_tools.collecting.reasons import Refused
from data_tools.readers.base import Carries, Chunk, Log, RecordReader, Row, first_object, without
from data_tools.readers.sequences import compact, partial_mask, produced, span

SEQUENCE = {"token_ids", "loss_mask", "inference_logprobs"}
STABLE = "STABLE"

_DERIVED = ("position_ids", "log_importance_ratio", "importance_ratio", "prob_delta", "mismatch_kl")


class TokenExportReader(RecordReader):
    """One record is one sequence of a training step."""

    name = "prime-rl-tokens"
    title = "prime-rl token exports (rank_R.jsonl)"
    carries = Carries(prompt="ids", ids="yes", logprobs="yes", version="step")

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record is a sequence of a step."""
        first = first_object(samples).keys()
        return first >= SEQUENCE | {"step", "rank"}

    def chunks(self, log: Log) -> Iterator[Chunk]:
        """Read record by record; say so where the export may still be written."""
        unfinished = _is_unfinished(log)
        for chunk in super().chunks(log):
            if unfinished:
                chunk.notes["unfinished_export"] = 1
            unfinished = False
            yield chunk

    def rows(self, record: Any, log: Log) -> Iterator[Row]:
        """Yield the response of a sequence."""
        if not isinstance(record, dict) or not record.keys() >= SEQUENCE:
            raise Refused("bad_record", "no sequence: it lacks token_ids, loss_mask or inference_logprobs")
        ids, mask, values = (record[name] for name in ("token_ids", "loss_mask", "inference_logprobs"))
        where = span(mask)
        if len(ids) != len(mask):
            raise Refused("bad_mask", f"{len(mask)} marks for {len(ids)} tokens")
        places = record.get("position_ids")
        if isinstance(places, list) and places.count(0) > 1:
            raise Refused("bad_record", "several sequences packed into one")
        fits = isinstance(values, list) and len(values) == len(ids)
        yield {
            "prompt_ids": ids[: where.start],
            "response_ids": ids[where],
            "behavior_logprobs": produced(values[where], mask[where]) if fits else None,
            "loss_mask": partial_mask(mask[where]),
            "policy_version": record.get("step"),
            "flags": [] if fits else ["logprob_length"],
            "extra": _extra(record, where),
        }


def _extra(record: dict[str, Any], where: slice) -> dict[str, Any]:
    """Other fields; those of each token over the response, those that follow from others not at all."""
    rest = without(record, *SEQUENCE, *_DERIVED, "step")
    size = len(record["token_ids"])
    return compact(
        {
            name: value[where] if isinstance(value, list) and len(value) == size else value
            for name, value in rest.items()
        }
    )


def _is_unfinished(log: Log) -> bool:
    """Whether this is a file of an export whose folder is not said to be whole."""
    if log.path is None or not re.fullmatch(r"rank_\d+\.jsonl", os.path.basename(log.path)):
        return False
    return not os.path.exists(os.path.join(os.path.dirname(log.path), STABLE))
