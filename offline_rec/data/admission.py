"""Which of the rows that shaping kept are trained on, and why the others are not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offline_rec.data.order import Floats, Ints

LEFT_OUT = {
    "zero_weight": "their weight is 0",
    "no_tokens": "they have no token of prompt or response",
    "masked": "their loss mask is 0 on every token",
    "too_long": "they have more tokens than max_tokens, or than the model's context",
    "temperature_0": "they were decoded greedily, so they have no ratio, which the algorithm needs",
}
"""Why rows that shaping kept are not trained on: code -> meaning."""

Lengths = Callable[[Ints, Ints], tuple[Ints, Ints]]
"""(codes of batches, rows) -> tokens of prompt and response, -1 where a row has no ids."""


@dataclass(frozen=True)
class Admission:
    """Which of the rows that shaping kept are trained on; `batches` names those of their dataset."""

    batches: Sequence[str]
    max_tokens: int | None = None
    needs_ratio: bool = False
    lengths: Lengths | None = None
    retokenise: bool = False

    def reasons(self, rows: pa.RecordBatch, prompt: Ints, response: Ints) -> NDArray[np.int8]:
        """Why each row is left out, as 1 + its place in `LEFT_OUT`; 0 for a row that stays."""
        out = {
            "zero_weight": floats(rows, "weight") == 0,
            "no_tokens": (prompt <= 0) | (response <= 0),
            "masked": rows.column("masked").to_numpy(zero_copy_only=False),
            "too_long": prompt + response > (self.max_tokens or np.inf),
            "temperature_0": self.needs_ratio & (floats(rows, "temperature") == 0),
        }
        reason = np.zeros(len(rows), np.int8)
        for place, name in reversed(list(enumerate(LEFT_OUT, start=1))):
            reason[out[name]] = place
        return reason

    def token_counts(self, rows: pa.RecordBatch) -> tuple[Ints, Ints]:
        """Tokens of prompt and response, from `lengths` where ids are made from text."""
        prompt, response = (
            rows.column(name).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
            for name in ("n_prompt_tokens", "n_tokens")
        )
        made = (prompt < 0) | (response < 0) | self.retokenise
        if self.lengths is not None and made.any():
            at = (integers(rows, "file")[made], integers(rows, "file_row")[made])
            prompt[made], response[made] = self.lengths(*at)
        return prompt, response


def floats(rows: pa.RecordBatch, name: str) -> Floats:
    """A column as float64, null as NaN."""
    values: Floats = rows.column(name).cast(pa.float64()).to_numpy(zero_copy_only=False)
    return values


def integers(rows: pa.RecordBatch, name: str) -> Ints:
    """A column as int64."""
    values: Ints = rows.column(name).to_numpy(zero_copy_only=False).astype(np.int64)
    return values
