"""Were these responses drawn from the weights that they are said to be from? A plain forward pass tells.

An engine that was told to load new weights may answer with the old ones, or with a mixture of both.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_tools.errors import DataError
from offline_rec.data.fingerprint import fingerprint
from offline_rec.models.loading import choose_device, choose_dtype, load_model, load_tokenizer
from offline_rec.models.policy import without_noise
from offline_rec.models.saving import weights_fingerprint
from offline_rec.sampling.hf_sampler import sampling_logprobs
from offline_rec.sampling.sampler import Sample, SamplingParams

COUNT = 8
"""Responses that are scored again."""

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
COARSE = 0.05
"""Mean difference of a token's log-prob, in nats, that rounding explains; COARSE in half precision."""


class OtherWeights(DataError):
    """Responses are not from the weights that they are said to be from."""


@dataclass(frozen=True)
class Verification:
    """What was compared, and how far the log-probs were apart; `weights` is their fingerprint."""

    responses: int
    tokens: int
    mean_difference: float
    largest_difference: float
    weights: str
    tokenizer: str

    def to_dict(self) -> dict[str, Any]:
        """Numbers and text."""
        return asdict(self)


def verify_samples(
    model: str | Path,
    samples: Sequence[Sample],
    params: SamplingParams,
    *,
    count: int = COUNT,
    tolerance: float | None = None,
) -> Verification:
    """Score some of the samples by a forward pass of the model; OtherWeights unless they are from it.

    A difference counts for at most 1: a token at the edge of top-p, in for one and out for the other, is no
    proof of other weights.
    """
    device = choose_device()
    # Not a `Policy`: plain passes need nothing of what that finds out about a model by trying.
    loaded = load_model(model, device=device, dtype=choose_dtype("auto", device))
    without_noise(loaded)
    limit = TOLERANCE.get(loaded.dtype, COARSE) if tolerance is None else tolerance
    if not samples:
        raise DataError("there are no responses to verify")
    places = np.unique(np.linspace(0, len(samples) - 1, count).round().astype(int))
    differences = np.concatenate([_differences(loaded, samples[place], params) for place in places])
    mean = float(np.minimum(differences, 1.0).mean())
    if not mean <= limit:
        raise OtherWeights(
            f"the responses are not from the weights in {model}: log-probs of {len(differences)} tokens "
            f"differ by {mean:.3g} on average, {limit:g} is allowed",
            "start the engine anew with that model; nothing was added",
        )
    return Verification(
        responses=len(places),
        tokens=len(differences),
        mean_difference=mean,
        largest_difference=float(differences.max()),
        weights=weights_fingerprint(loaded),
        tokenizer=fingerprint(load_tokenizer(model)),
    )


@torch.inference_mode()
def _differences(model: Any, sample: Sample, params: SamplingParams) -> NDArray[np.float64]:
    """How far each token's log-prob is from that of a forward pass, in nats."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]], device=model.device)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    if int(ids.max()) >= vocabulary:
        raise OtherWeights(
            f"the engine gave token {int(ids.max())}, the model has {vocabulary}",
            "the engine serves a model with another tokenizer",
        )
    logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    logprobs = sampling_logprobs(logits, params).gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0]
    found: NDArray[np.float64] = np.abs(logprobs.double().cpu().numpy() - np.asarray(sample.logprobs))
    return np.where(np.isnan(found), np.inf, found)
