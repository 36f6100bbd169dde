"""Token ids for training: the engine's own where they belong to the model's tokenizer, else made from text.

Ids made from text are made once and kept in the dataset under the fingerprint of tokenizer and chat
template, one file a batch, row by row beside the rollouts. A batch whose rows all have engine ids needs
none.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from data_tools.schema import TOKENS
from offline_rec.blocks import open_parquet
from offline_rec.encoding import UNUSABLE, Encoded, Encoder, TextRow
from offline_rec.engine_ids import check_engine_ids
from offline_rec.fingerprint import fingerprint

if TYPE_CHECKING:
    from data_tools.dataset import Dataset

__all__ = ["TokenPlan", "fingerprint", "prepare"]

TEXT_COLUMNS = ["prompt", "tools", "response", "response_messages", "finish_reason", "flags"]
ENCODED_AT_ONCE = 1024

Progress = Callable[[int, int], None]
"""Called with rows done and rows in all."""


def _silent(done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class TokenPlan:
    """Which ids a run trains on: what `RowStore` needs, and what the user should know.

    `key` is the fingerprint that the tokens sidecar is kept under. `unusable` counts the rows that could
    not be encoded in this call, by a reason of `encoding.UNUSABLE`; such rows have length -1 in
    `RowStore.lengths`.
    """

    key: str
    retokenise: bool
    notes: list[str] = field(default_factory=list)
    unusable: Counter[str] = field(default_factory=Counter)


def prepare(
    ds: "Dataset",
    tokenizer: Any,
    *,
    retokenise: bool = False,
    where: str | None = None,
    seed: int = 0,
    progress: Progress = _silent,
) -> TokenPlan:
    """Check the engine ids of the rows `where`, and make ids of the batches that need them and lack them.

    Under `retokenise` engine ids are not looked at: all ids are made from text, and log-probs count as
    absent. Raises DataError if engine ids belong to another tokenizer. A killed call goes on with the
    batches that are missing; rows of one batch are held a thousand at a time.
    """
    key = fingerprint(tokenizer)
    notes = [] if retokenise else check_engine_ids(ds, tokenizer, key, where=where, seed=seed)
    missing = [name for name in ds.sidecar("tokens", key).missing() if retokenise or _lacks_ids(ds, name)]
    unusable = _encode_batches(ds, missing, tokenizer, key, progress) if missing else Counter()
    notes += [f"{count} rows have no ids: {UNUSABLE[reason]}" for reason, count in sorted(unusable.items())]
    return TokenPlan(key, retokenise, notes, unusable)


def _lacks_ids(ds: "Dataset", batch: str) -> bool:
    """Whether some row of a batch has no engine ids of its prompt or response."""
    with open_parquet(ds.rollout_path(batch)) as file:
        lengths = file.iter_batches(columns=["n_prompt_tokens", "n_tokens"])
        return any(column.null_count for part in lengths for column in part.columns)


def _encode_batches(
    ds: "Dataset", batches: list[str], tokenizer: Any, key: str, progress: Progress
) -> Counter[str]:
    """Write the ids of some batches; returns how many rows have none, by reason."""
    encoder = Encoder(tokenizer)
    unusable: Counter[str] = Counter()
    total = sum(open_parquet(ds.rollout_path(name)).metadata.num_rows for name in batches)
    done = 0
    for name in batches:
        with ds.sidecar("tokens", key).writer(name) as writer:
            for table in _encoded(ds, name, encoder, unusable):
                writer.write(table)
                done += len(table)
                progress(done, total)
            writer.commit()
    return unusable


def _encoded(ds: "Dataset", batch: str, encoder: Encoder, unusable: Counter[str]) -> Iterator[pa.Table]:
    with open_parquet(ds.rollout_path(batch)) as file:
        for part in file.iter_batches(ENCODED_AT_ONCE, columns=["response_id", *TEXT_COLUMNS]):
            rows = [TextRow(**row) for row in part.select(TEXT_COLUMNS).to_pylist()]
            encoded = encoder.encode(rows)
            unusable.update(reason for reason in encoded if isinstance(reason, str))
            yield _table(part.column("response_id"), encoded)


def _table(names: pa.Array, encoded: list[Encoded | str]) -> pa.Table:
    rows = [row if isinstance(row, Encoded) else None for row in encoded]
    lists = {
        name: pa.array([None if row is None else getattr(row, name) for row in rows], TOKENS.field(name).type)
        for name in ("prompt_ids", "response_ids", "loss_mask")
    }
    counts = [pc.list_value_length(lists[name]) for name in ("prompt_ids", "response_ids")]
    return pa.Table.from_arrays([names, *lists.values(), *counts], schema=TOKENS)
