"""The regime: which version of the policy samples which batch, and which update trains on it. No torch.

Both knobs are those of Trinity-RFT: `sync_interval` updates between two versions of the sampling policy, and
`sync_offset` batches that sampling is ahead of training from the start (arXiv 2509.24203).
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Refresh:
    """Sample batches `first` to `last`, counted from 1, by the weights after `updates` updates."""

    version: int
    updates: int
    first: int
    last: int


@dataclass(frozen=True)
class Fit:
    """Updates `first` to `last`, each on the batch of its number, all of one version.

    `oldest`: the oldest version whose earlier batches are trained on again; `batches`: how many batches are
    trained on in all.
    """

    version: int
    oldest: int
    first: int
    last: int
    batches: int

    @property
    def name(self) -> str:
        """A name that sorts in the order of updates."""
        return f"{self.first:06d}-{self.last:06d}"


Phase = Refresh | Fit


def version_of(batch: int, *, interval: int, lag: int) -> int:
    """Who samples a batch, counted from 1: the weights after so many times `interval` updates."""
    return max(0, (batch - 1 - lag) // interval)


def first_batch(version: int, *, interval: int, lag: int) -> int:
    """The first batch that a version samples."""
    return lag + version * interval + 1 if version else 1


def phases(*, steps: int, interval: int, lag: int, replay: int = 0) -> Iterator[Phase]:
    """Everything that a loop does, in order: each batch is sampled by weights that are there,
    and before it is trained on.
    """
    sampled, trained = 0, 0
    for version in range(-(-steps // interval)):
        last = min(lag + (version + 1) * interval, steps)
        if last > sampled:
            yield Refresh(version, version * interval, sampled + 1, last)
            sampled = last
        until = min((version + 1) * interval, steps)
        while trained < until:
            part = _fit(trained + 1, until, interval=interval, lag=lag, replay=replay)
            yield part
            trained = part.last


def _fit(first: int, until: int, *, interval: int, lag: int, replay: int) -> Fit:
    """The updates from `first` on whose batches are of the same version."""
    version = version_of(first, interval=interval, lag=lag)
    last = min(until, lag + (version + 1) * interval)
    oldest = max(0, version - replay)
    ends = [first_batch(v, interval=interval, lag=lag) for v in (oldest, version)]
    return Fit(version, oldest, first, last, batches=last - first + 1 + ends[1] - ends[0])
