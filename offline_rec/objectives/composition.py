"""An objective as plain data: which part stands where, and the numbers that are not defaults. No torch."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real

from data_tools.errors import ConfigError
from offline_rec.objectives.parts import CATALOGUE, PARAMETERS, SCOPES, Part, Scope


@dataclass(frozen=True, slots=True)
class Composition:
    """c = weight * (advantage * keep * importance - regulariser' - kl'), summed over tokens by the reduction.

    `changes` holds parameters whose value is not the default of `PARAMETERS`. A KL term of coefficient 0 is
    absent.
    """

    keep: str = "all"
    importance: str = "one"
    regulariser: str = "none"
    reduction: str = "token-mean"
    kl_kind: str = "k3"
    changes: Mapping[str, float] = field(default_factory=dict)

    def part(self, choice: str) -> Part:
        """The facts of the part that stands at a choice such as `keep`."""
        return CATALOGUE[choice][getattr(self, choice)]

    @property
    def parameters(self) -> dict[str, float]:
        """Every parameter of the parts in use, resolved."""
        names = [name for choice in CATALOGUE for name in self.part(choice).parameters]
        return {name: self.changes.get(name, PARAMETERS[name].default) for name in dict.fromkeys(names)}

    @property
    def scope(self) -> Scope:
        """The widest scope of the parts in use."""
        return max((part.scope for part in self._active()), key=SCOPES.index)

    @property
    def needs(self) -> frozenset[str]:
        """What the parts in use need besides log-probs, advantages and mask."""
        return frozenset().union(*(part.needs for part in self._active()))

    @property
    def penalised(self) -> bool:
        """Whether a penalty acts on tokens whatever their advantage."""
        return self.regulariser != "none" or self.parameters["kl_coef"] > 0

    def changed(self, **given: float | str) -> "Composition":
        """The same with other parts or numbers; `ConfigError` names what is unknown or out of range."""
        choices = {key: _choice(key, value) for key, value in given.items() if key in CATALOGUE}
        other = replace(self, **choices)  # type: ignore[arg-type]  # the choices are the text fields
        known = [*CATALOGUE, *other.parameters]
        numbers = {key: _number(key, value, known) for key, value in given.items() if key not in CATALOGUE}
        kept = {key: value for key, value in self.changes.items() if key in other.parameters}
        return replace(other, changes={**kept, **numbers})

    def _active(self) -> Iterable[Part]:
        for choice in CATALOGUE:
            if choice != "kl_kind" or self.parameters["kl_coef"] > 0:
                yield self.part(choice)


def _choice(key: str, value: float | str) -> str:
    if str(value) not in CATALOGUE[key]:
        raise ConfigError(f"{key} {value!r} is unknown", nearest(str(value), CATALOGUE[key]))
    return str(value)


def _number(key: str, value: float | str, known: Iterable[str]) -> float:
    if key not in known:
        raise ConfigError(f"the objective has no parameter {key!r}", nearest(key, known))
    parameter = PARAMETERS[key]
    if isinstance(value, bool) or not isinstance(value, Real) or not parameter.accepts(value):
        raise ConfigError(
            f"{key} must be a number in {parameter.range}, got {value!r}", f"{key}: {parameter.meaning}"
        )
    return float(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names the nearest known name, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
