"""Reads the rows of coming steps while the present one is computed."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from offline_rec.data.index import Index
from offline_rec.data.order import Ints, Order, Position, imbalance, share_out
from offline_rec.data.packing import fullness, micro_batches
from offline_rec.data.passes import Sharing, fill_of, plan_rows
from offline_rec.data.rows import RowStore
from offline_rec.training.step import StepRows


@dataclass(frozen=True)
class StepSource:
    """Which groups make a step, and this rank's part of their rows.

    The groups of a step are chosen first and shared out then, so every number of ranks sees the same steps.
    """

    index: Index
    order: Order
    store: RowStore
    groups_per_step: int
    n_groups: int
    token_budget: int
    sharing: Sharing
    rank: int
    world_size: int
    anchor: str | None
    first_step: int = 0
    """Updates before the run: those of the checkpoint that it continues."""

    def groups(self, step: int) -> Ints:
        """The groups of a step, the first being `first_step` + 1; the last one may have fewer."""
        start = (step - 1 - self.first_step) * self.groups_per_step
        return self.order.take(start, min(self.groups_per_step, self.n_groups - start))

    def position(self, step: int, groups: int = 0) -> Position:
        """Where the stream stands after a step, and so many groups."""
        return self.order.position((step - self.first_step) * self.groups_per_step + groups)

    def read(self, step: int) -> StepRows:
        """This rank's rows of a step, cut into micro-batches."""
        groups = self.groups(step)
        alone = self.world_size == 1
        work = np.ones(len(groups)) if alone else self.index.work(groups, self.sharing)
        shares = share_out(work, self.world_size)
        places = shares[self.rank]
        # Every rank takes part in every pass: one without a group lends a row that will weigh nothing.
        lent = places if len(places) else np.zeros(1, np.int64)
        indexed = self.index.take(groups[lent])
        rows = self.store.take(indexed.file, indexed.file_row)
        batches = micro_batches(rows, self.token_budget, self.sharing) if len(places) else []
        passes = [one for batch in batches for one in plan_rows(rows.select(batch), self.sharing)]
        return StepRows(
            step=step,
            rows=rows,
            indexed=replace(indexed, group=lent[indexed.group]),
            batches=batches,
            anchor=self.anchor,
            tokens=int(self.index.tokens(groups).sum()),
            groups=len(groups),
            packing={
                "fill": fill_of(passes),
                "budget_used": fullness(rows, batches, self.token_budget, self.sharing),
                "micro_batches": len(batches),
                "shared": sum(len(one.opens) for one in passes if one.opens is not None) / len(rows),
                "imbalance": imbalance(work, shares),
            },
        )


class Prefetcher:
    """Calls `read(step)`, for the steps from `first` to `last`, in a thread of its own, one step ahead."""

    def __init__(self, read: Callable[[int], StepRows], first: int, last: int) -> None:
        self._read = read
        self._first = first
        self._last = last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rec-reader")
        self._ahead: dict[int, Future[StepRows]] = {}

    def __enter__(self) -> "Prefetcher":
        self._submit(self._first)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def get(self, step: int) -> StepRows:
        """The rows of a step; those of the next one are being read when this returns."""
        rows = (self._ahead.pop(step, None) or self._thread.submit(self._read, step)).result()
        self._submit(step + 1)
        return rows

    def _submit(self, step: int) -> None:
        if step <= self._last:
            self._ahead[step] = self._thread.submit(self._read, step)
