"""DeepSpeed's ZeRO: ranks share out the optimizer's state (stage 1), gradients (2) and weights (3).

DeepSpeed averages over ranks and micro-batches, and counts the latter ahead of time. Here losses are summed:
they are multiplied by the number of ranks, never divided by a number of micro-batches, and the step ends
where the loop says so (`managed_gradient_accumulation` is off). Clipping is the plain engine's own formula.
A weight that is read outside its layer, as the log-prob head does, is found and gathered by DeepSpeed.
"""

import importlib.util
import io
import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_tools.errors import ConfigError, MissingExtra
from offline_rec.models.quiet import quiet
from offline_rec.training.engine import OptimizerSettings
from offline_rec.training.engines.plain import adamw
from offline_rec.training.engines.ranks import Ranks
from offline_rec.training.engines.state import Piece, SavedState, write_state

BUCKET_ELEMENTS = 1 << 25
PERSISTENT_ELEMENTS = 100_000
"""Parameters up to this size stay whole on every rank under stage 3: gathering costs more than they do."""

MOMENTS = ("exp_avg", "exp_avg_sq")
PARTITIONS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Where DeepSpeed's optimizers of stage 3, of 1 and 2, and of 1 in bfloat16 hold their float32 weights."""


class ZeroEngine(Ranks):
    """A DeepSpeed engine of ZeRO stage 0 to 3, in float32 or bfloat16; `offload` keeps AdamW on the CPU."""

    def __init__(self, device: str = "auto", *, stage: int = 2, offload: bool = False) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise MissingExtra("deepspeed", "deepspeed")
        super().__init__(device)
        self._deepspeed = _load(self.device)
        self.stage = stage
        self.offload = offload
        self._params: dict[str, nn.Parameter] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def prepare(self, model: nn.Module, settings: OptimizerSettings) -> nn.Module:
        """Shard the model and its optimizer; every rank needs the whole of it until then."""
        self.share(model)
        self._model = model
        self._params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._dtype = next(iter(self._params.values())).dtype
        if self.stage == 0 and self._dtype != torch.float32:
            raise ConfigError(
                f"DeepSpeed sums gradients of {self._dtype} in {self._dtype} at ZeRO stage 0",
                "use --set engine=ddp, which does the same in float32, or another zero_stage",
            )
        optimizer = adamw(
            self._params.values(),
            settings,
            kind=_GuardedAdamW if self.stage == 0 else torch.optim.AdamW,
            fused=True if self.offload else None,
        )
        if isinstance(optimizer, _GuardedAdamW):
            optimizer.max_grad_norm = settings.max_grad_norm
        with quiet(), redirect_stdout(io.StringIO()):
            self._engine, *_ = self._deepspeed.initialize(
                model=model, optimizer=optimizer, config=self._config(settings), dist_init_required=False
            )
        self._begin_state()
        engine: nn.Module = self._engine
        return engine

    def _config(self, settings: OptimizerSettings) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "overlap_comm": False,
            "contiguous_gradients": self.stage > 1,
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
        }
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": (settings.max_grad_norm or 0.0) if self.stage else 0.0,
            "bf16": {"enabled": self._dtype == torch.bfloat16, "check_grad_overflow": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_optimization": zero,
            # torch's fused AdamW runs on CPUs, and needs no compiler at run time.
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
        }

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a scalar; DeepSpeed takes the mean over ranks, hence the factor."""
        self._engine.backward(loss * self.world_size, scale_wrt_gas=False)

    def step(self, lr: float) -> float:
        """Clip, update and clear the gradient; where it is not finite, its norm is told as infinite."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        norm = float(self._engine.optimizer._global_grad_norm)
        if not math.isfinite(norm):
            self._forget_offloaded()
        return norm

    def zero(self) -> None:
        """Clear the gradient: DeepSpeed does so in a step that it takes to be not finite."""
        optimizer = self._engine.optimizer
        if self.stage == 0:
            self._engine.zero_grad()
        elif hasattr(optimizer, "clear_hp_grads"):
            optimizer.clear_hp_grads()
            optimizer.clear_lp_grads()
        else:
            with _spoilt(optimizer):
                self._engine.step()
            self._forget_offloaded()

    def _forget_offloaded(self) -> None:
        """Drop the gradients that DeepSpeed keeps after a skipped step of stage 1 or 2 with offload."""
        if self.stage in (1, 2) and self.offload:
            for group in self._engine.optimizer.averaged_gradients:
                self._engine.optimizer.averaged_gradients[group] = None

    def weights(self) -> dict[str, Tensor] | None:
        """The full weights on rank 0, gathered one by one; persistent buffers with them."""
        aliases = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        state = self._model.state_dict()
        held = {name: value.cpu() for name, value in state.items() if name not in aliases}
        for name, parameter in self._model.named_parameters():
            with self._deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                if self.rank == 0:
                    held[name] = parameter.detach().to("cpu", copy=True)
        return held if self.rank == 0 else {}

    def save(self, folder: Path) -> None:
        """Write what the plain engine writes, gathered tensor by tensor."""
        write_state(folder, self._pieces(), leads=self.rank == 0)

    def load(self, folder: Path) -> None:
        """Read what `save` of any engine wrote; each rank keeps its share."""
        saved = SavedState(folder)
        steps = [0.0]
        for name, parameter in self._params.items():
            found = saved.take(name, self._shapes[name])
            if "step" in found:
                steps.append(float(found["step"]))
            if "weight" in found and self._dtype != torch.float32:
                self._put(parameter, found["weight"], None)
            for key in MOMENTS:
                if key in found:
                    self._put(parameter, found[key], key)
        saved.check_all_taken()
        # All elements of a flat partition share one count.
        for state in self._adam.state.values():
            state["step"].fill_(max(steps))

    def _begin_state(self) -> None:
        """Make AdamW's state before its first step, so that it can be filled.

        DeepSpeed looks for it after the step of the first parameter group, and finds that group's alone.
        """
        for partition in self._partitions():
            moments = {key: torch.zeros_like(partition) for key in MOMENTS}
            self._adam.state[partition] = {"step": torch.zeros((), dtype=torch.float32), **moments}
        if self.stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _partitions(self) -> list[Tensor]:
        """The float32 tensors that this rank's AdamW updates."""
        for name in PARTITIONS:
            if hasattr(self._engine.optimizer, name):
                return list(getattr(self._engine.optimizer, name))
        return list(self._params.values())

    def _put(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """Keep this rank's share of a whole tensor of AdamW's state; of the float32 weight if key is None."""
        from deepspeed import utils

        if self.stage == 0:
            self._adam.state[parameter][key].copy_(value)
        elif self.stage == 3:
            # DeepSpeed's own way of setting a whole tensor fails where ranks do not divide it.
            share: int = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            flat = nn.functional.pad(value.reshape(-1), (0, share * self.world_size - value.numel()))
            part = flat[self.rank * share : (self.rank + 1) * share].to(self.device)
            if key is None:
                utils.safe_set_local_fp32_param(parameter, part)
            else:
                utils.safe_set_local_optimizer_state(parameter, part, key)
        elif key is None:
            utils.safe_set_full_fp32_param(parameter, value.to(self.device))
        else:
            utils.safe_set_full_optimizer_state(parameter, value.to(self.device), key)

    @property
    def _adam(self) -> torch.optim.Optimizer:
        """torch's AdamW, over DeepSpeed's flat partitions."""
        optimizer = self._engine.optimizer
        found: torch.optim.Optimizer = optimizer.optimizer if self.stage else optimizer
        return found

    def _pieces(self) -> list[Piece]:
        step = next(iter(self._adam.state.values()))["step"]
        pieces = []
        for name, parameter in self._params.items():
            shape = self._shapes[name]
            pieces += [
                Piece(f"{key}/{name}", shape, torch.float32, partial(self._get, parameter, key))
                for key in MOMENTS
            ]
            pieces.append(Piece(f"step/{name}", (), torch.float32, lambda: step))
            if self._dtype != torch.float32:
                take = partial(self._get, parameter, None)
                pieces.append(Piece(f"weight/{name}", shape, torch.float32, take))
        return pieces

    def _get(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """A whole tensor from the shares of all ranks."""
        from deepspeed import utils

        if self.stage == 0:
            value: Tensor = self._adam.state[parameter][key]
        elif key is None:
            value = utils.safe_get_full_fp32_param(parameter)
        else:
            value = utils.safe_get_full_optimizer_state(parameter, key)
        return value


class _GuardedAdamW(torch.optim.AdamW):
    """AdamW that measures, clips and skips: at stage 0 in float32 DeepSpeed leaves that to the optimizer."""

    max_grad_norm: float | None = None
    overflow = False
    _global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update, unless the gradient is not finite."""
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in held])
        self._global_grad_norm = float(norm)
        self.overflow = not bool(norm.isfinite())
        if self.overflow:
            return
        if self.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(held, self.max_grad_norm, norm)
        super().step()


def _load(device: torch.device) -> Any:
    """DeepSpeed, without what it would compile, look for or print."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")
    with quiet():
        import deepspeed
        from deepspeed import ops

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # Sums over shared memory would be compiled at the first start, in minutes.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    # DeepSpeed calls functions that torch has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    return deepspeed


@contextmanager
def _spoilt(optimizer: Any) -> Iterator[None]:
    """Have DeepSpeed find that the gradient is not finite."""
    name = "_get_norm_groups" if hasattr(optimizer, "_get_norm_groups") else "scaled_global_norm"
    bad = torch.tensor(float("inf"), device=optimizer.device)
    setattr(optimizer, name, lambda: [bad] if name == "_get_norm_groups" else bad)
    try:
        yield
    finally:
        delattr(optimizer, name)
