"""Learn from logged responses: fit a policy with a regularised group-relative objective.

`fit`, `FitConfig`, `objective` and `rewards` load on first use, so that importing the package costs nothing.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offline_rec import rewards
    from offline_rec.config import FitConfig
    from offline_rec.fit import fit
    from offline_rec.objectives.objective import objective

__all__ = ["FitConfig", "fit", "objective", "rewards"]

_HOMES = {
    "FitConfig": "offline_rec.config",
    "fit": "offline_rec.fit",
    "objective": "offline_rec.objectives.objective",
    "rewards": "offline_rec.rewards",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_HOMES[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Importing a submodule binds it to its name in the package, where `fit` has to stay the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            value = getattr(value, name, value)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
