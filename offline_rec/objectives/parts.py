"""What objectives are made of, as facts: the parameters, scope and needs of every part. No torch here.

The function behind a name stands under it in `keep`, `importance`, `regularisers` and `reductions`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

INFINITY = float("inf")
LARGE = 1e9
"""Upper end of parameters for which infinity has no meaning."""

Scope = Literal["token", "sequence", "group", "step"]
SCOPES: tuple[Scope, ...] = ("token", "sequence", "group", "step")
"""What must be seen at once to know a coefficient, from narrow to wide."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that parts share: its one default, the range (low, high] (or [low, high]) and its meaning."""

    default: float
    low: float
    high: float
    meaning: str
    low_included: bool = False

    def accepts(self, value: float) -> bool:
        """Whether the value lies in the range; NaN never does."""
        above = value >= self.low if self.low_included else value > self.low
        return above and value <= self.high

    @property
    def range(self) -> str:
        """The range as text, such as `(0, 1]`."""
        return f"{'[' if self.low_included else '('}{self.low:g}, {self.high:g}]"


PARAMETERS: Mapping[str, Parameter] = {
    "epsilon_low": Parameter(0.2, 0, 1, "ratios below 1 - epsilon_low leave the band"),
    "epsilon_high": Parameter(0.2, 0, INFINITY, "ratios above 1 + epsilon_high leave the band"),
    "outer_low": Parameter(0.6, 0, 1, "ring: A > 0 is kept again at a ratio of at most 1 - outer_low"),
    "outer_high": Parameter(
        2.0, 0, INFINITY, "ring: A < 0 is kept again at a ratio of at least 1 + outer_high"
    ),
    "log_clip_low": Parameter(0.4, 0, INFINITY, "log-ratios are clipped at -log_clip_low where A < 0"),
    "log_clip_high": Parameter(0.4, 0, INFINITY, "log-ratios are clipped at log_clip_high where A >= 0"),
    "budget": Parameter(
        0.04, 0, INFINITY, "mean squared log-ratio allowed over the harmful tokens of a step"
    ),
    "floor_low": Parameter(0.3, 0, 1, "ratios down to 1 - floor_low are always kept", low_included=True),
    "floor_high": Parameter(
        0.5, 0, INFINITY, "ratios up to 1 + floor_high are always kept", low_included=True
    ),
    "cap": Parameter(2.0, 0, INFINITY, "largest importance weight"),
    "positive_low": Parameter(1.0, 0, INFINITY, "lower bound of the weight where A > 0", low_included=True),
    "positive_high": Parameter(1.0, 0, INFINITY, "upper bound of the weight where A > 0", low_included=True),
    "negative_low": Parameter(0.0, 0, INFINITY, "lower bound of the weight where A <= 0", low_included=True),
    "negative_high": Parameter(1.0, 0, INFINITY, "upper bound of the weight where A <= 0", low_included=True),
    "tau_positive": Parameter(1.0, 0, LARGE, "sharpness of the gate where A > 0"),
    "tau_negative": Parameter(1.05, 0, LARGE, "sharpness of the gate where A <= 0"),
    "gamma": Parameter(0.1, 0, LARGE, "shape of p / (p + gamma) on expert rows"),
    "min_temperature": Parameter(0.8, 0, INFINITY, "lowest temperature T of the weights exp(A / T)"),
    "penalty": Parameter(0.1, 0, LARGE, "lambda of lambda * (log ratio)^2 per token", low_included=True),
    "tau": Parameter(0.1, 0, LARGE, "tau of tau/2 * (log ratio of the response)^2", low_included=True),
    "length": Parameter(3000, 0, LARGE, "constant length that divides a response's sum"),
    "kl_coef": Parameter(0.0, 0, LARGE, "beta of the KL term to the reference policy", low_included=True),
}


@dataclass(frozen=True, slots=True)
class Part:
    """What a part needs to be seen at once, what it needs of the data, and the parameters it takes."""

    scope: Scope = "token"
    needs: frozenset[str] = frozenset()
    parameters: tuple[str, ...] = ()


_RATIO = frozenset({"behavior_logprobs"})
_REFERENCE = frozenset({"reference"})
_BAND = ("epsilon_low", "epsilon_high")
_LOG_BAND = ("log_clip_low", "log_clip_high")
_TAPER = ("positive_low", "positive_high", "negative_low", "negative_high")

KEEP: Mapping[str, Part] = {
    "all": Part(),
    "one-side": Part(needs=_RATIO, parameters=_BAND),
    "two-side": Part(needs=_RATIO, parameters=_BAND),
    "ring": Part(needs=_RATIO, parameters=(*_BAND, "outer_low", "outer_high")),
    "sequence-one-side": Part("sequence", _RATIO, _BAND),
    "log-one-side": Part(needs=_RATIO, parameters=_LOG_BAND),
    "second-moment": Part("step", _RATIO, ("budget", "floor_low", "floor_high")),
}
IMPORTANCE: Mapping[str, Part] = {
    "one": Part(),
    "ratio": Part(needs=_RATIO),
    "truncated-ratio": Part(needs=_RATIO, parameters=("cap",)),
    "clipped-ratio": Part(needs=_RATIO, parameters=_BAND),
    "sequence-ratio": Part("sequence", _RATIO),
    "clipped-sequence-ratio": Part("sequence", _RATIO, _LOG_BAND),
    "tapered-response-ratio": Part("sequence", _RATIO, _TAPER),
    "soft-gate": Part(needs=_RATIO, parameters=("tau_positive", "tau_negative")),
    "probability": Part(),
    "expert-mixture": Part(needs=_RATIO | {"expert"}, parameters=("gamma",)),
    "negative-drift": Part("step", parameters=("min_temperature",)),
}
REGULARISER: Mapping[str, Part] = {
    "none": Part(),
    "token-squared": Part(needs=_RATIO, parameters=("penalty",)),
    "response-squared": Part("sequence", _RATIO, ("tau",)),
    "pairwise-squared": Part("group", _RATIO, ("tau",)),
    "reference-squared": Part("sequence", _REFERENCE, ("tau",)),
}
REDUCTION: Mapping[str, Part] = {
    "token-mean": Part(),
    "sequence-mean": Part(),
    "sequence-sum": Part(),
    "constant": Part(parameters=("length",)),
}
KL: Mapping[str, Part] = {
    "k2": Part(needs=_REFERENCE, parameters=("kl_coef",)),
    "k3": Part(needs=_REFERENCE, parameters=("kl_coef",)),
}

CATALOGUE: Mapping[str, Mapping[str, Part]] = {
    "keep": KEEP,
    "importance": IMPORTANCE,
    "regulariser": REGULARISER,
    "reduction": REDUCTION,
    "kl_kind": KL,
}
"""The choices of an objective: the name of the choice, then the parts it may take."""
