"""The order in which groups are visited: seeded, lazy, the same on any number of processes, after any resume.

An epoch shuffles the blocks (row groups of the dataset) and then the groups within a window of blocks, so a
step reads few row groups while its groups come from many. The n-th group of the stream is a function of
(snapshot, seed, n) alone, and memory is that of one window.
"""

import heapq
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_tools.errors import DataError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Position:
    """A place in the stream of groups: all that a resume needs to go on with the same batches."""

    snapshot: str
    seed: int
    epoch: int
    ordinal: int


def mix(*keys: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash integers (arrays broadcast) to uniform 64-bit ones.

    The finaliser of splitmix64, written out because numpy's generators may change between versions.
    """
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            part = np.asarray(key, np.uint64) if isinstance(key, np.ndarray) else np.uint64(key % 2**64)
            state = (state ^ part) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


def shuffled(n: int, *keys: int) -> Ints:
    """A permutation of range(n) that depends on the keys alone."""
    hashes = mix(*keys, np.arange(n, dtype=np.uint64))
    return np.argsort(hashes, kind="stable").astype(np.int64)


class Order:
    """The endless stream of groups: epoch after epoch of a seeded shuffle.

    `block_first` [blocks + 1]: the groups of block b are block_first[b] .. block_first[b + 1].
    `priority` [groups]: an epoch visits a group n_groups * priority / sum(priority) times, rounded down or up
    by systematic resampling; without it, once. Raises DataError where the priorities sum to 0 or overflow.
    """

    def __init__(
        self,
        block_first: Ints,
        *,
        snapshot: str,
        seed: int,
        window: int = 8,
        priority: Floats | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.seed = seed
        self.n_groups = int(block_first[-1])
        self._key = (int(snapshot[:16], 16), seed)
        self._first = block_first
        self._window = window
        self._priority = priority
        self._mass = None if priority is None else _mass_before(block_first, priority)
        self._total = 1.0 if self._mass is None else float(self._mass[-1])
        if not 0 < self._total < np.inf:
            raise DataError(
                f"the priorities of {self.n_groups} groups sum to {self._total:g}, which no draw can follow",
                "give a priority of at least 0 whose sum is positive and finite",
            )
        self._blocks: tuple[int, Ints, Ints] | None = None
        self._cached: tuple[int, int, Ints] | None = None

    def take(self, start: int, count: int) -> Ints:
        """Groups number start .. start + count of the stream, across the ends of epochs."""
        parts = []
        while count > 0:
            epoch, ordinal = divmod(start, self.n_groups)
            window, before = self._window_at(epoch, ordinal)
            part = window[ordinal - before : ordinal - before + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def position(self, start: int) -> Position:
        """Where group number `start` of the stream stands."""
        epoch, ordinal = divmod(start, self.n_groups)
        return Position(self.snapshot, self.seed, epoch, ordinal)

    def _window_at(self, epoch: int, ordinal: int) -> tuple[Ints, int]:
        """The window that holds a position, and the number of groups of its epoch before it."""
        if self._blocks is None or self._blocks[0] != epoch:
            blocks = shuffled(len(self._first) - 1, *self._key, epoch)
            self._blocks = (epoch, blocks, np.cumsum(self._sizes(epoch)[blocks]))
        _, blocks, ends = self._blocks
        first = int(np.searchsorted(ends, ordinal, side="right")) // self._window * self._window
        if self._cached is None or self._cached[:2] != (epoch, first):
            groups = [self._visits(int(b), epoch) for b in blocks[first : first + self._window]]
            together = np.concatenate(groups)
            mixed = together[shuffled(len(together), *self._key, epoch, first)]
            self._cached = (epoch, first, mixed)
        return self._cached[2], int(ends[first - 1]) if first else 0

    def _sizes(self, epoch: int) -> Ints:
        """How many visits each block holds in an epoch."""
        return np.diff(self._first if self._mass is None else self._visits_before(self._mass, epoch))

    def _visits(self, block: int, epoch: int) -> Ints:
        """The groups of a block, each as often as the epoch visits it."""
        low, high = int(self._first[block]), int(self._first[block + 1])
        groups = np.arange(low, high, dtype=np.int64)
        if self._priority is None or self._mass is None:
            return groups
        inside = self._mass[block] + np.cumsum(self._priority[low:high], dtype=np.float64)
        # Rounding must not move a visit over the edge of the block: its size was counted at the edges.
        inside = np.minimum(inside, self._mass[block + 1])
        inside[-1:] = self._mass[block + 1]
        edges = np.concatenate([self._mass[block : block + 1], inside])
        return np.repeat(groups, np.diff(self._visits_before(edges, epoch)))

    def _visits_before(self, mass: Floats, epoch: int) -> Ints:
        """Systematic resampling: one visit at each u, u + 1, ... of the mass scaled to n_groups."""
        offset = float(mix(*self._key, epoch, 1)[0] >> np.uint64(11)) / 2.0**53
        visits: Ints = np.ceil(mass / self._total * self.n_groups - offset).astype(np.int64)
        return visits


def _mass_before(first: Ints, priority: Floats) -> Floats:
    """Total priority before each block, [blocks + 1]; one block in memory at a time."""
    totals = (float(np.sum(priority[low:high])) for low, high in itertools.pairwise(first))
    with np.errstate(over="ignore"):  # an infinite sum is refused with a message of its own
        return np.cumsum([0.0, *totals])


def share_out(cost: Ints | Floats, ranks: int) -> list[Ints]:
    """Spread the groups of a step over ranks so that all finish together; positions stay in order.

    Largest differencing (Karmarkar and Karp, 1982): the two partial spreads that differ most within are
    joined, the dearest part of one with the cheapest of the other, until one is left. Rank 0 has most.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for position, value in enumerate(cost.tolist()):
        parts: list[tuple[float, list[int]]] = [(value, [position]), *[(0, [])] * (ranks - 1)]
        heapq.heappush(heap, (-value, position, parts))
    for number in range(len(cost), 2 * len(cost) - 1):
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    spread = heap[0][2] if heap else [(0, [])] * ranks
    return [np.array(sorted(positions), np.int64) for _, positions in spread]


def imbalance(cost: Ints | Floats, parts: list[Ints]) -> float:
    """The most work of a rank over the mean of all, 1 at best."""
    loads = np.array([cost[part].sum() for part in parts], np.float64)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0
