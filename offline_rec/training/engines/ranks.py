"""What engines of several processes share: how ranks meet, and what they exchange."""

import atexit
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from data_tools.errors import ConfigError
from offline_rec.models.loading import choose_device
from offline_rec.training.engines.place import LostRank, Place

PATIENCE = timedelta(days=7)
"""How long ranks wait for one that does something alone, such as scoring a dataset. A rank that dies closes
its connections, which ends the wait at once."""

SIGNS = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL", "recvValue", "TCPStore")
"""What the errors of torch.distributed say when a rank has gone."""


class Ranks:
    """A process group, as the methods of `Engine` that need one.

    Tensors on a GPU are summed by NCCL. All else goes over gloo, whose ranks notice at once when one dies.
    """

    def __init__(self, device: str) -> None:
        place = Place.here()
        self.device = own_device(device, place)
        self.rank, self.world_size = place.rank, place.size
        self._made_group = not dist.is_initialized()
        if self._made_group:
            _open_group("nccl" if self.device.type == "cuda" else "gloo", place)
        self._control: Any = dist.new_group(backend="gloo", timeout=PATIENCE)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over ranks, the same on every rank."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self._group(total))
        return total

    def gather(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """The arrays of all ranks in rank order; alike in type and number of axes."""
        shapes = self._gather_alike(torch.tensor(array.shape, dtype=torch.int64))
        sizes = [tuple(int(n) for n in shape) for shape in shapes]
        longest = max(int(np.prod(size)) for size in sizes) * array.itemsize
        own = torch.zeros(max(longest, 1), dtype=torch.uint8)
        flat = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        own[: len(flat)] = torch.from_numpy(flat.copy())
        found = []
        for size, part in zip(sizes, self._gather_alike(own), strict=True):
            count = int(np.prod(size)) * array.itemsize
            found.append(np.frombuffer(part[:count].numpy().tobytes(), array.dtype).reshape(size).copy())
        return found

    def barrier(self) -> None:
        """Return once every rank has arrived."""
        dist.barrier(group=self._control)

    def close(self) -> None:
        """Wait for the others. The process group stays, for a next engine, until this process ends well."""
        self.barrier()
        if self._made_group:
            atexit.register(dist.destroy_process_group)

    def share(self, model: nn.Module) -> None:
        """Give all ranks the parameters of rank 0: a copy of the model that differs would drift unseen."""
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                # As bytes, since gloo does not know every dtype.
                flat = tensor.data.reshape(-1)
                dist.broadcast(flat.view(torch.uint8), src=0, group=self._group(tensor))
                if not tensor.is_contiguous():
                    tensor.data.copy_(flat.view_as(tensor))

    def _group(self, tensor: Tensor) -> Any:
        return self._control if tensor.device.type == "cpu" else None

    def _gather_alike(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor, group=self._control)
        return parts


def own_device(name: str, place: Place) -> torch.device:
    """The device of this rank: with several GPUs that of its number on this machine."""
    device = choose_device(name)
    if device.type != "cuda" or (device.index is not None and place.size == 1):
        return device
    if place.local >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {place.rank} has no GPU of its own: this machine shows {torch.cuda.device_count()}",
            "start as many processes as there are GPUs, or use --device cpu",
        )
    device = torch.device("cuda", place.local)
    torch.cuda.set_device(device)
    return device


def _open_group(backend: str, place: Place) -> None:
    if place.launched:
        dist.init_process_group(backend)
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


@contextmanager
def together(rank: int) -> Iterator[None]:
    """Raise LostRank where torch reports that another rank does not answer."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not (isinstance(error, dist.DistError) or any(sign in text for sign in SIGNS)):
            raise
        first = re.sub(r"^\[[^\]]*\] ", "", text.splitlines()[0]).split(". ")[0] if text else "no answer"
        raise LostRank(
            f"rank {rank} lost the others: {first}",
            f"see what the other processes say (this is process {os.getpid()}), then go on with --resume",
        ) from error
