"""The story: a half-good policy, its own samples as the log, and what five algorithms make of that log.

What follows the log is what a user of the library calls: collect, stats, sql, fit, ope, evaluate, report.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import data_tools
from data_tools.errors import ConfigError
from data_tools.store.dataset import PolicyCard
from offline_rec import rewards
from offline_rec.config import FitConfig
from offline_rec.demo import telling
from offline_rec.demo.contest import CONTENDERS, MAX_SEQUENCES, Exam, fit_all
from offline_rec.demo.forecast import Forecast, forecasts, held_out
from offline_rec.demo.pages import DATASET_PAGE, RUN_PAGE, keep_evaluation, write_pages
from offline_rec.demo.task import Split, split
from offline_rec.sampling.evaluate import summarise
from offline_rec.sampling.sampled_rows import Task, sample_rows, write_jsonl
from offline_rec.sampling.sampler import SamplingParams

if TYPE_CHECKING:
    import pyarrow as pa

    from data_tools.dataset import Dataset

BASE = "base"
RESULTS = "results.json"
LOGGED_AT = datetime(2026, 1, 1, tzinfo=UTC)
"""The time that the log tells, so that a seed gives the same log, and with it the same fits, at any time."""

BY_TIER = """SELECT extra->>'tier' AS tier, count(*) AS responses, avg(reward) AS reward,
       avg(exp(behavior_logprob)) AS probability
FROM rollouts GROUP BY tier ORDER BY reward"""


class Tick(Protocol):
    """Told how far a phase is."""

    def __call__(self, phase: str, done: float, total: float) -> None:
        """`done` of `total` in whatever the phase counts."""


@dataclass(frozen=True)
class Size:
    """How much of everything; `target` is the accuracy that ends pre-training, `workers` counts processes."""

    log_prompts: int = 2000
    responses: int = 8
    evaluation_prompts: int = 1000
    evaluation_samples: int = 4
    held_out_samples: int = 16
    development_prompts: int = 500
    target: float = 0.45
    steps: int = 300
    workers: int = min(2, os.cpu_count() or 1)


@dataclass
class Story:
    """One telling: where things are put, to whom it is told, and how long its phases took."""

    out: Path
    seed: int
    size: Size
    say: Callable[[str], None]
    tick: Tick
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def params(self) -> SamplingParams:
        """Temperature 1 and nothing cut off; an answer has five tokens, and a policy may ramble a little."""
        return SamplingParams(max_tokens=8, seed=self.seed)

    @contextmanager
    def phase(self, name: str, title: str) -> Iterator[None]:
        """Announce a phase and take its time."""
        self.say(f"\n{title}")
        began = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - began, 2)


def run(
    out: str | Path,
    *,
    seed: int = 1,
    size: Size | None = None,
    say: Callable[[str], None] = lambda line: None,
    tick: Tick = lambda phase, done, total: None,
) -> dict[str, Any]:
    """Tell the story into the directory `out`, and return what its `results.json` holds.

    `say` is given lines to read, `tick` how far the present phase is. ConfigError if `out` is not empty.
    """
    story = Story(Path(out), seed, size or Size(), say, tick)
    _make_folder(story.out)
    began = time.perf_counter()
    with _one_thread():
        parts = split(
            seed,
            evaluation=story.size.evaluation_prompts,
            log=story.size.log_prompts,
            development=story.size.development_prompts,
        )
        model, tokenizer = _pretrain(story, parts)
        _write_log(story, parts, model, tokenizer)
        ds = _collect(story, tokenizer)
        _look(story, ds)
        _fit(story)
        foretold = _foretell(story, parts, ds)
        samples = _evaluate(story, parts)
        _write_pages(story, ds, samples)
    story.seconds["total"] = round(time.perf_counter() - began, 2)
    results = telling.results(samples, foretold, seed=seed, seconds=story.seconds, paths=_paths(story))
    (story.out / RESULTS).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    for line in telling.conclusion(results):
        say(line)
    return results


def _make_folder(out: Path) -> None:
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"{out} exists already", "give a directory that does not exist, or is empty")
    out.mkdir(parents=True, exist_ok=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Several threads wait for each other many times longer than a model this small computes."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _pretrain(story: Story, parts: Split) -> tuple[Any, Any]:
    """Make the base policy and save it; the model and its tokenizer."""
    from offline_rec.demo.model import Pretraining, build_model, build_tokenizer, pretrain
    from offline_rec.models.saving import save_directory

    with story.phase(
        "pretrain", "A tiny transformer learns to add three-digit numbers, until it is half good."
    ):
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, seed=story.seed)
        accuracy = pretrain(
            model,
            tokenizer,
            parts.pool,
            parts.development,
            recipe=Pretraining(seed=story.seed, target=story.size.target),
            progress=lambda done, total: story.tick("pretrain", done, total),
        )
        save_directory(model, tokenizer, story.out / BASE, facts={"task": "three-digit addition"})
    story.say(
        f"{model.num_parameters():,} parameters; {accuracy:.0%} of new problems right -> {story.out / BASE}"
    )
    return model, tokenizer


def _write_log(story: Story, parts: Split, model: Any, tokenizer: Any) -> None:
    """Let the base policy answer the prompts of the log, and judge the answers."""
    from offline_rec.sampling.hf_sampler import HFSampler

    size = story.size
    with story.phase("sample", f"It answers {size.log_prompts} prompts {size.responses} times: the log."):
        rows = sample_rows(
            HFSampler(model, tokenizer, max_sequences=MAX_SEQUENCES),
            Task(parts.log.prompts(), {"answers": parts.log.answers(), "tier": parts.log.tiers()}),
            size.responses,
            story.params,
            reward=rewards.get("exact"),
            policy=BASE,
            policy_version=0,
            sampled_at=LOGGED_AT,
        )
        write_jsonl(rows, story.out / "log.jsonl")
    story.say(f"{rows.num_rows} scored responses with token ids and log-probs -> {story.out / 'log.jsonl'}")


def _collect(story: Story, tokenizer: Any) -> "Dataset":
    """Turn the log into a dataset, with a card of the policy that it is from."""
    from offline_rec.data.fingerprint import fingerprint

    log, dataset = story.out / "log.jsonl", story.out / "dataset"
    with story.phase("collect", f"$ rec collect {log} --into {dataset}"):
        report = data_tools.collect([str(log)], str(dataset))
        ds = data_tools.open(str(dataset))
        ds.write_policy(PolicyCard(name=BASE, model=str(story.out / BASE), tokenizer=fingerprint(tokenizer)))
    for line in report.lines():
        story.say(line)
    return ds


def _look(story: Story, ds: "Dataset") -> None:
    """What `rec stats` and `rec sql` show of the dataset."""
    dataset = story.out / "dataset"
    with story.phase("look", f"Some of what rec stats {dataset} tells:"):
        for line in telling.facts(ds.stats()):
            story.say(line)
        story.say(f'\n$ rec sql {dataset} "{BY_TIER}"')
        for line in telling.rows(ds.sql(BY_TIER)):
            story.say(line)


def _fit(story: Story) -> None:
    """Every contender on the same log, two at a time."""
    configs = [
        FitConfig(
            dataset=str(story.out / "dataset"),
            model=str(story.out / BASE),
            out=str(_run(story, contender.folder)),
            steps=story.size.steps,
            schedule="linear",
            seed=story.seed,
            device="cpu",
            **contender.settings,
        )
        for contender in CONTENDERS
    ]
    with story.phase("fit", "Five algorithms, one log:"):
        for config in configs:
            weight = f' --weight "{config.weight}"' if config.weight else ""
            story.say(
                f"$ rec fit {config.dataset} --model {config.model} --out {config.out} "
                f"--algorithm {config.algorithm}{weight} --lr {config.lr:g} --steps {config.steps} "
                f"--seed {config.seed} --device {config.device} --set schedule={config.schedule}"
            )
        fit_all(
            configs,
            workers=story.size.workers,
            progress=lambda done, total: story.tick("fit", done, total),
        )


def _foretell(story: Story, parts: Split, ds: "Dataset") -> dict[str, Forecast]:
    """What `rec ope` says of each policy before it is sampled, and what samples on the same prompts say."""
    prompts, size = held_out(ds), story.size
    answers = dict(zip(parts.log.prompts(), parts.log.answers(), strict=True))
    exam = Exam(prompts, [answers[prompt] for prompt in prompts], size.held_out_samples, story.params)
    runs = {contender.name: _run(story, contender.folder) for contender in CONTENDERS}
    title = f"What the log tells beforehand, on its {len(prompts)} prompts that no fit has seen:"
    with story.phase("ope", title):
        story.say(f"$ rec ope {' '.join(map(str, runs.values()))} --data {story.out / 'dataset'}")
        return forecasts(
            ds, runs, exam, seed=story.seed, tick=lambda done, total: story.tick("ope", done, total)
        )


def _evaluate(story: Story, parts: Split) -> dict[str, "pa.Table"]:
    """Samples of the base policy and of each contender's, on prompts that no log has; also as files."""
    import pyarrow.parquet as pq

    size = story.size
    exam = Exam(parts.evaluation.prompts(), parts.evaluation.answers(), size.evaluation_samples, story.params)
    models = {BASE: story.out / BASE} | {c.name: _run(story, c.folder) / "model" for c in CONTENDERS}
    samples = {}
    title = (
        f"Each policy answers {len(parts.evaluation)} other prompts, {size.evaluation_samples} times each."
    )
    with story.phase("evaluate", title):
        for number, (name, model) in enumerate(models.items()):
            story.tick("evaluate", number, len(models))
            samples[name] = exam.take(model, name)
            pq.write_table(samples[name], model.parent / f"{model.name}-samples.parquet", compression="zstd")
        keep_evaluation(samples, models, exam)
    return samples


def _write_pages(story: Story, ds: "Dataset", samples: dict[str, "pa.Table"]) -> None:
    """The pages of the log and of the run whose policy answered best."""
    best = max(CONTENDERS, key=lambda contender: summarise(samples[contender.name]).accuracy.value)
    run, pages = _run(story, best.folder), {name: story.out / name for name in (DATASET_PAGE, RUN_PAGE)}
    with story.phase("report", "Two pages to look at:"):
        story.say(f"$ rec report {story.out / 'dataset'} -o {pages[DATASET_PAGE]}")
        story.say(f"$ rec report {run} -o {pages[RUN_PAGE]}")
        write_pages(story.out, ds, run, story.seed)


def _run(story: Story, folder: str) -> Path:
    return story.out / "runs" / folder


def _paths(story: Story) -> dict[str, str]:
    paths = {
        name: story.out / name for name in (BASE, "log.jsonl", "dataset", RESULTS, DATASET_PAGE, RUN_PAGE)
    }
    paths |= {c.name: _run(story, c.folder) for c in CONTENDERS}
    return {name: str(path) for name, path in paths.items()}
