"""An objective: a composition brought to life. `objective(name, **parameters)` is the way to get one.

    objective = offline_rec.objective("rec-oneside-nois", epsilon_low=0.6, epsilon_high=2.0)
    loss, metrics = objective(logprobs, behavior_logprobs, advantages, mask, weights)

With scope `token` or `sequence` every micro-batch may be called on its own, given the normalizer of the step.
With scope `group` or `step` a coefficient depends on rows of other micro-batches, so a step takes two phases:

    seen = [objective.signals(...) for each micro-batch, without gradient]
    terms = objective.terms(concatenate(seen))
    loss = objective.surrogate(terms.coefficients[its rows, :its length], logprobs, mask, normalizer)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offline_rec.algorithms import algorithm
from offline_rec.objectives import importance, keep, ratios, reductions, regularisers, scalars
from offline_rec.objectives import metrics as metric
from offline_rec.objectives.composition import Composition
from offline_rec.objectives.metrics import Metrics
from offline_rec.objectives.parts import Scope
from offline_rec.objectives.signals import Signals, signals


@dataclass(frozen=True, slots=True)
class Terms:
    """What a coefficient is made of, all [B, S] and detached.

    coefficients = reduction's factor * weight * (advantage * kept * importance - penalty), 0 where masked.
    """

    kept: Tensor
    importance: Tensor
    penalty: Tensor
    coefficients: Tensor


class Objective:
    """One gradient, sum_t c_t grad log pi(y_t) / normalizer, with c from a composition of parts."""

    def __init__(self, name: str, composition: Composition) -> None:
        self.name = name
        self.composition = composition
        self.scope: Scope = composition.scope
        self.needs: frozenset[str] = composition.needs
        self._keep = self._bind(keep.KEEP, "keep")
        self._importance = self._bind(importance.IMPORTANCE, "importance")
        self._reduction = reductions.REDUCTION[composition.reduction]
        self._penalties = [self._bind(regularisers.REGULARISER, "regulariser")]
        if composition.parameters["kl_coef"] > 0:
            self._penalties.append(self._bind(regularisers.KL, "kl_kind"))

    def __repr__(self) -> str:
        return f"Objective({self.name!r}, {self.composition!r})"

    def __call__(
        self,
        logprobs: Tensor,
        behavior_logprobs: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        weights: Tensor | None = None,
        *,
        reference_logprobs: Tensor | None = None,
        groups: Tensor | None = None,
        expert: Tensor | None = None,
        normalizer: Tensor | float | None = None,
    ) -> tuple[Tensor, Metrics]:
        """The surrogate loss, whose gradient is right, and sums that `metrics.finish` turns into means.

        `logprobs`, `behavior_logprobs`, `reference_logprobs`, `mask`: [B, S]; `advantages`: [B] or [B, S];
        `weights`, `groups`, `expert`: [B]. `normalizer`: the denominator of the whole step; default: that of
        this call. `DataError` names the rows whose log-probs are needed and missing (NaN), or whose advantage
        or weight is not finite.
        """
        seen = self.signals(
            logprobs,
            behavior_logprobs,
            advantages,
            mask,
            weights,
            reference_logprobs=reference_logprobs,
            groups=groups,
            expert=expert,
        )
        whole = self.normalizer(mask, weights) if normalizer is None else normalizer
        terms = self.terms(seen)
        loss = self.surrogate(terms.coefficients, logprobs, mask, whole)
        return loss, self.metrics(seen, terms, whole) | {"loss": loss.detach()}

    signals = staticmethod(signals)

    def terms(self, seen: Signals) -> Terms:
        """The parts of every coefficient; for scope `group` or `step`, `seen` holds the whole step."""
        return self._terms(seen, seen.lengths)

    def _terms(self, seen: Signals, lengths: Tensor) -> Terms:
        """`lengths`, [B]: those of the responses that the rows belong to."""
        with torch.no_grad():
            kept = self._keep(seen)
            weight = self._importance(seen, kept).expand_as(seen.logprobs)
            penalty = self._sum(self._penalties, seen)
            row = (self._reduction.factor(lengths) * seen.weights)[:, None]
            whole = row * (torch.where(kept, seen.advantages * weight, 0.0) - penalty)
            return Terms(kept, weight, penalty, torch.where(seen.mask, whole, 0.0))

    def token_gradient(
        self, seen: Signals, normalizer: Tensor | float, known: Tensor | None = None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """The gradient of `surrogate` with respect to log-probs, as a function of tokens and their log-probs.

        Tokens by position in the flattened [B, S]; [n] each. For scope `token`, where nothing else has to be
        known, so that the log-probs of `seen` are not read; for any scope with coefficients that are `known`,
        [B, S].
        """
        divisor = _positive(normalizer, seen.logprobs)
        if known is not None:
            fixed = (-known / divisor).flatten()
            return lambda positions, logprobs: fixed[positions]
        self.terms(seen)  # refuses missing log-probs by row, and before any work
        lengths = seen.lengths.repeat_interleave(seen.mask.shape[1])

        def gradient(positions: Tensor, logprobs: Tensor) -> Tensor:
            tokens = seen.of_tokens(positions, logprobs)
            return -self._terms(tokens, lengths[positions]).coefficients[:, 0] / divisor

        return gradient

    def coefficients(self, seen: Signals) -> Tensor:
        """c per token, [B, S], as `surrogate` takes it."""
        return self.terms(seen).coefficients

    def at_rest(self, advantages: Tensor, weights: Tensor) -> Tensor:
        """Rows that move nothing whatever their log-probs are, [B]; `advantages`, `weights`: [B]."""
        return (weights == 0) | ((advantages == 0) & (not self.composition.penalised))

    def normalizer(self, mask: Tensor, weights: Tensor | None = None) -> Tensor:
        """The denominator of these rows, a scalar; those of micro-batches and ranks add up to the step's.

        `mask`: [B, S]; `weights`: [B]. Rows of weight 0 and rows without a token are not counted.
        """
        counted = (mask != 0) if weights is None else (mask != 0) & (weights != 0)[:, None]
        lengths = counted.sum(1).to(torch.float64)
        return self._reduction.normalizer(lengths, self.composition.parameters.get("length", 1.0))

    def surrogate(
        self, coefficients: Tensor, logprobs: Tensor, mask: Tensor, normalizer: Tensor | float
    ) -> Tensor:
        """-sum(c * logprobs * mask) / normalizer: a scalar of the right gradient; 0 for an empty step."""
        current = torch.where(mask != 0, ratios.precise(logprobs), 0.0)
        return -(coefficients.detach() * current).sum() / _positive(normalizer, current)

    def metrics(self, seen: Signals, terms: Terms, normalizer: Tensor | float) -> Metrics:
        """Sums over these rows, with `objective`, the value of the scalar objective, where there is one."""
        with torch.no_grad():
            found = metric.measure(seen, terms.kept)
            value = self._value(seen)
            if value is not None:
                found["objective"] = value / _positive(normalizer, value)
            return found

    def _value(self, seen: Signals) -> Tensor | None:
        """The numerator of the scalar objective."""
        chosen = self.composition
        gain = scalars.GAIN.get((chosen.keep, chosen.importance))
        if gain is None:
            return None
        penalties = [self._bind(scalars.PENALTY, "regulariser")]
        if len(self._penalties) > 1:
            penalties.append(self._bind(scalars.PENALTY, "kl_kind"))
        per_token = self._with(gain, "keep", "importance")(seen) - self._sum(penalties, seen)
        row = (self._reduction.factor(seen.lengths) * seen.weights)[:, None]
        return seen.row_sum(row * per_token).sum()

    def _bind(self, functions: Mapping[str, Callable[..., Tensor]], choice: str) -> Callable[..., Tensor]:
        return self._with(functions[getattr(self.composition, choice)], choice)

    def _with(self, function: Callable[..., Tensor], *choices: str) -> Callable[..., Tensor]:
        names = {name for choice in choices for name in self.composition.part(choice).parameters}
        return partial(function, **{name: self.composition.parameters[name] for name in names})

    @staticmethod
    def _sum(functions: Sequence[Callable[..., Tensor]], seen: Signals) -> Tensor:
        return torch.stack([function(seen).expand_as(seen.logprobs) for function in functions]).sum(0)


def objective(name: str, **parameters: float | str) -> Objective:
    """The objective of an algorithm, with parameters or parts of it replaced.

    `objective("grpo", kl_coef=0.04)` adds a KL term to the reference, and
    `objective("red-weight", keep="one-side")` a keep-mask. `ConfigError` names an unknown algorithm, part or
    parameter.
    """
    return Objective(name, algorithm(name).composition.changed(**parameters))


def _positive(normalizer: Tensor | float, like: Tensor) -> Tensor:
    """A normalizer of 0 belongs to a step without tokens, whose sum is 0 too."""
    number = torch.as_tensor(normalizer, device=like.device).to(like.dtype)
    return torch.where(number > 0, number, 1.0)
