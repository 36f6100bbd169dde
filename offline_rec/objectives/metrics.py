"""What an update looked like: sums that add over micro-batches and ranks, and the means made of them."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offline_rec.objectives import ratios
from offline_rec.objectives.signals import Signals

Metrics = dict[str, Tensor]
"""Names to scalar tensors. Every value is a plain sum: those of several micro-batches or ranks add."""


def measure(signals: Signals, kept: Tensor) -> Metrics:
    """The sums of one call: tokens kept by sign of the advantage, advantages, weights, and ratios.

    `kept`: [B, S] bool. Ratios are measured on the tokens whose behaviour log-prob is there.
    """
    mask, advantages, dtype = signals.mask, signals.advantages, signals.logprobs.dtype
    rows = signals.lengths > 0
    weights = signals.weights * rows
    kept = kept & mask
    positive, negative = mask & (advantages > 0), mask & (advantages < 0)
    counts = {
        "rows": rows,
        "tokens": mask,
        "kept": kept,
        "positive": positive,
        "negative": negative,
        "kept_positive": kept & positive,
        "kept_negative": kept & negative,
        "advantage": signals.row_mean(advantages),
        "kept_advantage": advantages * kept,
        "weight": weights,
        "weight_squared": weights.square(),
        "logprob": signals.logprobs,
    }
    return {name: values.to(dtype).sum() for name, values in {**counts, **_ratio_terms(signals)}.items()}


def _ratio_terms(signals: Signals) -> dict[str, Tensor]:
    """KL(mu || pi) estimates k1 = -log ratio, k3 = ratio - 1 - log ratio; moments of the ratios."""
    if signals.behavior is None:
        return {}
    known = signals.mask & torch.isfinite(signals.behavior)
    drift = torch.where(
        known, ratios.log_ratio(signals.logprobs, torch.where(known, signals.behavior, 0.0)), 0.0
    )
    ratio = ratios.exponential(drift) * known
    complete = (known == signals.mask).all(1) & (signals.lengths > 0)
    whole = ratios.exponential(drift.sum(1)) * complete
    return {
        "ratio_tokens": known,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "ratio_above_2": ratio > 2,
        "ratio_below_half": known & (ratio < 0.5),
        "log_ratio_squared": drift.square(),
        "k1": -drift,
        "k3": ratio - known.to(ratio.dtype) - drift,
        "ratio_rows": complete,
        "response_ratio": whole,
        "response_ratio_squared": whole.square(),
    }


def row_facts(signals: Signals, kept: Tensor) -> dict[str, Tensor]:
    """Per row, [B]: `mean_ratio` over tokens with a behaviour log-prob (NaN if none), and `kept_share`."""
    lengths = torch.where(signals.lengths > 0, signals.lengths, math.nan)
    share = (kept & signals.mask).sum(1) / lengths
    terms = _ratio_terms(signals)
    if not terms:
        return {"mean_ratio": torch.full_like(share, math.nan), "kept_share": share}
    known = terms["ratio_tokens"].sum(1)
    mean = terms["ratio"].sum(1) / torch.where(known > 0, known, math.nan)
    return {"mean_ratio": mean, "kept_share": share}


def add(parts: Sequence[Metrics]) -> Metrics:
    """The metrics of a step from those of its micro-batches; a sum that one of them lacks is 0 there."""
    total: Metrics = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total


_SHARES = {
    "kept_share": ("kept", "tokens"),
    "kept_share_positive": ("kept_positive", "positive"),
    "kept_share_negative": ("kept_negative", "negative"),
    "advantage_mean": ("advantage", "rows"),
    "kept_advantage_mean": ("kept_advantage", "kept"),
    "weight_mean": ("weight", "rows"),
    "logprob_mean": ("logprob", "tokens"),
    "known_ratio_share": ("ratio_tokens", "tokens"),
    "ratio_mean": ("ratio", "ratio_tokens"),
    "ratio_above_2_share": ("ratio_above_2", "ratio_tokens"),
    "ratio_below_half_share": ("ratio_below_half", "ratio_tokens"),
    "log_ratio_second_moment": ("log_ratio_squared", "ratio_tokens"),
    "kl_k1": ("k1", "ratio_tokens"),
    "kl_k3": ("k3", "ratio_tokens"),
}
_EFFECTIVE = {
    "ess_weight": ("weight", "weight_squared", "rows"),
    "ess_token": ("ratio", "ratio_squared", "ratio_tokens"),
    "ess_response": ("response_ratio", "response_ratio_squared", "ratio_rows"),
}


def finish(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Means and shares of a step's sums; a share of nothing is left out.

    `clip_share` = 1 - `kept_share`. `ess_*`: (sum w)^2 / (n sum w^2), an effective share in (0, 1]. `kl_k1`,
    `kl_k3`: estimates of KL(mu || pi) in nats per token. `loss` and `objective`, already divided by the
    global normalizer, are passed on as they are.
    """
    names = list(metrics)
    values = torch.stack([metrics[name] for name in names]).tolist()  # one transfer from the device
    sums: dict[str, float] = dict(zip(names, values, strict=True))
    done = {name: value for name, value in sums.items() if name in ("loss", "objective", "rows", "tokens")}
    for name, (part, whole) in _SHARES.items():
        if part in sums and sums.get(whole, 0) > 0:
            done[name] = sums[part] / sums[whole]
    for name, (first, second, count) in _EFFECTIVE.items():
        if sums.get(second, 0) > 0:
            done[name] = sums[first] ** 2 / (sums[second] * sums[count])
    if "kept_share" in done:
        done["clip_share"] = 1 - done["kept_share"]
    return done
