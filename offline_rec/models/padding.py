"""A micro-batch as rectangular tensors: the only place where padding exists."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_tools.errors import DataError
from offline_rec.data.rows import Rows


@dataclass(frozen=True)
class Padded:
    """Prompt and response of each row side by side, padded on the right.

    ids, attention: [batch, length], attention 1 on real tokens. The token at `targets[k]` is predicted at
    `positions[k]`, an index into the flattened batch; temperature: [targets], None is 1 everywhere.
    """

    ids: Tensor
    attention: Tensor
    positions: Tensor
    targets: Tensor
    temperature: Tensor | None


def pad_rows(rows: Rows, device: torch.device, pad_id: int = 0) -> Padded:
    """Lay out the rows of a micro-batch; targets are the response tokens, row after row.

    Raises DataError if a response has no token before it that could predict its first one.
    """
    prompt, response = rows.prompt_ids, rows.response_ids
    _demand_prompts(rows)
    total = rows.lengths
    column = np.arange(int(total.max(initial=1)))
    in_prompt = column < prompt.lengths[:, None]
    in_response = ~in_prompt & (column < total[:, None])
    ids = np.full(in_prompt.shape, pad_id, np.int64)
    ids[in_prompt] = prompt.values
    ids[in_response] = response.values
    temperature = None
    if np.any(rows.temperature != 1):
        temperature = _tensor(np.repeat(rows.temperature, response.lengths), device)
    return Padded(
        ids=_tensor(ids, device),
        attention=_tensor((in_prompt | in_response).astype(np.int64), device),
        positions=_tensor(np.flatnonzero(in_response) - 1, device),
        targets=_tensor(response.values.astype(np.int64), device),
        temperature=temperature,
    )


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
