"""Engines of several ranks as threads of one process: what a launcher of processes does, in a second."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from offline_rec.training.engines.plain import TorchEngine


class Team:
    """Where ranks meet and lay out what they exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meeting = threading.Barrier(size, timeout=60)
        self.slots: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.meeting.wait()
        everything = list(self.slots)
        self.meeting.wait()
        return everything


class RankEngine(TorchEngine):
    """One rank: gradients are summed over the team before each step."""

    def __init__(self, team: Team, rank: int) -> None:
        super().__init__("cpu")
        self.team, self.rank, self.world_size = team, rank, team.size

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.team.exchange(self.rank, tensor)).sum(0)

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        return self.team.exchange(self.rank, array)

    def barrier(self) -> None:
        self.team.meeting.wait()

    def step(self, lr: float) -> float:
        for master in self._masters.values():
            master.grad = self.all_reduce_sum(
                torch.zeros_like(master) if master.grad is None else master.grad
            )
        return super().step(lr)

    def save(self, folder: Any) -> None:
        if self.rank == 0:
            super().save(folder)


def run_team(size: int, work: Callable[[RankEngine], Any]) -> list[Any]:
    """What `work` returns on each rank; an error of any rank is raised."""
    team = Team(size)

    def one(rank: int) -> Any:
        try:
            return work(RankEngine(team, rank))
        except BaseException:
            team.meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
