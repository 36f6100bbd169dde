"""The boundary between the fit loop and whatever computes gradients.

The loop never asks how many processes there are or where the optimizer's state lies; it sums over ranks,
gathers and steps through an `Engine`. `TorchEngine` is the plain one, in one process.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data_tools.errors import DataError
from offline_rec.config import FitConfig
from offline_rec.models.loading import choose_device
from offline_rec.models.saving import writing

OPTIMIZER_FILE = "optimizer.safetensors"
ADAM_EPS = 1e-8
STATE = ("exp_avg", "exp_avg_sq", "step", "weight")


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
        """The full weights for saving, on rank 0; None where the model itself holds them."""

    def save(self, folder: Path) -> None:
        """Write the optimizer's state, independent of the number of ranks."""

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; the model already holds the checkpoint's weights."""


class TorchEngine:
    """Plain torch in one process.

    Weights that are not float32 get a float32 copy that the optimizer updates and into which the gradients of
    micro-batches are summed: a step of 1e-6 would vanish in bfloat16.
    """

    rank = 0
    world_size = 1

    def __init__(self, device: str | torch.device = "auto") -> None:
        self.device = choose_device(str(device))
        self._settings = OptimizerSettings()
        self._params: dict[str, nn.Parameter] = {}
        self._masters: dict[str, nn.Parameter] = {}

    def prepare(self, model: nn.Module, settings: OptimizerSettings) -> nn.Module:
        """Make the optimizer; biases and norms are not decayed."""
        self._settings = settings
        self._params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master(p) for name, p in self._params.items()}
        for name, parameter in self._params.items():
            if self._masters[name] is not parameter:
                hook = _sum_into(self._masters[name])
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        masters = list(self._masters.values())
        groups = [
            {"params": [p for p in masters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in masters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=settings.betas, eps=ADAM_EPS
        )
        return model

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a scalar."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, lr: float) -> float:
        """Clip, update and clear the gradient; no update where the norm is not finite."""
        masters = list(self._masters.values())
        norm = nn.utils.get_total_norm([p.grad for p in masters if p.grad is not None])
        value = float(norm)
        if np.isfinite(value):
            if self._settings.max_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(masters, self._settings.max_grad_norm, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._publish()
        self.zero()
        return value

    def zero(self) -> None:
        """Clear the gradient."""
        for parameter in (*self._masters.values(), *self._params.values()):
            parameter.grad = None

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def gather(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """The array alone."""
        return [array]

    def barrier(self) -> None:
        """Nobody to wait for."""

    def weights(self) -> dict[str, Tensor] | None:
        """The model holds them."""
        return None

    def save(self, folder: Path) -> None:
        """Write moments, step counts and float32 weights, each under its parameter's name."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for key, value in self._optimizer.state.get(master, {}).items():
                tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
            if master is not self._params[name]:
                tensors[f"weight/{name}"] = master.detach().cpu().contiguous()
        with writing(folder / OPTIMIZER_FILE):
            save_file(tensors, folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; `DataError` if it belongs to another model."""
        tensors = load_file(folder / OPTIMIZER_FILE)
        for name, master in self._masters.items():
            found = {key: tensors.pop(f"{key}/{name}") for key in STATE if f"{key}/{name}" in tensors}
            for key, value in found.items():
                if key != "step" and value.shape != master.shape:
                    raise DataError(f"{folder}: {name} is {tuple(value.shape)}, not {tuple(master.shape)}")
            weight = found.pop("weight", None)
            if weight is not None and master is not self._params[name]:
                master.data.copy_(weight)
            if found:
                moments = {key: value.to(master.device) for key, value in found.items() if key != "step"}
                self._optimizer.state[master] = {"step": found["step"], **moments}
        if tensors:
            raise DataError(
                f"{folder}: {next(iter(tensors))} is of another model", "resume with the same model"
            )
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the float32 copies into the weights of the forward pass."""
        for name, parameter in self._params.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return parameter
    return nn.Parameter(parameter.detach().float())


def _sum_into(master: nn.Parameter) -> Any:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            grad = parameter.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            parameter.grad = None

    return hook
