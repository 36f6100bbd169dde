"""The algorithms that the demo fits to one log, and the exam that their policies take."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_tools.processes import helpers
from offline_rec import rewards
from offline_rec.config import FitConfig
from offline_rec.sampling.evaluate import evaluate
from offline_rec.sampling.sampled_rows import Task
from offline_rec.sampling.sampler import SamplingParams
from offline_rec.training.metrics import read_metrics

MAX_SEQUENCES = 2048
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Contender:
    """One way to fit: its name in the table, and the fields of the configuration that make it."""

    name: str
    settings: dict[str, Any]

    @property
    def folder(self) -> str:
        """Its name as that of a directory."""
        return self.name.replace(" + ", "+").replace("(", "-").replace(")", "")


BOTH = "rec-oneside-nois + red_weight(1)"

CONTENDERS = (
    Contender("reinforce", {"algorithm": "reinforce", "lr": 1e-3}),
    Contender("rec-oneside-nois", {"algorithm": "rec-oneside-nois", "lr": 1e-3}),
    Contender("red-weight", {"algorithm": "red-weight", "lr": 1e-3}),
    Contender(BOTH, {"algorithm": "rec-oneside-nois", "weight": "red_weight(1)", "lr": 1e-3}),
    Contender("raft", {"algorithm": "raft", "lr": 1e-3}),
)


@dataclass(frozen=True)
class Exam:
    """Prompts that no policy was trained on, with their answers, and how often each is sampled."""

    prompts: list[str]
    answers: list[str]
    samples: int
    params: SamplingParams

    def take(self, model: Path, policy: str) -> pa.Table:
        """The judged samples of a model directory, as rows."""
        from offline_rec.models.policy import Policy
        from offline_rec.sampling.hf_sampler import HFSampler

        loaded = Policy.load(model, device="cpu")
        sampler = HFSampler(loaded.model, loaded.tokenizer, max_sequences=MAX_SEQUENCES)
        task = Task(self.prompts, {"answers": self.answers})
        exact = rewards.get("exact")
        return evaluate(sampler, task, exact, n=self.samples, params=self.params, policy=policy).rows


def fit_one(config: FitConfig) -> None:
    """One fit on one thread, as another one may run beside it."""
    import torch

    from offline_rec.training.fit import fit

    torch.set_num_threads(1)
    fit(config)


def fit_all(configs: Sequence[FitConfig], *, workers: int, progress: Callable[[float, float], None]) -> None:
    """Fit them, `workers` at a time, or in this process; `progress` is told updates done and due."""
    total = sum(config.steps or 0 for config in configs)
    if workers == 1:
        for config in configs:
            fit_one(config)
            progress(sum(map(_updates, configs)), total)
        return
    with helpers(workers) as pool:
        running: set[Future[None]] = {pool.submit(fit_one, config) for config in configs}
        while running:
            finished, running = wait(running, timeout=POLL_SECONDS)
            for future in finished:
                future.result()
            progress(sum(map(_updates, configs)), total)


def _updates(config: FitConfig) -> int:
    """Updates that a run has recorded so far."""
    return sum(record["step"] > 0 for record in read_metrics(Path(config.out)))
