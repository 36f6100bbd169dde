"""Where a model's logits come from: its body, its output head, and what it does to their product.

Families scale logits (Cohere, Granite, HyperCLOVA X, Falcon H1) or cap them (Gemma) between head and
softmax, under config attributes that mean different things in different families. So no attribute is
trusted: each candidate is tried on a few tokens, and the one that gives the model's own logits is used.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offline_rec.models.logprobs import HALF, Head

MULTIPLIERS = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")
PROBE_TOKENS = 8


@dataclass(frozen=True)
class HeadRule:
    """What happens to `hidden @ head.T`: multiplied by `scale`, then capped."""

    scale: float
    softcap: float | None

    def head_of(self, model: Any) -> Head:
        """The output head of a model as it is now."""
        layer = model.get_output_embeddings()
        return Head(layer.weight, layer.bias, self.scale, self.softcap)


def body_of(model: Any) -> nn.Module:
    """The model without its output head: its first output is the last hidden states."""
    body: nn.Module = getattr(model, model.base_model_prefix)
    return body


@torch.no_grad()
def find_rule(model: Any) -> HeadRule | None:
    """The rule under which hidden states and head give the model's own logits; None if there is none."""
    # A subclass (quantised, or with an adapter) does more than multiply by its weight.
    if type(model.get_output_embeddings()) is not nn.Linear or not hasattr(model, model.base_model_prefix):
        return None
    ids = torch.arange(PROBE_TOKENS, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    own = model(input_ids=ids, use_cache=False).logits[0]
    hidden = body_of(model)(input_ids=ids, use_cache=False)[0][0]
    for rule in _candidates(model):
        if _equal(rule.head_of(model).logits(hidden), own):
            return rule
    return None


def _candidates(model: Any) -> Iterator[HeadRule]:
    config = model.config.get_text_config()
    numbers = [getattr(config, name, None) for name in MULTIPLIERS]
    scales = [number for number in numbers if isinstance(number, int | float) and number]
    softcap = getattr(config, "final_logit_softcapping", None)
    for cap in dict.fromkeys([softcap, None]):
        for scale in (*scales, *(1 / scale for scale in scales), 1.0):
            yield HeadRule(float(scale), cap)


def _equal(ours: Tensor, own: Tensor) -> bool:
    if ours.shape != own.shape:
        return False
    tolerance = 2e-2 if own.dtype in HALF else 1e-4
    return bool((ours - own).abs().max() <= tolerance * own.abs().max())
