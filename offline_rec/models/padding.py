"""A micro-batch as rectangular tensors, pass by pass: the only place where padding exists."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_tools.errors import DataError
from offline_rec.data.passes import Pass, Sharing, plan_rows
from offline_rec.data.ragged import IntArray
from offline_rec.data.rows import Rows
from offline_rec.models.flex import Spans, block_mask


@dataclass(frozen=True)
class Sheet:
    """What a pass takes, padded on the right; see `offline_rec.data.passes.Pass`.

    ids, places (position ids): [rows, length]. Hidden states at `predicts`, indices into the flattened rows,
    predict the pass's targets. `follows` [rows]: rows of the parent. `attention` [rows, past + length] is 1
    on real tokens, None where causality alone keeps padding out of sight: it is behind all real tokens. Of a
    packed row it is a block mask.
    """

    ids: Tensor
    places: Tensor
    predicts: Tensor
    attention: Any = None
    keeps: bool = False
    parent: int | None = None
    follows: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """A micro-batch: its sheets, parents before children, and the response tokens that they predict.

    targets, temperature (None is 1 everywhere): [targets], row after row; `order` says which of the sheets'
    predicting states, sheet after sheet, is that of each target.
    """

    sheets: list[Sheet]
    order: Tensor
    targets: Tensor
    temperature: Tensor | None


def lay_out(rows: Rows, device: torch.device, sharing: Sharing, *, passes: int = 0) -> Layout:
    """Lay out the rows of a micro-batch in at least so many passes; what is missing computes nothing of use.

    Raises DataError if a response has no token before it that could predict its first one.
    """
    _demand_prompts(rows)
    return of_passes(rows, plan_rows(rows, sharing), device, passes=passes)


def of_passes(rows: Rows, planned: Sequence[Pass], device: torch.device, *, passes: int = 0) -> Layout:
    """Lay out the rows of a micro-batch as planned."""
    drawn = [_draw(rows, one) for one in planned]
    blank = np.zeros((1, 1), np.int64)
    nothing = {"ids": blank, "places": blank, "predicts": blank[0]}, np.zeros(0, np.int64)
    drawn += [nothing] * (passes - len(drawn))
    predicted = np.concatenate([*(tokens for _, tokens in drawn), np.zeros(0, np.int64)])
    order = np.empty(len(predicted), np.int64)
    order[predicted] = np.arange(len(predicted))
    temperature = None
    if np.any(rows.temperature != 1):
        temperature = _tensor(np.repeat(rows.temperature, rows.response_ids.lengths), device)
    return Layout(
        sheets=[_sheet(arrays, device) for arrays, _ in drawn],
        order=_tensor(order, device),
        targets=_tensor(rows.response_ids.values.astype(np.int64), device),
        temperature=temperature,
    )


def _draw(rows: Rows, one: Pass) -> tuple[dict[str, Any], IntArray]:
    """The arrays of a pass's sheet, and which response tokens of the micro-batch it predicts."""
    if one.packed is not None and one.place is not None:
        return _packed(rows, one, one.place)
    if one.opens is not None:
        return _prompts(rows, one)
    return _whole(rows, one) if one.parent is None else _responses(rows, one)


def _whole(rows: Rows, one: Pass) -> tuple[dict[str, Any], IntArray]:
    prompt, response = rows.prompt_ids.take(one.rows), rows.response_ids.take(one.rows)
    column = np.arange(one.length)
    in_prompt = column < prompt.lengths[:, None]
    in_response = ~in_prompt & (column < (prompt.lengths + response.lengths)[:, None])
    ids = np.zeros(in_prompt.shape, np.int64)
    ids[in_prompt] = prompt.values
    ids[in_response] = response.values
    arrays = {"ids": ids, "places": column[None], "predicts": np.flatnonzero(in_response) - 1}
    return arrays, _tokens(rows, one.rows, 0)


def _prompts(rows: Rows, one: Pass) -> tuple[dict[str, Any], IntArray]:
    prompt = rows.prompt_ids.take(one.rows)
    last = np.arange(len(prompt)) * one.length + prompt.lengths - 1
    arrays = {
        "ids": prompt.pad(one.length).astype(np.int64),
        "places": np.arange(one.length)[None],
        "predicts": last[one.place],
        "keeps": True,
    }
    return arrays, rows.response_ids.offsets[one.opens]


def _responses(rows: Rows, one: Pass) -> tuple[dict[str, Any], IntArray]:
    response, before = rows.response_ids.take(one.rows), rows.prompt_ids.lengths[one.rows]
    column = np.arange(one.length)
    computed = column < response.lengths[:, None] - 1
    arrays = {
        "ids": response.pad(one.length + 1)[:, :-1].astype(np.int64),
        "places": before[:, None] + column,
        "predicts": np.flatnonzero(computed),
        "parent": one.parent,
        "follows": one.place,
    }
    if before.min() < one.past:
        seen = np.arange(one.past + one.length)
        arrays["attention"] = ((seen < before[:, None]) | (seen >= one.past)).astype(np.int64)
    return arrays, _tokens(rows, one.rows, 1)


def _packed(rows: Rows, one: Pass, place: IntArray) -> tuple[dict[str, Any], IntArray]:
    heads = one.rows[np.unique(place, return_index=True)[1]]
    prompt, response = rows.prompt_ids.take(heads), rows.response_ids.take(one.rows)
    computed = len(prompt.values)
    opening = np.zeros(len(response.values), np.bool_)
    opening[response.offsets[:-1]] = True
    ids = np.zeros((1, one.length), np.int64)
    ids[0, :computed] = prompt.values
    ids[0, computed : one.real] = np.delete(response.values, response.offsets[1:] - 1)
    predicts = np.empty(len(response.values), np.int64)
    predicts[opening] = prompt.offsets[1:][place] - 1
    predicts[~opening] = np.arange(computed, one.real)
    spans = Spans.of(prompt.lengths, response.lengths - 1, place, one.length)
    arrays = {"ids": ids, "places": spans.places[None], "predicts": predicts, "attention": spans}
    return arrays, _tokens(rows, one.rows, 0)


def _tokens(rows: Rows, index: IntArray, skipped: int) -> IntArray:
    """Places of the response tokens of these rows in the micro-batch, without the first few of each."""
    offsets = rows.response_ids.offsets
    return np.concatenate(
        [np.arange(offsets[row] + skipped, offsets[row + 1]) for row in index.tolist()] or [index]
    )


def _sheet(arrays: dict[str, Any], device: torch.device) -> Sheet:
    fields: dict[str, Any] = {}
    for name, value in arrays.items():
        fields[name] = _tensor(value, device) if isinstance(value, np.ndarray) else value
    if isinstance(fields.get("attention"), Spans):
        fields["attention"] = block_mask(fields["attention"], device)
    return Sheet(**fields)


def unflatten(values: Tensor, lengths: NDArray[np.integer[Any]], width: int) -> Tensor:
    """[rows, width] with the values of each row on its left and 0 after them; gradients pass through."""
    empty = values.new_zeros(len(lengths) * width)
    return empty.scatter(0, places(lengths, width, values.device), values).view(len(lengths), width)


def places(lengths: NDArray[np.integer[Any]], width: int, device: torch.device) -> Tensor:
    """Where `unflatten` puts each value, as positions in the flattened [rows, width]."""
    return _tensor(np.flatnonzero(np.arange(width) < np.asarray(lengths)[:, None]), device)


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _demand_prompts(rows: Rows) -> None:
    bare = (rows.prompt_ids.lengths == 0) & (rows.response_ids.lengths > 0)
    if bare.any():
        first = [rows.response_id[i] for i in np.flatnonzero(bare)[:5]]
        raise DataError(
            f"{int(bare.sum())} rows have an empty prompt: {', '.join(first)}",
            "their first token has nothing to be predicted from; leave them out with a filter",
        )
