"""Dumps of OpenRLHF's batch inference: rendered prompts and outputs, scored or not.

The prompt list is repeated for several samples, so a group is spread through the file: equal prompts are one.
Each rank writes a file beside the merged one, out.jsonl0 and out.jsonl1 beside out.jsonl; of the two, the one
that holds less is left out.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from data_tools.logs.records import blocks, flat
from data_tools.readers.base import Carries, Log
from data_tools.readers.rows import RowsReader

FIELDS = ({"input", "output"}, {"input", "output", "reward"})

Digests = npt.NDArray[np.bytes_]


class OpenRLHFReader(RowsReader):
    """One record is one response, as in plain rows; only what the files are to each other is OpenRLHF's."""

    name = "openrlhf"
    title = "OpenRLHF batch inference: generate_vllm, and rm with rewards (JSONL)"
    carries = Carries(prompt="rendered text", group="equal prompts", reward="rm files")

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose records have these fields, all of them text but the reward, and no others."""
        return bool(samples) and log.kind == "jsonl" and all(map(_is_of_openrlhf, samples))

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Leave out files of ranks that a merged file repeats, or a merged file that selects from them."""
        left_out: set[Log] = set()
        for merged in logs:
            left_out |= _repeated(merged, _ranks(merged, logs))
        return [log for log in logs if log not in left_out]


def _is_of_openrlhf(record: Any) -> bool:
    if not isinstance(record, dict) or set(record) not in FIELDS:
        return False
    return isinstance(record["input"], str) and isinstance(record["output"], str)


def _ranks(merged: Log, logs: Sequence[Log]) -> list[Log]:
    """The logs named like the merged one with the number of a rank behind it, by rank."""
    found = {}
    for log in logs:
        rank = log.name.removeprefix(merged.name)
        if log.name.startswith(merged.name) and rank.isdecimal():
            found[int(rank)] = log
    return [log for _, log in sorted(found.items())]


def _repeated(merged: Log, ranks: list[Log]) -> set[Log]:
    """Those of a merged log and its ranks that repeat the others, named in the log that stays."""
    if not ranks:
        return set()
    whole, parts = _digests(merged), _digests(ranks[0])[:0]
    for count, rank in enumerate(ranks, 1):
        parts = np.concatenate([parts, _digests(rank)])
        if np.array_equal(whole, parts):  # ranks beyond are of an earlier run with more of them
            merged.companions |= {f"rank {at}": log for at, log in enumerate(ranks[:count])}
            return set(ranks[:count])
    if len(whole) and np.isin(whole, parts).all():
        ranks[0].companions["selection"] = merged
        return {merged}
    return set()


def _digests(log: Log) -> Digests:
    """Hashes of the records of a log: 16 bytes a record."""
    hashes = b"".join(content for block in map(flat, blocks(log)) for content in block.contents)
    return np.frombuffer(hashes, "S16")
