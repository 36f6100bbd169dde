"""Token ids for training: the engine's own where they belong to the model's tokenizer, else made from text.

Ids made from text are made once and kept in the dataset under the fingerprint of tokenizer and chat
template, one file a batch, row by row beside the rollouts. A batch whose rows all have engine ids needs
none.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from data_tools.schema import TOKENS
from data_tools.store.dataset import MOST_KNOWN
from data_tools.store.storage import Stamp
from offline_rec.data.blocks import open_parquet
from offline_rec.data.encoding import UNUSABLE, Encoded, Encoder, TextRow
from offline_rec.data.engine_ids import check_engine_ids
from offline_rec.data.fingerprint import fingerprint

if TYPE_CHECKING:
    import duckdb

    from data_tools.dataset import Dataset

__all__ = ["TokenPlan", "fingerprint", "prepare"]

TEXT_COLUMNS = ["prompt", "tools", "response", "response_messages", "finish_reason", "flags"]
LENGTHS = ["n_prompt_tokens", "n_tokens"]
ENCODED_AT_ONCE = 1024
UNSTATED_END = "unstated_end"

Progress = Callable[[int, int], None]
"""Called with rows done and rows in all."""


def _silent(done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class TokenPlan:
    """Which ids a run trains on: what `RowStore` needs, and what the user should know.

    `key` is the fingerprint that the tokens sidecar is kept under. `counts` is about the rows that were
    encoded in this call: how many have no ids, by a reason of `encoding.UNUSABLE` (their length in
    `RowStore.lengths` is -1), and under `UNSTATED_END` how many count as complete without saying so.
    """

    key: str
    retokenise: bool
    notes: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def count(self, row: TextRow, result: Encoded | str) -> None:
        """Take note of what became of a row."""
        if isinstance(result, str):
            self.counts[result] += 1
        elif row.finish_reason is None and row.ended:
            self.counts[UNSTATED_END] += 1

    def findings(self) -> list[str]:
        """The counts in words."""
        said = [
            f"{n} rows have no ids: {UNUSABLE[why]}"
            for why, n in sorted(self.counts.items())
            if why in UNUSABLE
        ]
        if self.counts[UNSTATED_END]:
            said.append(f"{self.counts[UNSTATED_END]} texts give no finish reason; they count as complete")
        return said


def prepare(
    ds: "Dataset",
    tokenizer: Any,
    *,
    retokenise: bool = False,
    where: str | None = None,
    seed: int = 0,
    progress: Progress = _silent,
    con: "duckdb.DuckDBPyConnection | None" = None,
) -> TokenPlan:
    """Check the engine ids of the rows `where`, and make ids of the batches that need them and lack them.

    Under `retokenise` engine ids are not looked at: all ids are made from text, and log-probs count as
    absent. Raises DataError if engine ids belong to another tokenizer. A killed call goes on with the
    batches that are missing; rows of one batch are held a thousand at a time. `con`: a connection of `ds`.
    """
    key = fingerprint(tokenizer)
    notes = [] if retokenise else check_engine_ids(ds, tokenizer, key, where=where, seed=seed, con=con)
    missing = [name for name in ds.sidecar("tokens", key).missing() if retokenise or _lacks_ids(ds, name)]
    plan = TokenPlan(key, retokenise, notes)
    if missing:
        _encode_batches(ds, missing, Encoder(tokenizer), plan, progress)
    plan.notes.extend(plan.findings())
    return plan


def _lacks_ids(ds: "Dataset", batch: str) -> bool:
    """Whether some row of a batch has no engine ids of its prompt or response."""
    stamp = ds.storage.stamp(f"rollouts/{batch}.parquet")
    return _has_nulls(ds.rollout_path(batch)) if stamp is None else _had_nulls(stamp)


@lru_cache(maxsize=MOST_KNOWN)
def _had_nulls(stamp: Stamp) -> bool:
    """Told once of a file as it is now: the fits of a loop meet the batches of all rounds before."""
    return _has_nulls(stamp[0])


def _has_nulls(path: str) -> bool:
    with open_parquet(path) as file:
        lengths = file.iter_batches(columns=LENGTHS)
        return any(column.null_count for part in lengths for column in part.columns)


def _encode_batches(
    ds: "Dataset", batches: list[str], encoder: Encoder, plan: TokenPlan, progress: Progress
) -> None:
    """Write the ids of some batches; what they met with goes into the plan."""
    sidecar = ds.sidecar("tokens", plan.key)
    total = sum(open_parquet(ds.rollout_path(name)).metadata.num_rows for name in batches)
    done = 0
    for name in batches:
        with sidecar.writer(name) as writer:
            for part in _parts(ds, name):
                writer.write(_encoded(part, encoder, plan))
                done += part.num_rows
                progress(done, total)
            writer.commit()


def _parts(ds: "Dataset", batch: str) -> Iterator[pa.RecordBatch]:
    with open_parquet(ds.rollout_path(batch)) as file:
        yield from file.iter_batches(ENCODED_AT_ONCE, columns=["response_id", *TEXT_COLUMNS, *LENGTHS])


def _encoded(part: pa.RecordBatch, encoder: Encoder, plan: TokenPlan) -> pa.Table:
    rows = [TextRow(**row) for row in part.select(TEXT_COLUMNS).to_pylist()]
    encoded = encoder.encode(rows)
    lacking = pc.or_(*(pc.is_null(part.column(name)) for name in LENGTHS)).to_pylist()
    for row, result, lacks in zip(rows, encoded, lacking, strict=True):
        # Ids of a row that has the engine's are made too, for later; what is said is about those that count.
        if lacks or plan.retokenise:
            plan.count(row, result)
    return _table(part.column("response_id"), encoded)


def _table(names: pa.Array, encoded: list[Encoded | str]) -> pa.Table:
    rows = [row if isinstance(row, Encoded) else None for row in encoded]
    lists = {
        name: pa.array([None if row is None else getattr(row, name) for row in rows], TOKENS.field(name).type)
        for name in ("prompt_ids", "response_ids", "loss_mask")
    }
    counts = [pc.list_value_length(lists[name]) for name in ("prompt_ids", "response_ids")]
    return pa.Table.from_arrays([names, *lists.values(), *counts], schema=TOKENS)
