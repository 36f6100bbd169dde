"""The learning rate of each step."""

import math
from collections.abc import Callable, Mapping

SHAPES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
"""Factor of the peak by the share of the steps after the warm-up that are done."""


def learning_rate(step: int, *, peak: float, total: int, warmup: int, shape: str) -> float:
    """The rate of update `step`, 1 to `total`: rising linearly to the peak, then as the shape says.

    The first update after the warm-up has the whole peak; no update is spent on a rate of 0.
    """
    if step <= warmup:
        return peak * step / warmup
    return peak * SHAPES[shape]((step - warmup - 1) / max(total - warmup, 1))
