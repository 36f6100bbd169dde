"""Intervals by drawing prompts again: responses to one prompt are alike, so prompts are what counts.

All columns of one call see the same draws, and so a difference of two of their functions is paired.
"""

import numpy as np

from offline_rec.evidence.estimators import Floats
from offline_rec.sampling.evaluate import Interval

RESAMPLES = 2000
AT_A_TIME = 1 << 20
"""Draws that are held at once; beyond so many prompts, one resample is."""


def resampled_means(values: Floats, *, seed: int = 0, resamples: int = RESAMPLES) -> Floats:
    """Column means over rows that are drawn with replacement, [rows, columns] -> [resamples, columns]."""
    rng = np.random.default_rng(seed)
    rows = len(values)
    means = np.empty((resamples, values.shape[1]))
    together = max(1, AT_A_TIME // rows)
    for first in range(0, resamples, together):
        part = means[first : first + together]
        drawn = rng.integers(0, rows, (len(part), rows))
        drawn += np.arange(len(part))[:, None] * rows
        times = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        part[:] = times.astype(np.float64) @ values / rows
    return means


def interval(value: float, resampled: Floats, *, level: float = 0.95) -> Interval:
    """The value with its percentile interval; resamples that gave no number are left out."""
    there = resampled[np.isfinite(resampled)]
    if not len(there):
        return Interval(value, -np.inf, np.inf)
    low, high = np.quantile(there, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))
