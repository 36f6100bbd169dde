"""Tokens of a micro-batch where the configuration leaves them open: as few as cost little time.

On a GPU 16,384. On a CPU the largest power of two up to that whose activations (models/footprint.py) take no
more than what is there all the time: weights, gradients and the optimizer's state. A model for which that is
next to nothing may take 512 MiB, and no budget is below 1,024 tokens.

Rows of one prompt that do not fit together have it computed for each part. So there is room for an average
group, its prompt once, or for eight average prompts where that is less, so that little is computed twice.
"""

import torch

from offline_rec.config import MOST_TOKENS, FitConfig
from offline_rec.data.index import IndexCounts
from offline_rec.training.memory import estimate

LEAST = 1024
PROMPTS = 8
SMALL_BYTES = 512 << 20


def settled(
    config: FitConfig,
    device: torch.device,
    data: IndexCounts,
    *,
    ranks: int = 1,
    zero_stage: int = 0,
) -> FitConfig:
    """The configuration with a number for `tokens_per_micro_batch`; one that it has stays."""
    if config.tokens_per_micro_batch is not None:
        return config
    budget = MOST_TOKENS
    step = min(config.groups_per_step, data.groups) * data.largest_group
    if device.type == "cpu" and step > LEAST:
        budget = max(_of_memory(config, device, ranks, zero_stage), _power(_of_groups(data), up=True))
    return config.model_copy(update={"tokens_per_micro_batch": min(budget, MOST_TOKENS)})


def _of_memory(config: FitConfig, device: torch.device, ranks: int, zero_stage: int) -> int:
    """Tokens whose activations take as much as all that stays; the most where it cannot be told."""
    needs = estimate(config, device, tokens=LEAST, ranks=ranks, zero_stage=zero_stage)
    if needs is None or not needs.activations:
        return MOST_TOKENS
    room = max(needs.kept, SMALL_BYTES)
    return max(_power(min(LEAST * room // needs.activations, MOST_TOKENS)), LEAST)


def _of_groups(data: IndexCounts) -> int:
    """Tokens of an average group, its prompt once, or of several prompts."""
    prompt = (data.tokens - data.response_tokens) / data.rows
    return int(min(prompt + data.response_tokens / data.groups, PROMPTS * prompt))


def _power(tokens: int, *, up: bool = False) -> int:
    """The power of two next to a number."""
    return 1 << (max(tokens - 1, 0).bit_length() if up else max(tokens, 1).bit_length() - 1)
