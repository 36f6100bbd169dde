"""Plain torch in one process."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offline_rec.models.loading import choose_device
from offline_rec.training.engine import OptimizerSettings
from offline_rec.training.engines.state import Piece, SavedState, write_state

ADAM_EPS = 1e-8
HALF = (torch.bfloat16, torch.float16)


def adamw(
    parameters: Iterable[nn.Parameter],
    settings: OptimizerSettings,
    *,
    kind: type[torch.optim.AdamW] = torch.optim.AdamW,
    fused: bool | None = None,
) -> torch.optim.AdamW:
    """The optimizer of all engines; biases and norms are not decayed."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return kind(filled, lr=0.0, betas=settings.betas, eps=ADAM_EPS, fused=fused)


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
        """Make the optimizer."""
        self._settings = settings
        self._params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master(p) for name, p in self._params.items()}
        for name, parameter in self._params.items():
            if self._masters[name] is not parameter:
                hook = _sum_into(self._masters[name])
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        # Fused is five times as fast on a CPU, and needs no second copy of a gradient.
        self._optimizer = adamw(self._masters.values(), settings, fused=True)
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
        write_state(folder, self._pieces(), leads=self.rank == 0)

    def load(self, folder: Path) -> None:
        """Read what `save` of any engine wrote; `DataError` if it belongs to another model."""
        saved = SavedState(folder)
        for name, master in self._masters.items():
            found = saved.take(name, master.shape)
            weight = found.pop("weight", None)
            if weight is not None and master is not self._params[name]:
                master.data.copy_(weight)
            if found:
                self._optimizer.state[master] = {key: value.to(master.device) for key, value in found.items()}
        saved.check_all_taken()
        self._publish()

    def close(self) -> None:
        """Nothing to give back."""

    def _pieces(self) -> list[Piece]:
        held: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            state = self._optimizer.state.get(master, {})
            held |= {f"{key}/{name}": value for key, value in state.items()}
            if master is not self._params[name]:
                held[f"weight/{name}"] = master
        return [Piece(name, tuple(t.shape), t.dtype, partial(_itself, t)) for name, t in held.items()]

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the float32 copies into the weights of the forward pass."""
        for name, parameter in self._params.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype not in HALF:
        return parameter
    return nn.Parameter(parameter.detach().float())


def _sum_into(master: nn.Parameter) -> Any:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            grad = parameter.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            parameter.grad = None

    return hook


def _itself(tensor: Tensor) -> Tensor:
    return tensor
