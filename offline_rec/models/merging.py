"""A model's weights under their plain names, adapters merged in or left away, without touching the model."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

INSIDE = ".base_layer."
"""Where peft puts a layer that it wrapped; its own matrices lie beside it, under names with MATRIX."""

MATRIX = ".lora_"
NAME = "default"
"""peft's name of the adapter in use."""


def has_adapter(model: nn.Module) -> bool:
    """Whether peft has put matrices into a model."""
    return any(hasattr(module, "lora_A") and hasattr(module, "base_layer") for module in model.modules())


@torch.no_grad()
def plain_weights(
    model: nn.Module, named: Iterable[tuple[str, Tensor]], *, merged: bool
) -> Iterator[tuple[str, Tensor]]:
    """Some of a model's named weights as those of a model without adapters, one at a time.

    `merged` adds what each adapter adds to its layer's weight, rounded to that weight's type. A quantised
    weight can hold no such sum: it comes as it is, and its adapter's matrices, unless zero, come too.
    """
    adapted = has_adapter(model)
    for name, tensor in named:
        owner, inside, rest = name.rpartition(INSIDE)
        if not adapted:
            yield name, tensor.detach()
        elif inside:
            layer: Any = model.get_submodule(owner)
            delta = layer.get_delta_weight(NAME) if merged and rest == "weight" else None
            sums = delta is not None and tensor.is_floating_point() and bool(delta.any())
            yield f"{owner}.{rest}", _sum(tensor, delta) if delta is not None and sums else tensor.detach()
        elif MATRIX not in name or (merged and _on_quantised(model, name)):
            yield name, tensor.detach()


def _sum(weight: Tensor, delta: Tensor) -> Tensor:
    precise = torch.promote_types(weight.dtype, torch.float32)
    return (weight.detach().to(precise) + delta.to(weight.device, precise)).to(weight.dtype)


def _on_quantised(model: nn.Module, name: str) -> bool:
    """Whether a matrix lies beside a quantised weight, and adds anything to it."""
    layer: Any = model.get_submodule(name.partition(MATRIX)[0])
    return not layer.base_layer.weight.is_floating_point() and bool(layer.lora_B[NAME].weight.any())
