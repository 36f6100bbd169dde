"""The boundary between the fit loop and whatever computes gradients.

The loop never asks how many processes there are or where the optimizer's state lies; it sums over ranks,
gathers and steps through an `Engine`. `engines/` holds them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offline_rec.config import FitConfig


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and the clipping of its gradient; the learning rate comes with each step."""

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0

    @classmethod
    def of(cls, config: FitConfig) -> "OptimizerSettings":
        """The settings that a configuration holds."""
        return cls(config.betas, config.weight_decay, config.max_grad_norm)


class Engine(Protocol):
    """What the fit loop needs of the machinery that trains.

    Every method but the properties is called by all ranks together, in the same order.
    """

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""

    @property
    def rank(self) -> int:
        """Number of this process, 0 to world_size - 1."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    def prepare(self, model: nn.Module, settings: OptimizerSettings) -> nn.Module:
        """Take charge of a model's parameters; returns the module that forward passes go through."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a scalar: micro-batches and ranks make one sum, never averaged."""

    def step(self, lr: float) -> float:
        """Clip, update and clear the gradient; returns its norm before clipping.

        A gradient that is not finite is cleared without an update, and its norm returned as it is.
        """

    def zero(self) -> None:
        """Clear the gradient."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over ranks, the same on every rank."""

    def gather(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """The arrays of all ranks in rank order, on every rank; they may differ in length."""

    def barrier(self) -> None:
        """Return once every rank has arrived."""

    def weights(self) -> dict[str, Tensor] | None:
        """The full weights under the names of the module that `prepare` was given, on rank 0.

        None where the model itself holds them. Other ranks get an empty dict.
        """

    def save(self, folder: Path) -> None:
        """Write the optimizer's state, independent of the number of ranks."""

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; the model already holds the checkpoint's weights."""

    def close(self) -> None:
        """Leave the other ranks, at the end of a run."""
