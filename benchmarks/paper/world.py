"""What all runs on a task and seed share: a half-good base policy, its log, and the prompts that judge.

Made once and kept under a name that follows from the recipe, so that whatever changes it makes another one.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.tasks import TASKS, Task

LOGGED_AT = datetime(2026, 1, 1, tzinfo=UTC)
BASE = "base"
MAX_SEQUENCES = 2048


@dataclass(frozen=True)
class Size:
    """How much of everything; `judged` samples a prompt at the end, `watched` on the way there."""

    log_prompts: int = 2000
    responses: int = 8
    evaluation_prompts: int = 500
    judged: int = 4
    watched: int = 2
    development_prompts: int = 250
    pool: int = 100_000
    batch: int = 128
    lr: float = 2e-3
    warmup: int = 50
    check_every: int = 10
    max_steps: int = 6000


@dataclass(frozen=True)
class World:
    """The folder of a task and seed: `base`, `dataset`, `evaluation.json`, `facts.json`."""

    folder: Path
    task: Task
    seed: int
    size: Size

    @property
    def base(self) -> Path:
        return self.folder / BASE

    @property
    def dataset(self) -> Path:
        return self.folder / "dataset"

    @property
    def facts(self) -> dict[str, Any]:
        """The rewards of the base policy, and what it cost."""
        return json.loads((self.folder / "facts.json").read_text(encoding="utf-8"))

    @property
    def evaluation(self) -> list[str]:
        return json.loads((self.folder / "evaluation.json").read_text(encoding="utf-8"))


def name_of(content: Mapping[str, Any]) -> str:
    """Twelve hex digits of what a result depends on."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=6).hexdigest()


def recipe_of(task: Task, seed: int, size: Size) -> dict[str, Any]:
    """All that a world follows from."""
    return {**task.recipe, "seed": seed, **asdict(size)}


def prepare(root: Path, task: str, seed: int, size: Size) -> World:
    """The world of a task and seed, made if it is not there; another process that wants it waits."""
    recipe = recipe_of(TASKS[task], seed, size)
    world = World(root / f"{task}-{seed}-{name_of(recipe)}", TASKS[task], seed, size)
    root.mkdir(parents=True, exist_ok=True)
    with _only_one(root / f".{world.folder.name}.lock"):
        if not world.folder.exists():
            staged = root / f".{world.folder.name}.tmp"
            shutil.rmtree(staged, ignore_errors=True)
            _make(World(staged, world.task, seed, size), recipe)
            os.replace(staged, world.folder)
    return world


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(world: World, recipe: Mapping[str, Any]) -> None:
    import data_tools
    from benchmarks.paper.judging import judge
    from benchmarks.paper.pretraining import pretrain
    from data_tools.store.dataset import PolicyCard
    from offline_rec import rewards
    from offline_rec.data.fingerprint import fingerprint
    from offline_rec.models.saving import save_directory
    from offline_rec.sampling.hf_sampler import HFSampler
    from offline_rec.sampling.sampled_rows import Task as Asked
    from offline_rec.sampling.sampled_rows import sample_rows, write_jsonl
    from offline_rec.sampling.sampler import SamplingParams

    began = os.times()
    world.folder.mkdir()
    task, size = world.task, world.size
    evaluation, log, development, pool = _prompts(world)
    (world.folder / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    model, tokenizer, steps = pretrain(world, pool, development)
    save_directory(model, tokenizer, world.base, facts={"task": task.title})
    rows = sample_rows(
        HFSampler(model, tokenizer, max_sequences=MAX_SEQUENCES),
        Asked(log, {}),
        size.responses,
        SamplingParams(max_tokens=task.max_tokens, seed=world.seed),
        reward=rewards.get(task.reward),
        policy=BASE,
        policy_version=0,
        sampled_at=LOGGED_AT,
    )
    write_jsonl(rows, world.folder / "log.jsonl")
    data_tools.collect([str(world.folder / "log.jsonl")], str(world.dataset), holdout=0.0)
    (world.folder / "log.jsonl").unlink()
    card = PolicyCard(name=BASE, model=BASE, tokenizer=fingerprint(tokenizer))
    data_tools.open(str(world.dataset)).write_policy(card)
    watched, judged = (judge(world, world.base, samples) for samples in (size.watched, size.judged))
    spent = sum(os.times()[:4]) - sum(began[:4])
    facts = {
        "recipe": recipe,
        "steps": steps,
        "parameters": model.num_parameters(),
        "cpu_seconds": round(spent, 1),
    }
    facts |= {"watched": watched, "judged": judged}
    (world.folder / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def _prompts(world: World) -> Iterator[list[str]]:
    """Prompts for evaluation, the log, development and pre-training, none of them in two parts."""
    size, task = world.size, world.task
    counts = [size.evaluation_prompts, size.log_prompts, size.development_prompts]
    total = min(task.prompts, sum(counts) + size.pool)
    chosen = np.random.default_rng(world.seed).choice(task.prompts, total, replace=False)
    for part in np.split(chosen, np.cumsum(counts)):
        yield [task.prompt(int(number)) for number in part]
