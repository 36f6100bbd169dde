"""Stored log-probs and masks of sampled rows, value by value: zeros as fillers, impossible, or misaligned."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from data_tools.checking.findings import SAMPLED, Findings, Rule, Tally
from data_tools.collecting.ragged import Bools, Ragged

if TYPE_CHECKING:
    import pyarrow as pa

    from data_tools.checking.sample import Sample

ZERO_TOKENS = 4
"""So many log-probs of exactly 0, and no other, are a filler: single ones are legal (probability 1)."""

MOSTLY = 0.9
LONG = 16

_COLUMNS = (
    "response_id",
    "response_ids",
    "behavior_logprobs",
    "loss_mask",
    "behavior_logprob",
    "temperature",
)
_LEAVE_OUT = 'rec collect LOGS --into NEW --select "SELECT * EXCLUDE (behavior_logprobs) FROM source"'

ZERO_FILLED = Rule(
    "zero_filled",
    "error",
    "every log-prob of the row is 0: missing values were filled with zeros",
    _LEAVE_OUT,
    SAMPLED,
)
MOSTLY_ZERO = Rule(
    "mostly_zero",
    "warning",
    "nearly all log-probs of the row are exactly 0: filled with zeros, or a policy that is certain",
    "rec sql {dataset} \"SELECT response_id, behavior_logprobs FROM rollouts WHERE response_id = '{row}'\"",
    SAMPLED,
)
POSITIVE = Rule(
    "positive_logprob",
    "error",
    "a stored log-prob is above 0, which no probability has",
    _LEAVE_OUT,
    SAMPLED,
)
NOT_FINITE = Rule(
    "logprob_not_finite",
    "error",
    "a stored log-prob is NaN or infinite; a missing one is null",
    _LEAVE_OUT,
    SAMPLED,
)
LENGTHS = Rule(
    "length_differs",
    "error",
    "not one log-prob, or not one mask value, for each response id",
    "rec collect LOGS --into NEW",
    SAMPLED,
)
SUM_DIFFERS = Rule(
    "sum_differs",
    "error",
    "behavior_logprob is not the sum of the log-probs where the mask is 1: one of them was edited",
    "rec collect LOGS --into NEW",
    SAMPLED,
)

STORED_RULES = (ZERO_FILLED, MOSTLY_ZERO, POSITIVE, NOT_FINITE, LENGTHS, SUM_DIFFERS)


def find_stored(sample: "Sample", findings: Findings) -> None:
    """Note what is found in the token columns of the sampled rows."""
    tally = Tally()
    for table in sample.chunks(_COLUMNS):
        _look(table, tally)
    for rule, count in tally.counts.items():
        rows = tally.rows[rule]
        findings.add(rule, count, rows, of=len(sample), row=rows[0].replace("'", "''"))


def _look(table: "pa.Table", tally: Tally) -> None:
    names = np.array(table.column("response_id").to_pylist(), object)
    ids, logprobs, mask = (
        Ragged.of(table.column(name).combine_chunks(), len(names)) for name in _COLUMNS[1:4]
    )
    values, known = logprobs.items, ~logprobs.absent
    zeros = logprobs.sum((known & (values == 0)).astype(np.float64))
    lengths = logprobs.lengths
    sampled = table.column("temperature").to_numpy() != 0  # greedy log-probs are 0 where they are processed
    filled = sampled & (lengths >= ZERO_TOKENS) & (zeros == lengths)
    with np.errstate(invalid="ignore"):
        broken = {
            POSITIVE: logprobs.any(known & (values > 0)),
            NOT_FINITE: logprobs.any(known & ~np.isfinite(values)),
        }
    broken |= {
        ZERO_FILLED: filled,
        MOSTLY_ZERO: sampled & ~filled & (lengths >= LONG) & (zeros >= MOSTLY * lengths),
        LENGTHS: ids.present & _unlike(ids, logprobs) | ids.present & _unlike(ids, mask),
    }
    sums = table.column("behavior_logprob").to_numpy()
    fine = ~broken[LENGTHS] & ~broken[NOT_FINITE] & logprobs.present
    broken[SUM_DIFFERS] = fine & _other_sum(logprobs, mask, sums)
    for rule, rows in broken.items():
        tally.add(rule, names[rows].tolist())


def _unlike(ids: Ragged, values: Ragged) -> Bools:
    other: Bools = values.present & (values.lengths != ids.lengths)
    return other


def _other_sum(logprobs: Ragged, mask: Ragged, sums: npt.NDArray[np.float64]) -> Bools:
    counted = np.ones(len(logprobs.items), bool)
    fits = mask.present & (mask.lengths == logprobs.lengths)
    counted[np.repeat(fits, logprobs.lengths)] = mask.items[np.repeat(fits, mask.lengths)] == 1
    values = np.where(counted & ~logprobs.absent, logprobs.items.astype(np.float64), 0.0)
    with np.errstate(invalid="ignore"):
        other: Bools = np.abs(logprobs.sum(values) - sums) > 1e-3 * (1 + np.abs(sums))
    return other
