"""A micro-batch as one packed row, each prompt there once: FlexAttention skips what a token does not see.

A token of a prompt sees that prompt up to itself; a token of a response sees its prompt, and its response up
to itself. Nothing is padding but the end of the last block of tokens. For GPUs: on a CPU FlexAttention has no
backward pass, and a mask over one row costs half of what is gained.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offline_rec.data.passes import BLOCK
from offline_rec.data.ragged import IntArray, offsets_of

IMPLEMENTATION = "packed_rows"
"""The name under which transformers calls `attend`."""

Attention = Callable[..., Any]


@dataclass(frozen=True)
class Spans:
    """What a token q of a packed row sees: `own[q]` to itself, and its prompt, `first[q]` to `last[q] - 1`.

    What a token of a prompt sees is its own: its `first` and `last` are the same. [length] each.
    """

    own: NDArray[np.int32]
    first: NDArray[np.int32]
    last: NDArray[np.int32]

    @classmethod
    def of(cls, prompt: IntArray, response: IntArray, place: IntArray, length: int) -> "Spans":
        """Prompts of these lengths, then responses, response i to prompt `place[i]`, then filling."""
        # Each a span of its own, at position 0: a model has only so many positions.
        filling = np.ones(length - int(prompt.sum() + response.sum()), np.int64)
        lengths = np.concatenate([prompt, response, filling])
        offsets = offsets_of(lengths)
        start, stop = offsets[: len(prompt)], offsets[1 : len(prompt) + 1]
        first = np.concatenate([start, start[place], 0 * filling])
        last = np.concatenate([start, stop[place], 0 * filling])
        parts = (np.repeat(part, lengths).astype(np.int32) for part in (offsets[:-1], first, last))
        return cls(*parts)

    @property
    def places(self) -> IntArray:
        """Position ids: those of a response go on after its prompt."""
        return np.arange(len(self.own)) - self.own + self.last - self.first

    def blocks(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which blocks of tokens see something of which, and which see all of it: [queries, keys] twice.

        A run is what a span and a block of queries have in common: its last token sees all that any of it
        sees, its first token what all of it see.
        """
        starts = np.flatnonzero(
            (np.diff(self.own, prepend=-1) != 0) | (np.arange(len(self.own)) % BLOCK == 0)
        )
        ends = np.append(starts[1:], len(self.own))
        own, first, last = (part[starts].astype(np.int64) for part in (self.own, self.first, self.last))
        block = np.arange(len(self.own) // BLOCK) * BLOCK
        some = _common(own, ends, block) + _common(first, last, block) > 0
        every = _common(own, starts + 1, block) + _common(first, last, block) == BLOCK
        runs = np.flatnonzero(starts % BLOCK == 0)
        return np.logical_or.reduceat(some, runs), np.logical_and.reduceat(every, runs)


def _common(start: IntArray, stop: IntArray, block: IntArray) -> IntArray:
    """How many tokens ranges have in common with blocks: [ranges, blocks]."""
    common = np.minimum(stop[:, None], block + BLOCK) - np.maximum(start[:, None], block)
    return common.clip(0)


def block_mask(spans: Spans, device: torch.device) -> Any:
    """The `BlockMask` of a packed row, made without a look at all pairs of its tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    own, first, last = (torch.from_numpy(part).to(device) for part in (spans.own, spans.first, spans.last))

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        response = (own[query] <= key) & (key <= query)
        return response | ((first[query] <= key) & (key < last[query]))

    some, every = spans.blocks()
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every, device),
        *_listed(every, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(spans.own), len(spans.own)),
    )


def _listed(blocks: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks each one sees, and which, those first: [1, 1, queries], [1, 1, queries, keys]."""
    order = np.argsort(~blocks, axis=1, kind="stable")
    count, index = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (blocks.sum(1), order))
    return count[None, None], index[None, None]


@functools.cache
def kernel() -> Attention:
    """FlexAttention, compiled: plain, it would compute all pairs of tokens."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: a packed row by FlexAttention, any other by torch's own.

    query: [rows, heads, length, head size]. A cap on scores is left out, as torch's own attention leaves it
    out in transformers: a model is the same whichever way its rows are computed.
    """
    from torch.nn.attention.flex_attention import BlockMask
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not isinstance(attention_mask, BlockMask):
        usual: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return usual
    for name in ("s_aux", "position_bias"):
        if options.get(name) is not None:
            raise NotImplementedError(f"attention with {name} is not computed in packed rows")
    result: Tensor = kernel()(
        query,
        key,
        value,
        block_mask=attention_mask,
        scale=options.get("scaling"),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return result.transpose(1, 2).contiguous(), None


def take_packed_rows(model: Any) -> str | None:
    """Let a model attend by `attend`; why it cannot, if it cannot."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    if model.config.get_text_config()._attn_implementation not in ("sdpa", IMPLEMENTATION):
        return "it does not attend by torch's own attention"
    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(IMPLEMENTATION)
    return None
