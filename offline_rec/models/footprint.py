"""What a model takes in memory, told from its configuration alone: no weight is read, no number computed.

The model is built from fake tensors, which have shapes and no content, and one forward pass over them counts
what autograd would keep for the backward pass. So there is no formula a family of models could depart from.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from data_tools.errors import DataError
from offline_rec.models.adapters import Adapter, LoraSettings, base_of, is_adapter
from offline_rec.models.heads import body_of
from offline_rec.models.loading import attend_as_configured
from offline_rec.models.policy import without_noise
from offline_rec.models.quiet import quiet

QUANTISED_BYTES = {"4bit": (4 + 8 / 64 + 32 / (64 * 256)) / 8, "8bit": 1.0}
"""Bytes of a rounded weight: NF4 with its doubly rounded scales (arXiv 2305.14314), or LLM.int8."""


@dataclass(frozen=True)
class Footprint:
    """Bytes and counts of a model; `activations` of one pass over [batch, length] tokens, None if unknown.

    `weights`: all parameters and buffers as they lie in memory. `trained`: parameters that an optimizer
    updates, of which `trained_half` in half precision; `largest` is the largest of them. `layer` of the
    activations are those of one layer, roughly.
    """

    parameters: int
    weights: int
    trained: int
    trained_half: int
    largest: int
    vocabulary: int
    width: int
    head_is_trained: bool
    activations: int | None
    layer: int


def footprint(
    directory: str | Path,
    *,
    dtype: torch.dtype,
    shape: tuple[int, int],
    lora: LoraSettings | None = None,
    quantise: str | None = None,
    gradient_checkpointing: bool = False,
) -> Footprint | None:
    """The footprint of a model directory when it is trained on micro-batches of `shape`.

    None where the configuration is not enough to tell; loading the model says what is wrong with it.
    """
    path = base_of(directory) if is_adapter(directory) else Path(directory)
    try:
        described = (path / "config.json").read_bytes()
    except OSError:
        return None
    return _footprint(
        path,
        described,
        dtype,
        shape,
        lora=lora,
        quantise=quantise,
        gradient_checkpointing=gradient_checkpointing,
    )


@lru_cache(maxsize=16)
def _footprint(
    path: Path,
    described: bytes,
    dtype: torch.dtype,
    shape: tuple[int, int],
    *,
    lora: LoraSettings | None,
    quantise: str | None,
    gradient_checkpointing: bool,
) -> Footprint | None:
    """The same of a configuration with this content, told once: the fits of a loop ask for it again."""
    try:
        model = _skeleton(path, dtype)
    except Exception:
        return None
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    weights = _weights(model, quantise)
    if lora is not None:
        Adapter(model, lora)
    without_noise(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    activations, layer = _activations(model, shape, recompute=gradient_checkpointing)
    return Footprint(
        parameters=sum(p.numel() for p in model.parameters()),
        weights=weights + (0 if lora is None else sum(map(_bytes, trained))),
        trained=sum(p.numel() for p in trained),
        trained_half=sum(p.numel() for p in trained if p.element_size() < 4),
        largest=max((p.numel() for p in trained), default=0),
        vocabulary=embeddings.weight.shape[0],
        width=embeddings.weight.shape[1],
        head_is_trained=head is not None and head.weight.requires_grad,
        activations=activations,
        layer=layer,
    )


def context_of(directory: str | Path) -> int | None:
    """Longest sequence that a model directory says it was made for, None if it names none."""
    path = base_of(directory) if is_adapter(directory) else Path(directory)
    with quiet():
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path / 'config.json'} does not load: {error}", "name a model directory"
            ) from error
    context: int | None = getattr(config, "max_position_embeddings", None)
    return context


def _skeleton(path: Path, dtype: torch.dtype) -> Any:
    """The model without weights."""
    with quiet(), torch.device("meta"):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    attend_as_configured(model)
    return model


def _weights(model: Any, quantise: str | None) -> int:
    """Bytes of parameters and buffers; those of linear layers but the head rounded, if asked."""
    head, size = model.get_output_embeddings(), 0.0
    rounded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and m is not head}
    for tensor in (*model.parameters(), *model.buffers()):
        rounds = quantise is not None and id(tensor) in rounded
        size += tensor.numel() * QUANTISED_BYTES[quantise] if quantise and rounds else _bytes(tensor)
    return int(size)


def _activations(model: Any, shape: tuple[int, int], *, recompute: bool) -> tuple[int | None, int]:
    """Bytes that one pass keeps, and those of one layer.

    Recomputing keeps the input of each layer, and all of one layer at a time.
    """
    if not shape[0] * shape[1]:
        return 0, 0
    layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 1)) or 1
    try:
        _make_fake(model, mode := FakeTensorMode())
        kept = _kept(model, shape, mode)
        layer = kept // layers
        if not recompute:
            return kept, layer
        # Inside a recomputed layer its own hooks see the tensors, so that what is counted lies outside.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        outside = _kept(model, shape, mode)
    except Exception:  # whatever a model's own code does with fake tensors: no estimate is no failure
        return None, 0
    inputs = layers * shape[0] * shape[1] * model.get_input_embeddings().weight.shape[1]
    return outside + inputs * model.dtype.itemsize + layer, layer


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Put fake tensors of a CPU in place of a model's own; tied ones stay tied."""
    made: dict[int, Any] = {}
    stores = [store for module in model.modules() for store in (module._parameters, module._buffers)]
    for store, name in [(each, name) for each in stores for name in each]:
        tensor = store[name]
        if tensor is not None:
            made.setdefault(id(tensor), _fake(tensor, mode))
            store[name] = made[id(tensor)]


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _kept(model: Any, shape: tuple[int, int], mode: FakeTensorMode) -> int:
    """Bytes of the distinct storages that autograd keeps of a pass, the parameters not counted."""
    own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    seen: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage  # held, or its address would be used again
        return tensor

    model.train()
    with mode, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.zeros(shape, dtype=torch.long)
        states = body_of(model)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)[0]
        states.flatten(0, 1)[torch.arange(ids.numel())].sum()
    # The head keeps the states that it is given.
    return sum(int(storage.nbytes()) for storage in seen.values()) + _bytes(states)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
