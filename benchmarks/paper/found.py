"""Results as findings and pages read them: runs by place, algorithm, learning rate and seed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Run:
    """Rewards of one run on the prompts it is judged by: `rewards[0]` is the base's, the last one the end's.

    `base` and `end` are measured with more samples than the points between.
    """

    updates: Sequence[int]
    rewards: Sequence[float]
    base: float
    end: float

    @property
    def gain(self) -> float:
        return self.end - self.base

    @property
    def path(self) -> float:
        """The mean reward on the way, the base left out: high if it rises early."""
        return fmean(self.rewards[1:])

    @property
    def best(self) -> float:
        return max(self.rewards[1:])

    def at(self, share: float) -> float:
        """The reward after a share of the updates."""
        due = share * self.updates[-1]
        return next(r for u, r in zip(self.updates, self.rewards, strict=True) if u >= due)


@dataclass(frozen=True)
class Place:
    """The runs of one task and regime: algorithm -> learning rate -> seed -> run."""

    task: str
    regime: str
    runs: Mapping[str, Mapping[float, Mapping[int, Run]]]

    @property
    def name(self) -> str:
        return f"{self.task}, {self.regime}"

    def rate(self, algorithm: str) -> float | None:
        """The learning rate by which an algorithm is judged: the one with the higher mean reward at the end.

        A rate that fewer seeds were run with than with another does not count.
        """
        rates = self.runs.get(algorithm, {})
        most = max((len(seeds) for seeds in rates.values()), default=0)
        means = {
            lr: fmean(run.end for run in seeds.values()) for lr, seeds in rates.items() if len(seeds) == most
        }
        return max(means, key=lambda lr: means[lr], default=None)

    def of(self, algorithm: str, rate: float | None = None) -> Mapping[int, Run]:
        """The runs of an algorithm by seed, at its own better rate or at another."""
        chosen = self.rate(algorithm) if rate is None else rate
        return {} if chosen is None else self.runs.get(algorithm, {}).get(chosen, {})


@dataclass(frozen=True)
class Found:
    """All results: `facts` are those of paper.json."""

    facts: Mapping[str, Any]
    places: Mapping[tuple[str, str], Place]

    def place(self, task: str, regime: str) -> Place:
        """That of a task and regime, empty if none of its runs is there."""
        return self.places.get((task, regime), Place(task, regime, {}))

    @property
    def tasks(self) -> Iterator[str]:
        yield from dict.fromkeys(task for task, _ in self.places)


def found(facts: Mapping[str, Any]) -> Found:
    """What paper.json holds, by place."""
    nested: dict[tuple[str, str], dict[str, dict[float, dict[int, Run]]]] = {}
    for name, one in facts["runs"].items():
        task, regime, algorithm, lr, seed = name.split("/")
        run = Run(one["updates"], one["rewards"], one["base"], one["end"])
        place = nested.setdefault((task, regime), {})
        place.setdefault(algorithm, {}).setdefault(float(lr), {})[int(seed)] = run
    return Found(facts, {key: Place(*key, runs) for key, runs in nested.items()})


def read(path: Path) -> Found:
    return found(json.loads(path.read_text(encoding="utf-8")))
