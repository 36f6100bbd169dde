"""Log-probs under top-p and top-k: those of the distribution that was really sampled from.

A fit does not need them, so only a check computes them: they take whole logits, sorted.
"""

import numpy as np
import torch
from torch import Tensor

from offline_rec.data.packing import micro_batches
from offline_rec.data.ragged import Ragged, offsets_of
from offline_rec.data.rows import Rows
from offline_rec.models.padding import lay_out
from offline_rec.models.policy import Policy
from offline_rec.models.score import TOKEN_BUDGET
from offline_rec.sampling.hf_sampler import sampling_logprobs
from offline_rec.sampling.sampler import SamplingParams


@torch.no_grad()
def cut_logprobs(policy: Policy, rows: Rows, params: SamplingParams) -> tuple[Ragged, Ragged]:
    """Log-probs of the response tokens of all rows under `params`, in order, and whether each is outside.

    A token outside, which `params` would not have drawn, counts as the last one inside: where rounding
    moved it across the border, its log-prob is right, and none is infinite.
    """
    offsets = offsets_of(rows.response_ids.lengths)
    logprobs, outside = np.empty(offsets[-1], np.float32), np.empty(offsets[-1], np.bool_)
    for index in micro_batches(rows, TOKEN_BUDGET, policy.sharing):
        layout = lay_out(rows.select(index), policy.device, policy.sharing)
        places = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in index])
        done = 0
        for logits in policy.token_model.logits(layout):
            part = places[done : done + len(logits)]
            targets = layout.targets[done : done + len(logits)]
            logprobs[part], outside[part] = (found.cpu().numpy() for found in _cut(logits, targets, params))
            done += len(logits)
    return Ragged(logprobs, offsets), Ragged(outside, offsets)


def _cut(logits: Tensor, targets: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Log-probs [n] of targets, and which of them are outside."""
    whole = torch.log_softmax(logits.float() / params.temperature, -1)
    inside = sampling_logprobs(logits, params)
    # The most likely token is always inside: what it gained is the mass that was left out.
    best = whole.argmax(-1, keepdim=True)
    mass = (whole.gather(1, best) - inside.gather(1, best))[:, 0].exp()
    own, drawn = (values.gather(1, targets[:, None])[:, 0] for values in (whole, inside))
    outside = torch.isinf(drawn)
    return torch.where(outside, own - (mass + own.exp()).log(), drawn), outside
