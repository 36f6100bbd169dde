"""What a loop does, and where in its directory each part of it lies."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offline_rec.looping.config import LoopConfig
from offline_rec.looping.regime import Fit, Phase, Refresh, phases
from offline_rec.training.fit import MODEL
from offline_rec.training.loop import CHECKPOINTS

ROUNDS = "rounds"
PROMPTS_FILE = "prompts.jsonl"


@dataclass(frozen=True)
class Layout:
    """The phases of a loop, in order, and the directories of its fits."""

    config: LoopConfig
    phases: Sequence[Phase]

    @classmethod
    def of(cls, config: LoopConfig) -> "Layout":
        """That of a configuration."""
        if config.offline:
            return cls(config, [Fit(0, 0, 1, config.steps, batches=config.steps)])
        interval = config.steps_per_round
        planned = phases(steps=config.steps, interval=interval, lag=config.lag, replay=config.replay)
        return cls(config, list(planned))

    @property
    def folder(self) -> Path:
        """The directory of the loop."""
        return Path(self.config.out)

    def run_folder(self, phase: Fit) -> Path:
        """The run directory of a fit."""
        return self.folder / ROUNDS / phase.name

    def fit_before(self, updates: int) -> Fit:
        """The fit that ends after so many updates."""
        return next(phase for phase in self.phases if isinstance(phase, Fit) and phase.last == updates)

    def checkpoint_after(self, updates: int) -> Path:
        """The checkpoint after so many updates, which end a fit."""
        return self.run_folder(self.fit_before(updates)) / CHECKPOINTS / f"step-{updates}"

    def model_after(self, updates: int) -> str:
        """The model directory with the weights after so many updates."""
        return str(self.run_folder(self.fit_before(updates)) / MODEL) if updates else self.config.model

    def newest_before(self, phase: Fit) -> int:
        """The newest version that is asked for before a fit, whether or not its samples are there yet."""
        before = self.phases[: self.phases.index(phase)]
        return max(other.version for other in before if isinstance(other, Refresh))
