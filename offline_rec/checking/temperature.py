"""Which temperature explains logged log-probs, and what the logged settings are worth beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from data_tools.checking import Rule
from offline_rec.checking.rules import OTHER_POLICY, PROCESSED, RAW, TEMPERATURE

AGREES = 0.1
"""Mean difference, in nats a token, up to which log-probs are of one policy: half precision gives 0.05."""

CLEARLY = 0.02
"""Two temperatures are told apart if one is at least twice as good, and by this much."""

GRID = tuple(float(t) for t in np.geomspace(0.2, 2.5, 9))
NARROWINGS = 10
"""Golden sections of a bracket of the grid: half a per cent is left of it."""

FLAT = 0.002
"""A temperature is not told where one a quarter away explains as well, in nats a token."""

Gap = Callable[[float, bool], float]
"""Mean absolute difference between logged log-probs and the model's at a temperature, cut or not."""


@dataclass(frozen=True)
class Setting:
    """What rows say about how they were sampled."""

    policy: str | None
    version: int | None
    kind: str
    temperature: float | None
    top_p: float | None = None
    top_k: int | None = None

    @property
    def cut(self) -> bool:
        """Whether top-p or top-k left tokens out."""
        return (self.top_p is not None and self.top_p < 1) or (self.top_k or 0) > 0

    @property
    def own_cut(self) -> bool:
        """Whether the logged log-probs are said to know of it."""
        return self.cut and self.kind == "processed"

    @property
    def cut_said(self) -> str:
        """The cut for a reader, empty if there is none."""
        parts = [f", top-p {self.top_p:g}"] if self.top_p is not None and self.top_p < 1 else []
        return "".join([*parts, f", top-k {self.top_k}" if (self.top_k or 0) > 0 else ""])

    @property
    def logged(self) -> float:
        """The logged temperature; 1 where there is none that could be, as in a fit."""
        return self.temperature if self.temperature is not None and self.temperature > 0 else 1.0

    @property
    def own(self) -> float:
        """The temperature at which a fit takes ratios of these rows."""
        return self.logged if self.kind == "processed" else 1.0


@dataclass(frozen=True)
class Explanation:
    """The temperature that explains best (None: they all do as well) with its gap, and what is wrong."""

    temperature: float | None
    gap: float
    gap_own: float
    rule: Rule | None

    def detail(self, setting: Setting) -> str:
        """The numbers, for a reader."""
        told = f"mean difference {self.gap_own:.3f} nats a token at temperature {setting.own:g}"
        best = self.temperature is not None and f", {self.gap:.3f} at {self.temperature:.2f}"
        said = "none" if setting.temperature is None else f"{setting.temperature:g}"
        who = f"policy {setting.policy!r} version {setting.version}"
        return f"{who} ({setting.kind}, logged temperature {said}{setting.cut_said}): {told}{best or ''}"


def explain(setting: Setting, gap: Gap) -> Explanation:
    """The best temperature for rows of one setting, and the rule that they break, if any."""
    gap = lru_cache(maxsize=None)(gap)

    def own(temperature: float) -> float:
        return gap(temperature, setting.own_cut)

    best = implied_temperature(own)
    flat = min(own(best * 1.25), own(best / 1.25)) - own(best) < FLAT
    rule = _broken(setting, gap, best)
    return Explanation(None if flat else best, own(best), own(setting.own), rule)


def implied_temperature(gap: Callable[[float], float]) -> float:
    """The temperature of the smallest gap: the best of a grid, narrowed by golden sections."""
    at = int(np.argmin([gap(t) for t in GRID]))
    low, high = np.log([GRID[max(at - 1, 0)], GRID[min(at + 1, len(GRID) - 1)]])
    section = (np.sqrt(5) - 1) / 2
    for _ in range(NARROWINGS):
        left, right = high - section * (high - low), low + section * (high - low)
        if gap(float(np.exp(left))) < gap(float(np.exp(right))):
            high = right
        else:
            low = left
    return float(np.exp((low + high) / 2))


def _broken(setting: Setting, gap: Gap, best: float) -> Rule | None:
    own, logged = gap(setting.own, setting.own_cut), setting.logged
    if logged != 1 or setting.cut:
        if setting.kind == "processed" and _explains(gap(1.0, False), own):
            return RAW
        if setting.kind != "processed" and _explains(gap(logged, setting.cut), own):
            return PROCESSED
    if _explains(gap(best, setting.own_cut), own):
        return TEMPERATURE
    return OTHER_POLICY if own > AGREES else None


def _explains(gap: float, worse: float) -> bool:
    return gap <= AGREES and worse > 2 * gap + CLEARLY
