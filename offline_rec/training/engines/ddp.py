"""Several processes with a whole copy of the model each: gradients are summed once a step."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offline_rec.training.engine import OptimizerSettings
from offline_rec.training.engines.plain import TorchEngine
from offline_rec.training.engines.ranks import Ranks

BUCKET_ELEMENTS = 1 << 24
"""Gradients that are summed in one exchange: 64 MiB in float32."""


class DdpEngine(Ranks, TorchEngine):
    """The plain engine on every rank, which makes the same update from the same sum of gradients.

    Micro-batches add up on each rank, however many they are, and only `step` exchanges anything.
    """

    def __init__(self, device: str = "auto") -> None:
        TorchEngine.__init__(self, device)
        Ranks.__init__(self, device)

    def prepare(self, model: nn.Module, settings: OptimizerSettings) -> nn.Module:
        """Make the optimizer, of the parameters that rank 0 has."""
        self.share(model)
        return TorchEngine.prepare(self, model, settings)

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Sum the gradients of all ranks, then clip, update and clear."""
        masters = list(self._masters.values())
        # A parameter without a gradient on any rank is left alone, as one process would.
        found = torch.tensor([float(p.grad is not None) for p in masters])
        used = self.all_reduce_sum(found) > 0
        grads: list[Tensor] = []
        for parameter, any_rank in zip(masters, used.tolist(), strict=True):
            if any_rank:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grads.append(parameter.grad)
        for bucket in buckets(grads):
            _sum(bucket)
        return TorchEngine.step(self, lr)


def buckets(tensors: Sequence[Tensor], elements: int = BUCKET_ELEMENTS) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, together at most that many elements; a larger tensor alone."""
    held: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if held and (size + tensor.numel() > elements or tensor.dtype != held[0].dtype):
            yield held
            held, size = [], 0
        held.append(tensor)
        size += tensor.numel()
    if held:
        yield held


def _sum(bucket: list[Tensor]) -> None:
    """Add up the tensors of all ranks in place."""
    if len(bucket) == 1 and bucket[0].is_contiguous():
        dist.all_reduce(bucket[0])
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.all_reduce(flat)
    for tensor, part in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))
