"""Log-probs of a policy on the rows of a dataset, kept beside them under the fingerprint of its weights.

A call computes what is missing and asked for: rows outside `where` stay as they were, null at first. Finished
pieces of a batch survive a kill, and become its file once all of it is there.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_tools.errors import ConfigError, DataError
from offline_rec.data.fingerprint import fingerprint, same_vocabulary
from offline_rec.data.packing import micro_batches
from offline_rec.data.ragged import IntArray, Ragged, offsets_of
from offline_rec.data.rows import Rows, RowStore
from offline_rec.data.tokens import TokenPlan, prepare
from offline_rec.models.policy import Policy
from offline_rec.models.score_files import Piece, ScoreFiles

if TYPE_CHECKING:
    from data_tools.dataset import Dataset

PIECE_TOKENS = 1 << 17
TOKEN_BUDGET = 16_384

SKIPPED = {
    "no_ids": "the row has no token ids, and none could be made from its text",
    "empty_prompt": "the prompt has no tokens to predict the response from",
    "too_long": "prompt and response exceed the model's context",
    "outside_vocabulary": "token ids are beyond the model's vocabulary",
    "not_finite": "the model's log-probs are not finite",
}
"""Why a row that was asked for has no log-probs: code -> meaning."""

Progress = Callable[[int, int], None]
"""Called with rows done and rows in all."""


@dataclass
class ScoreReport:
    """What a call did: `rows` asked for = `scored` now + `kept` from before + all of `skipped`.

    `key` names the logprobs sidecar; `notes` are facts the user should know.
    """

    key: str
    rows: int = 0
    scored: int = 0
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self) | {"skipped": dict(self.skipped)}


def score(
    ds: "Dataset",
    model: "str | Path | Policy",
    *,
    where: str | None = None,
    retokenise: bool = False,
    tokens: TokenPlan | None = None,
    token_budget: int = TOKEN_BUDGET,
    progress: Progress | None = None,
) -> ScoreReport:
    """Score the rows `where` (an SQL condition over `rollouts`; all by default) at their ratio temperatures.

    Rows without engine ids (under `retokenise` all) get those of the model's own tokenizer, unless `tokens`
    says which to use. `token_budget` bounds the tokens of one forward pass. Raises DataError if the
    model does not load, or if ids belong to another tokenizer.
    """
    if token_budget < 1:
        raise ConfigError(f"token_budget must be at least 1, got {token_budget}", "16384 is the default")
    policy = model if isinstance(model, Policy) else Policy.load(model)
    own = fingerprint(policy.tokenizer)
    plan = tokens or prepare(ds, policy.tokenizer, retokenise=retokenise, where=where)
    if not same_vocabulary(plan.key, own):
        raise DataError(
            f"the model to score has another tokenizer ({own[:8]}...) than the token ids ({plan.key[:8]}...)",
            "use a model with the same tokenizer",
        )
    report = ScoreReport(score_key(policy, plan), notes=[] if tokens else plan.notes)
    # Rows are read in order, so one row group at a time is enough.
    store = RowStore(ds, tokens_key=plan.key, retokenise=plan.retokenise, cache_bytes=0)
    files = ScoreFiles(ds, report.key)
    scorer = _Scorer(policy, store, files, token_budget)
    total = _count(ds, where)
    for batch, wanted in _selected(ds, where):
        report.rows += len(wanted)
        done_before = report.rows - len(wanted)
        tell = None if progress is None else _shifted(progress, done_before, total)
        scorer.score_batch(batch, wanted, report, tell)
    files.sweep()
    return report


def score_key(policy: Policy, plan: TokenPlan) -> str:
    """The sidecar's name: fingerprint of the weights, and of the ids unless they are the policy's own."""
    other = "" if plan.key == fingerprint(policy.tokenizer) else f"-{plan.key}"
    return policy.fingerprint() + other + ("-retokenised" if plan.retokenise else "")


class _Scorer:
    def __init__(self, policy: Policy, store: RowStore, files: ScoreFiles, token_budget: int) -> None:
        self.policy, self.store, self.files, self.token_budget = policy, store, files, token_budget

    def score_batch(
        self, batch: str, wanted: IntArray, report: ScoreReport, progress: Callable[[int], None] | None
    ) -> None:
        """Score what is missing of one batch, piece by piece, then write its file."""
        have = self.files.scored(batch)
        todo = wanted[~have[wanted]]
        report.kept += len(wanted) - len(todo)
        todo, lengths = self._computable(batch, todo, report)
        done = len(wanted) - len(todo)
        for piece in _pieces(lengths):
            self._score_piece(batch, todo[piece], report)
            done += len(todo[piece])
            if progress is not None:
                progress(done)
        self.files.finish(batch)

    def _computable(self, batch: str, todo: IntArray, report: ScoreReport) -> tuple[IntArray, IntArray]:
        """Rows that can be scored, as far as their lengths tell, and those lengths."""
        prompt, response = self.store.lengths([batch] * len(todo), todo)
        reasons = {
            "no_ids": (prompt < 0) | (response < 0),
            "empty_prompt": prompt == 0,
            "too_long": self.policy.too_long(prompt + response),
        }
        keep = np.ones(len(todo), np.bool_)
        for reason, rows in reasons.items():
            report.skipped[reason] += int((rows & keep).sum())
            keep &= ~rows
        report.skipped = +report.skipped
        return todo[keep], (prompt + response)[keep]

    def _score_piece(self, batch: str, at: IntArray, report: ScoreReport) -> None:
        rows = self.store.take([batch] * len(at), at)
        outside = self.policy.outside(rows)
        if outside.any():
            report.skipped["outside_vocabulary"] += int(outside.sum())
            rows, at = rows.select(np.flatnonzero(~outside)), at[~outside]
        logprobs = row_logprobs(self.policy, rows, self.token_budget)
        broken = _any(logprobs, ~np.isfinite(logprobs.values))
        if broken.any():
            report.skipped["not_finite"] += int(broken.sum())
            kept = np.flatnonzero(~broken)
            rows, at, logprobs = rows.select(kept), at[kept], logprobs.take(kept)
        report.scored += len(at)
        self.files.write_piece(
            batch, Piece(at, logprobs, _masked_sums(logprobs, rows.mask), rows.temperature)
        )


@torch.no_grad()
def row_logprobs(policy: Policy, rows: Rows, token_budget: int = TOKEN_BUDGET) -> Ragged:
    """Log-probs of the response tokens of all rows at their temperatures, in order, without gradient."""
    offsets = offsets_of(rows.response_ids.lengths)
    values = np.empty(offsets[-1], np.float32)
    for index in micro_batches(rows, token_budget, policy.sharing):
        together = policy.logprobs(rows, index).float().cpu().numpy()
        for row, computed in zip(index.tolist(), together, strict=True):
            first, last = offsets[row], offsets[row + 1]
            values[first:last] = computed[: last - first]
    return Ragged(values, offsets)


def _pieces(lengths: IntArray) -> Iterator[slice]:
    """Runs of rows of about PIECE_TOKENS tokens each."""
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths) // PIECE_TOKENS)) + 1
    for first, last in pairwise([0, *cuts.tolist(), len(lengths)]):
        if last > first:
            yield slice(first, last)


def _masked_sums(logprobs: Ragged, mask: Ragged) -> NDArray[np.float64]:
    """Sum of each row over the tokens of mask 1."""
    produced = np.append(logprobs.values.astype(np.float64) * mask.values, 0)
    sums: NDArray[np.float64] = np.add.reduceat(produced, logprobs.offsets[:-1])
    return np.where(logprobs.lengths > 0, sums, 0)


def _any(rows: Ragged, values: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """For each row whether any of its values is true."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[rows.offsets]) > 0


def _count(ds: "Dataset", where: str | None) -> int:
    return int(ds.sql(f"SELECT count(*) FROM rollouts WHERE {where or 'true'}").column(0)[0].as_py())


def _selected(ds: "Dataset", where: str | None) -> Iterator[tuple[str, IntArray]]:
    """Batch by batch the rows asked for, in order; only one batch's numbers are held."""
    query = f"SELECT file, file_row FROM rollouts WHERE {where or 'true'} ORDER BY file, file_row"
    held: list[IntArray] = []
    current = ""
    for part in ds.reader(query):
        files = part.column("file").to_numpy(zero_copy_only=False)
        rows = part.column("file_row").to_numpy()
        cuts = [0, *(np.flatnonzero(files[1:] != files[:-1]) + 1).tolist(), len(files)]
        for first, last in pairwise(cuts):
            if held and files[first] != current:
                yield current, np.concatenate(held)
                held = []
            current = files[first]
            held.append(rows[first:last])
    if held:
        yield current, np.concatenate(held)


def _shifted(progress: Progress, before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(before + done, total)
