"""What samples should be: log-probs by a plain forward pass, and all responses with their probabilities."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from offline_rec.sampling.sampler import Sample, SamplingParams


def by_plain_forward(model: Any, sample: Sample, params: SamplingParams) -> list[float]:
    """Log-probs from one forward pass without padding or cache, truncated by plain Python."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].double()
    return [
        math.log(distribution(row.tolist(), params)[token])
        for row, token in zip(logits, sample.response_ids, strict=True)
    ]


def distribution(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Softmax at the temperature, the k most likely, then the fewest that hold top_p, made to sum to 1."""
    weights = {i: math.exp((x - max(logits)) / params.temperature) for i, x in enumerate(logits)}
    ranked = sorted(weights, key=lambda i: -weights[i])[: params.top_k or None]
    total, held, kept = sum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        if held >= params.top_p * total:
            break
        kept.append(i)
        held += weights[i]
    return {i: weights[i] / held for i in kept}


def assert_drawn_from(model: Any, samples: Sequence[Sample], params: SamplingParams) -> None:
    """Chi-square of the counts of whole responses to one prompt against their probabilities."""
    n = len(samples)
    seen = Counter(tuple(s.response_ids) for s in samples)
    prompt, ends = samples[0].prompt_ids, 3
    expected = {ids: n * p for ids, p in responses(model, prompt, params, ends).items()}
    assert seen.keys() <= expected.keys()
    assert sum(expected.values()) == pytest.approx(n)
    rare = {ids for ids, count in expected.items() if count < 5}
    cells = [(seen[ids], count) for ids, count in expected.items() if ids not in rare]
    if rare:
        cells.append((sum(seen[ids] for ids in rare), sum(expected[ids] for ids in rare)))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    # The 99.9 % point of chi-square by the approximation of Wilson and Hilferty.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    # A distribution that is wrong by a third of its temperature is told apart.
    wrong = responses(model, prompt, replace(params, temperature=params.temperature * 1.3), ends)
    assert sum((seen[ids] - n * wrong[ids]) ** 2 / (n * wrong[ids]) for ids in expected) > 3 * freedom


def responses(
    model: Any, prompt: list[int], params: SamplingParams, ends: int
) -> dict[tuple[int, ...], float]:
    """Every response that can be drawn, with its probability."""
    found: dict[tuple[int, ...], float] = {}
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    while growing:
        ids, probability = growing.popitem()
        if len(ids) == params.max_tokens or ids[-1:] == (ends,):
            found[ids] = probability
            continue
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, -1].double().tolist()
        for token, share in distribution(logits, params).items():
            growing[(*ids, token)] = probability * share
    return found
