"""Prompts that are computed once: their keys and values carried to the responses, and who can do that.

What the configuration of a model says about its attention is taken as a hint only: a few tokens are computed
both ways when a model is loaded, and it shares prompts if log-probs and gradients are the same.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offline_rec.data.passes import Costs, Pass, Sharing, distinct, packed_row, shared_prompts, whole_rows
from offline_rec.data.ragged import IntArray, Ragged
from offline_rec.data.rows import Rows
from offline_rec.models import flex
from offline_rec.models.logprobs import HALF
from offline_rec.models.padding import Layout, of_passes
from offline_rec.models.quiet import quiet

log = logging.getLogger(__name__)

WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
"""Configuration attributes that may bound how far back attention reaches."""

CPU_LAUNCH = 60.0
"""Tokens whose time a pass takes on a CPU beside its own: 17 to 98 were measured for widths of 32 to 1024."""

GPU_LAYER_LAUNCH = 1e11
"""Operations that a GPU could do while it waits for the launches of one layer, forward and backward."""

CARRIED, CARRIED_PER_ATTENTION = 0.01, 16
"""Time of handing the keys and values of a prompt token to one response: tokens, and tokens attended to."""

PROMPTS = ((0, 1, 2, 3, 4), (5, 6, 7))
RESPONSES = ((0, 8, 9, 10), (0, 11), (1, 12, 13), (1, 14, 15, 16, 17), (0, 18))
"""Rows of the probe: the number of the prompt, then the response."""
PROBED_PARAMETERS = 4
ROUNDINGS, COARSEST = 4, 1e-2
"""How far a probe may be off: times what rows computed apart are off by, and never more than this share."""
PROBED = Costs(launch=1e9)
"""Costs under which prompts of different lengths are in one pass."""


def new_past() -> Any:
    """An empty store of keys and values for the pass that computes prompts."""
    from transformers import DynamicCache

    return DynamicCache()


def carried(past: Any, follows: Tensor) -> Any:
    """The keys and values of prompts as the past of responses: row i is after prompt `follows[i]`."""
    cache, layer = _cache_types()
    return cache(layers=[layer(one.keys, one.values, follows) for one in past.layers])


@functools.cache
def _cache_types() -> tuple[Any, Any]:
    from transformers.cache_utils import Cache, DynamicLayer

    class Carried(DynamicLayer):  # type: ignore[misc]
        """Keys and values that gradients pass through; what comes after them is not kept.

        The past of each row is copied when its layer asks: one layer's copies exist at a time.
        """

        def __init__(self, keys: Tensor, values: Tensor, follows: Tensor) -> None:
            super().__init__()
            self.keys, self.values, self.is_initialized = keys, values, True
            self.follows = follows

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            """Past and present together."""
            pasts = _rows(self.keys, self.follows), _rows(self.values, self.follows)
            return torch.cat([pasts[0], keys], -2), torch.cat([pasts[1], values], -2)

    return Cache, Carried


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor; those of a single one are views."""
    if len(tensor) == 1:
        return tensor.expand(len(index), *tensor.shape[1:])
    return tensor.index_select(0, index)


def find_sharing(model: Any, logprobs: Callable[[Layout], Tensor]) -> Sharing:
    """What a model can do, by trying; `logprobs` computes a layout."""
    costs = costs_of(model)
    limit = _window(model)
    with quiet():
        reason = _difference(
            model, logprobs, lambda p, r, number: shared_prompts(p, r, number, np.arange(len(p)), PROBED)
        )
    if reason is not None:
        log.warning(
            "%s: each response is computed with its prompt, because %s; a prompt that several responses have"
            " is not computed once",
            *(type(model).__name__, f"carrying over its keys and values {reason}"),
        )
    return Sharing(costs, shares=reason is None, limit=limit)


def find_packing(model: Any, logprobs: Callable[[Layout], Tensor]) -> bool:
    """Whether a model computes packed rows, by trying; if so, it attends by `flex.attend` from then on."""
    reason = flex.take_packed_rows(model)
    if reason is None:
        with quiet():
            found = _difference(model, logprobs, lambda *rows: [packed_row(*rows)])
        if found is not None:
            reason = f"a packed row {found}"
            model.set_attn_implementation("sdpa")
    if reason is not None:
        log.warning(
            "%s: micro-batches are not computed as one packed row, because %s", type(model).__name__, reason
        )
    return reason is None


def beyond_window(sharing: Sharing, longest: int) -> str | None:
    """What to say where some rows, up to so many tokens, are longer than attention reaches back."""
    if not sharing.once or sharing.limit is None or longest <= sharing.limit:
        return None
    return (
        f"rows have up to {longest} tokens, and the model's attention window is {sharing.limit}: in"
        " micro-batches with rows beyond it each response is computed with its prompt (timing.shared in"
        " metrics.jsonl is the share of rows that are not)"
    )


def costs_of(model: Any) -> Costs:
    """Costs in tokens, from the sizes of the model and what hardware of its kind can do."""
    config = model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 1)
    embedded = {id(p) for p in model.get_input_embeddings().parameters()}
    head = model.get_output_embeddings()
    embedded |= {id(p) for p in head.parameters()} if head is not None else set()
    weights = max(sum(p.numel() for p in model.parameters() if id(p) not in embedded), 1)
    width = getattr(config, "hidden_size", 0)
    on_cpu = model.device.type == "cpu"
    attention = 2 * layers * width / weights
    return Costs(
        launch=CPU_LAUNCH if on_cpu else layers * GPU_LAYER_LAUNCH / (6 * weights),
        attention=attention,
        carried=CARRIED + CARRIED_PER_ATTENTION * attention,
    )


def _window(model: Any) -> int | None:
    """How far back attention may reach, where that is bounded."""
    config = model.config.get_text_config()
    found = [getattr(config, name, None) for name in WINDOWS]
    return min((size for size in found if isinstance(size, int) and size > 0), default=None)


def _difference(
    model: Any,
    logprobs: Callable[[Layout], Tensor],
    once: Callable[[IntArray, IntArray, IntArray], list[Pass]],
) -> str | None:
    """What computing prompts once does wrong with this model; None if it gives what whole rows give.

    `once` plans them: from the lengths of prompts and of responses, and the number of each row's prompt.
    """
    rows = _probe_rows(model)
    lengths = rows.prompt_ids.lengths, rows.response_ids.lengths
    number = np.arange(len(rows))
    plans = (
        whole_rows(*lengths, number, PROBED),
        whole_rows(*lengths, number, Costs()),
        once(*lengths, distinct(rows.prompt_ids)),
    )
    small = [p for p in model.parameters() if p.requires_grad and p.ndim == 1][:PROBED_PARAMETERS]
    try:
        found = [_measured(logprobs, of_passes(rows, one, model.device), small) for one in plans]
    except Exception as error:  # whatever the code of a model raises
        return f"fails ({type(error).__name__})"
    for whole, alone, shared in zip(*found, strict=True):
        scale = whole.abs().max()
        # Trained models may round coarsely: how much, the same rows tell that are computed apart.
        rounding = min(ROUNDINGS * float((whole - alone).abs().max() / scale), COARSEST)
        tolerance = max(2e-2 if model.dtype in HALF else 1e-4, rounding)
        if not bool((whole - shared).abs().max() <= tolerance * scale):
            return "does not give the same"
    return None


def _measured(logprobs: Callable[[Layout], Tensor], layout: Layout, small: list[Tensor]) -> list[Tensor]:
    """Log-probs, and the gradient of some parameters where there are any."""
    with torch.set_grad_enabled(bool(small)):
        values = logprobs(layout)
        gradients = torch.autograd.grad(values.sum(), small, allow_unused=True) if small else ()
    # In one vector: a bias that the softmax cancels has a gradient of nothing but rounding.
    flat = [g.flatten().float() for g in gradients if g is not None]
    return [values.detach(), *([torch.cat(flat)] if flat else [])]


def _probe_rows(model: Any) -> Rows:
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    prompts = [[i % vocabulary for i in PROMPTS[number]] for number, *_ in RESPONSES]
    responses = Ragged.from_lists([[i % vocabulary for i in ids] for _, *ids in RESPONSES], np.int32)
    nothing = Ragged.full(responses.lengths, 0, np.float32)
    return Rows(
        response_id=[str(i) for i in range(len(prompts))],
        prompt_ids=Ragged.from_lists(prompts, np.int32),
        response_ids=responses,
        mask=nothing,
        behavior=nothing,
        anchor=None,
        reference=None,
        temperature=np.ones(len(prompts), np.float32),
    )
