"""Learn from logged responses: fit a policy with a regularised group-relative objective.

Every public name loads on first use, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offline_rec import rewards
    from offline_rec.cards.write import card
    from offline_rec.config import FitConfig
    from offline_rec.hub.push import push
    from offline_rec.looping.config import LoopConfig
    from offline_rec.looping.loop import loop
    from offline_rec.objectives.objective import objective
    from offline_rec.reporting.report import report
    from offline_rec.sampling.refresh import refresh
    from offline_rec.tracing.erasure import trace_erased
    from offline_rec.tracing.trace import trace
    from offline_rec.training.fit import fit

__all__ = [
    "FitConfig",
    "LoopConfig",
    "card",
    "fit",
    "loop",
    "objective",
    "push",
    "refresh",
    "report",
    "rewards",
    "trace",
    "trace_erased",
]

_HOMES = {
    "FitConfig": "offline_rec.config",
    "LoopConfig": "offline_rec.looping.config",
    "card": "offline_rec.cards.write",
    "fit": "offline_rec.training.fit",
    "loop": "offline_rec.looping.loop",
    "objective": "offline_rec.objectives.objective",
    "push": "offline_rec.hub.push",
    "refresh": "offline_rec.sampling.refresh",
    "report": "offline_rec.reporting.report",
    "rewards": "offline_rec.rewards",
    "trace": "offline_rec.tracing.trace",
    "trace_erased": "offline_rec.tracing.erasure",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_HOMES[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
