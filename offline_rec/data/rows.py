"""Training rows: token ids, masks and log-probs of named dataset rows, read by position.

The index of a run says which rows a step takes, as (batch, row of its file). This file brings their token
columns, and nothing else of the dataset is read: whole row groups, the last few of them kept decoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from data_tools.errors import DataError
from offline_rec.data.blocks import Blocks, Column, ListColumn, open_parquet
from offline_rec.data.ragged import IntArray, Ragged

if TYPE_CHECKING:
    from data_tools.store.dataset import StoredDataset
    from data_tools.store.sidecars import SidecarKind

__all__ = ["Ragged", "RowStore", "Rows", "ratio_temperature"]

CACHE_BYTES = 512 << 20
"""Room for the eight row groups, of at most 64 MiB each, among which training shuffles by default."""

FACTS = ["response_id", "temperature", "logprob_kind"]
IDS = ["prompt_ids", "response_ids", "loss_mask"]
LENGTHS = ["n_prompt_tokens", "n_tokens"]


@dataclass(frozen=True)
class Rows:
    """Responses with their prompts as ragged arrays; entry i of every field belongs to row i.

    `mask`, `behavior`, `anchor` and `reference` are as long as `response_ids`; a log-prob that is missing
    is NaN. `temperature` is the one at which ratios and gradients of the row are taken.
    """

    response_id: list[str]
    prompt_ids: Ragged
    response_ids: Ragged
    mask: Ragged
    behavior: Ragged
    anchor: Ragged | None
    reference: Ragged | None
    temperature: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.response_id)

    @property
    def lengths(self) -> IntArray:
        """Tokens of prompt and response together."""
        return self.prompt_ids.lengths + self.response_ids.lengths

    def select(self, index: NDArray[np.integer[Any]]) -> "Rows":
        """The rows named by `index`, in that order."""
        taken: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            taken[field.name] = value.take(index) if isinstance(value, Ragged) else value
        taken["response_id"] = [self.response_id[i] for i in index.tolist()]
        taken["temperature"] = self.temperature[index]
        return Rows(**taken)


def ratio_temperature(logprob_kind: NDArray[Any], temperature: NDArray[Any]) -> NDArray[np.float32]:
    """The temperature of a row's ratio: its own where logged log-probs are `processed`, else 1.

    `raw` log-probs equal those of the sampling policy only at temperature 1, `unknown` ones are read as
    raw, and temperature 0 has no ratio.
    """
    logged = temperature.astype(np.float32)  # None as NaN
    return np.where((logprob_kind == "processed") & (logged > 0), logged, np.float32(1))


class RowStore:
    """The rows of a dataset by (batch, row), with the sidecars that a run uses beside them.

    `tokens_key` names the sidecar of ids made from text, which serves rows without engine ids (under
    `retokenise` all rows, whose logged log-probs are then absent); `anchor_key` and `reference_key` name
    `logprobs` sidecars. A number for a file in `take` and `lengths` indexes `batches`, by default those of
    the dataset now. The row groups used last are kept decoded, within `cache_bytes`: at first
    `cache_blocks` of them (those of a window, and one for a group that lies across two), then as many as do.
    """

    def __init__(
        self,
        ds: "StoredDataset",
        *,
        tokens_key: str | None = None,
        anchor_key: str | None = None,
        reference_key: str | None = None,
        retokenise: bool = False,
        batches: Sequence[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
        cache_blocks: int | None = None,
    ) -> None:
        self.batches = list(ds.batches() if batches is None else batches)
        self.retokenise = retokenise
        self._code = {name: code for code, name in enumerate(self.batches)}
        room = cache_bytes, cache_blocks
        self._rollouts, self._rollout_lengths = (
            Blocks(lambda name: open_parquet(ds.rollout_path(name)), columns, *room)
            for columns in ([*FACTS, *IDS, "behavior_logprobs"], LENGTHS)
        )
        self._tokens = _Sidecar(ds, "tokens", tokens_key, IDS, room=room)
        self._token_lengths = _Sidecar(ds, "tokens", tokens_key, LENGTHS, room=room)
        self._anchor = _Sidecar(ds, "logprobs", anchor_key, ["logprobs"], room=room)
        self._reference = _Sidecar(ds, "logprobs", reference_key, ["logprobs"], room=room)

    def take(
        self, file: Sequence[str] | NDArray[Any], file_row: NDArray[np.integer[Any]], *, strict: bool = True
    ) -> Rows:
        """The rows (file[i], file_row[i]) in that order; `file` holds names of batches or numbers of them.

        Raises DataError if a row has no token ids; without `strict` such a row is empty.
        """
        codes, at = self._codes(file), np.asarray(file_row, np.int64)
        if not len(codes):
            return _no_rows(self._anchor.key is not None, self._reference.key is not None)
        logged = self._rollouts.gather(self.batches, codes, at)
        prompt, response, mask, behavior = self._ids(codes, at, logged)
        names = logged["response_id"].tolist()
        if strict:
            _demand(prompt.valid & response.valid, names)
        lengths = response.rows.lengths

        def scores(sidecar: _Sidecar) -> Ragged | None:
            if sidecar.key is None:
                return None
            column = sidecar.gather(self.batches, codes, at)["logprobs"]
            return _fit(column, lengths, np.nan, where=f"logprobs/{sidecar.key}", names=names)

        return Rows(
            response_id=names,
            prompt_ids=prompt.rows,
            response_ids=response.rows,
            mask=_fit(mask, lengths, 1, where="loss_mask", names=names),
            behavior=_fit(behavior, lengths, np.nan, where="behavior_logprobs", names=names),
            anchor=scores(self._anchor),
            reference=scores(self._reference),
            temperature=ratio_temperature(logged["logprob_kind"], logged["temperature"]),
        )

    def lengths(
        self, file: Sequence[str] | NDArray[Any], file_row: NDArray[np.integer[Any]]
    ) -> tuple[IntArray, IntArray]:
        """Tokens of prompt and of response, without reading any; -1 where a row has no ids."""
        codes, at = self._codes(file), np.asarray(file_row, np.int64)
        if not len(codes):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        logged = self._rollout_lengths.gather(self.batches, codes, at)
        made = self._token_lengths.gather(self.batches, codes, at) if self._tokens.key else None
        prompt, response = (_counts(logged[column]) for column in LENGTHS)
        if self.retokenise:
            prompt, response = np.full_like(prompt, -1), np.full_like(response, -1)
        if made is not None:
            prompt_made, response_made = (_counts(made[column]) for column in LENGTHS)
            prompt = np.where((prompt < 0) | (response < 0), prompt_made, prompt)
            response = np.where(response < 0, response_made, response)
        return prompt, response

    def close(self) -> None:
        """Hold neither files nor row groups; what is asked for later is opened and read anew."""
        sidecars = (self._tokens, self._token_lengths, self._anchor, self._reference)
        for blocks in (self._rollouts, self._rollout_lengths, *(s.blocks for s in sidecars if s.blocks)):
            blocks.close()

    def _codes(self, file: Sequence[str] | NDArray[Any]) -> IntArray:
        if isinstance(file, np.ndarray) and file.dtype.kind in "iu":
            return file.astype(np.int64)
        unknown = sorted({str(name) for name in file} - self._code.keys())
        if unknown:
            raise DataError(
                f"no batch {', '.join(unknown)} in the dataset", "the index belongs to another snapshot"
            )
        return np.array([self._code[str(name)] for name in file], np.int64)

    def _ids(self, codes: IntArray, at: IntArray, logged: dict[str, Any]) -> list[ListColumn]:
        """Prompt ids, response ids, loss mask and behaviour log-probs: the engine's, or made from text."""
        columns: list[ListColumn] = [logged[name] for name in (*IDS, "behavior_logprobs")]
        if self.retokenise:
            columns = [ListColumn.nulls(len(at), column.rows.values.dtype) for column in columns]
        prompt, response, mask, behavior = columns
        no_response = ~response.valid
        no_prompt = ~prompt.valid | no_response
        if self._tokens.key is not None and no_prompt.any():
            made = self._tokens.gather(self.batches, codes, at, no_prompt)
            prompt = prompt.replaced(made["prompt_ids"], no_prompt)
            response = response.replaced(made["response_ids"], no_response)
            mask = mask.replaced(made["loss_mask"], no_response)
        # Log-probs without the ids that they were computed for say nothing about ids made from the text.
        behavior = behavior.replaced(ListColumn.nulls(len(at), np.float32), no_response)
        return [prompt, response, mask, behavior]


class _Sidecar:
    """Columns of one sidecar of the dataset; rows of batches that it does not have yet are null."""

    def __init__(
        self,
        ds: "StoredDataset",
        kind: "SidecarKind",
        key: str | None,
        columns: list[str],
        *,
        room: tuple[int, int | None],
    ) -> None:
        self.key = key
        self._columns = columns
        self.blocks: Blocks | None = None
        if key is not None:
            sidecar = ds.sidecar(kind, key)
            self._missing = set(sidecar.missing())
            self.blocks = Blocks(lambda name: open_parquet(sidecar.path(name)), columns, *room)

    def gather(
        self, names: Sequence[str], codes: IntArray, at: IntArray, wanted: NDArray[np.bool_] | None = None
    ) -> dict[str, Any]:
        """The rows asked for; null where not `wanted`."""
        assert self.blocks is not None
        there = np.array([name not in self._missing for name in names], np.bool_)[codes]
        where = there if wanted is None else there & wanted
        if not where.any():
            return {column: _no_values(column, len(at)) for column in self._columns}
        found = self.blocks.gather(names, codes[where], at[where])
        return {column: _spread(values, where) for column, values in found.items()}


def _no_values(column: str, count: int) -> Column:
    if column in LENGTHS:
        return np.full(count, None)
    dtype = {"logprobs": np.float32, "loss_mask": np.uint8}.get(column, np.int32)
    return ListColumn.nulls(count, dtype)


def _spread(column: Column, where: NDArray[np.bool_]) -> Column:
    if isinstance(column, ListColumn):
        return column.spread(where)
    values = np.full(len(where), None)
    values[where] = column
    return values


def _counts(column: NDArray[Any]) -> IntArray:
    return np.array([-1 if count is None else count for count in column.tolist()], np.int64)


def _fit(column: ListColumn, lengths: IntArray, fill: float, *, where: str, names: list[str]) -> Ragged:
    """The column with its null rows filled, once each other row is as long as its response."""
    unlike = column.valid & (column.rows.lengths != lengths)
    if unlike.any():
        first = int(np.flatnonzero(unlike)[0])
        raise DataError(
            f"{where} has {column.rows.lengths[first]} values for the {lengths[first]} response tokens of "
            f"row {names[first]} ({int(unlike.sum())} such rows)",
            "it was made for other token ids: make it again for these",
        )
    if column.valid.all():
        return column.rows
    filled = ListColumn(Ragged.full(lengths, fill, column.rows.values.dtype), column.valid)
    return filled.replaced(column, column.valid).rows


def _demand(usable: NDArray[np.bool_], names: list[str]) -> None:
    if usable.all():
        return
    lacking = [names[i] for i in np.flatnonzero(~usable)[:5]]
    raise DataError(
        f"{int((~usable).sum())} of {len(names)} rows have no token ids: {', '.join(lacking)}",
        "make ids from their text first, or leave these rows out with a filter",
    )


def _no_rows(anchor: bool, reference: bool) -> Rows:
    ids, mask, floats = (Ragged.from_lists([], dtype) for dtype in (np.int32, np.uint8, np.float32))
    return Rows(
        response_id=[],
        prompt_ids=ids,
        response_ids=ids,
        mask=mask,
        behavior=floats,
        anchor=floats if anchor else None,
        reference=floats if reference else None,
        temperature=np.empty(0, np.float32),
    )
