"""Refresh: new responses of the present policy to chosen prompts, appended as one batch and one version.

What is sampled is journaled beside the dataset. The batch is collected from there, as any log is, once all of
it is sampled, judged, and verified to be from the weights that it is said to be from.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import orjson

from data_tools.errors import ConfigError, DataError, RecError
from data_tools.store.dataset import PolicyCard
from offline_rec.data.order import mix
from offline_rec.rewards import Reward
from offline_rec.sampling.choose import SamplerSettings, open_sampler
from offline_rec.sampling.journal import (
    Journal,
    check_begun,
    check_plan,
    content_digest,
    is_unfinished,
    task_digest,
)
from offline_rec.sampling.judged_log import JudgedLog
from offline_rec.sampling.kept import KeptSampler
from offline_rec.sampling.planner import Budget, planned_prompts
from offline_rec.sampling.refresh_prompts import dataset_prompts
from offline_rec.sampling.refresh_report import RefreshReport
from offline_rec.sampling.sampled_rows import Task, try_out
from offline_rec.sampling.sampler import Prompt, Sample, Sampler, SamplingParams
from offline_rec.sampling.tasks import file_task
from offline_rec.sampling.verify_samples import COUNT, OtherWeights, Verification, verify_samples
from offline_rec.training.run_folder import held

if TYPE_CHECKING:
    from data_tools.collecting.report import CollectReport
    from data_tools.dataset import Dataset

JOURNALS = ".refresh"
"""Folder of a dataset with the journals, hidden; a folder in it for each policy."""

TOGETHER = 1024
"""Samples of one call of the sampler in this process: what a kill loses at most. They are kept or sampled
again as a whole, so that a resumed refresh computes the very same numbers."""

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Request:
    """What is to be sampled, and by whom: all that decides the samples but the prompts.

    `version` None is the one after the newest of the policy. `sampled_at`: the time that the rows tell.
    """

    model: str
    policy: str
    n: int = 8
    params: SamplingParams = field(default_factory=SamplingParams)
    version: int | None = None
    sampler: SamplerSettings = field(default_factory=SamplerSettings)
    sampled_at: datetime | None = None

    def facts(self) -> dict[str, Any]:
        """What a resumed refresh must agree with; where the model lies does not count, what it holds does."""
        facts = {"policy": self.policy, "n": self.n, "params": asdict(self.params)}
        facts |= {"weights": content_digest(self.model), "engine": self.sampler.engine}
        return facts if self.version is None else facts | {"version": self.version}


def refresh(
    ds: "Dataset",
    model: str | Path,
    *,
    prompts: Task | str | Path | None = None,
    where: str | None = None,
    columns: Mapping[str, str] | None = None,
    n: int = 8,
    params: SamplingParams | None = None,
    policy: str | None = None,
    version: int | None = None,
    reward: Reward | None = None,
    budget: Budget | None = None,
    sampler: SamplerSettings | KeptSampler | None = None,
    sampled_at: datetime | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> RefreshReport:
    """Sample `n` responses to each prompt and append them, verified, as the next version of the policy.

    `prompts`: a Task or a file; else the distinct prompts of the rows `where`, with `columns` (name -> SQL)
    for the reward; with `budget` those that deserve it most. A kept `sampler` stays open. `resume` goes
    on with the refresh of this policy that was interrupted, with its prompts, and samples only what is
    missing. The samples of a version have random numbers of their own, drawn from the seed and the version.
    DataError if the responses turn out not to be from the weights of `model`: nothing is added then.
    """
    _check_local(ds)
    request = Request(
        model=str(model),
        policy=policy or default_policy(model),
        n=n,
        params=params or SamplingParams(),
        version=version,
        sampler=sampler.settings if isinstance(sampler, KeptSampler) else sampler or SamplerSettings(),
        sampled_at=sampled_at,
    )
    if prompts is not None and (where is not None or columns is not None or budget is not None):
        raise ConfigError("prompts are given, and a choice among those of the dataset", "give one of them")
    folder = journal_folder(ds, request.policy)
    check_begun(folder, request.policy, resume=resume)
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        if resume:
            journal = Journal(folder)
            check_plan(journal.plan["facts"], request.facts(), folder)
        else:
            task = _task(ds, request, prompts, where=where, columns=columns, budget=budget)
            journal = _begin(ds, folder, request, task)
        with journal, _told_what_is_left(journal):
            if reward is not None:
                try_out(reward, journal.task)
            refreshing = _Refreshing(ds, request, journal, reward, progress or _silent)
            refreshing.kept = sampler if isinstance(sampler, KeptSampler) else None
            return refreshing.run()


def default_policy(model: str | Path) -> str:
    """The name of a policy that is not named: its directory's, or that of the run whose `model/` it is."""
    path = Path(model).resolve()
    return path.parent.name if path.name == "model" else path.name


def journal_folder(ds: "Dataset", policy: str) -> Path:
    """Where the journal of a policy's refresh lies."""
    return Path(ds.storage.url(JOURNALS)) / quote(policy, safe="").replace(".", "%2E")


def newest_version(ds: "Dataset", policy: str) -> int | None:
    """The newest version of a policy in a dataset, None if it has none."""
    query = "SELECT max(policy_version) AS version FROM rollouts WHERE policy = $policy"
    found: int | None = ds.sql(query, {"policy": policy})["version"][0].as_py()
    return found


def _check_local(ds: "Dataset") -> None:
    if not ds.storage.is_local:
        raise ConfigError(
            f"{ds.path} is not on a local disk, where a refresh keeps what it has sampled so far",
            "refresh a local dataset, then copy its new files of rollouts and policies there",
        )


def _task(
    ds: "Dataset",
    request: Request,
    prompts: Task | str | Path | None,
    *,
    where: str | None,
    columns: Mapping[str, str] | None,
    budget: Budget | None,
) -> Task:
    """What is asked: the prompts that are given, or those that are chosen in the dataset."""
    if isinstance(prompts, Task):
        return prompts
    if prompts is not None:
        return file_task(str(prompts))
    chosen = None if budget is None else planned_prompts(ds, request.model, budget, n=request.n, where=where)
    return dataset_prompts(ds, where=where, columns=columns, chosen=chosen)


@contextmanager
def _told_what_is_left(journal: Journal) -> Iterator[None]:
    """A refresh that failed before anything was sampled leaves nothing; else its error says what is left."""
    try:
        yield
    except Exception as error:
        if is_unfinished(journal.folder) and not journal.done:
            journal.remove()
        elif is_unfinished(journal.folder) and isinstance(error, RecError):
            kept = f"the answers to {len(journal.done)} of {len(journal.task.prompts)} prompts are kept"
            error.hint = "; ".join(filter(None, [error.hint, f"{kept}: with --resume it goes on from there"]))
        raise


def _begin(ds: "Dataset", folder: Path, request: Request, task: Task) -> Journal:
    version = request.version
    if version is None:
        newest = newest_version(ds, request.policy)
        version = 0 if newest is None else newest + 1
    facts = request.facts() | {"version": version}
    told = [facts, task_digest(task)]
    plan = {
        "facts": facts,
        "id": hashlib.sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32],
        "sampled_at": (request.sampled_at or datetime.now(UTC)).isoformat(),
    }
    return Journal.begin(folder, plan, task)


class _Refreshing:
    """One refresh from its journal to the committed batch."""

    def __init__(
        self, ds: "Dataset", request: Request, journal: Journal, reward: Reward | None, tell: Progress
    ) -> None:
        self.ds = ds
        self.request = request
        self.journal = journal
        self.reward = reward
        self.tell = tell
        self.kept: KeptSampler | None = None
        self.version = int(journal.plan["facts"]["version"])

    def run(self) -> RefreshReport:
        began = time.perf_counter()
        self.sample()
        verified = self.verify()
        total = len(self.journal.task.prompts)
        log = JudgedLog(self.journal, self.request.params, self.reward)
        path = log.write(lambda done: self.tell(_stage("judge", done, total)))
        self.write_card(verified)
        collected = self.collect(path)
        self.journal.remove()
        judged = [value for value in log.rewards if value is not None]
        counted = collected.total
        return RefreshReport(
            policy=self.request.policy,
            version=self.version,
            prompts=total,
            responses=len(log.rewards),
            kept=counted.kept,
            duplicate=counted.duplicate,
            rejected=counted.rejected.total(),
            unjudged=len(log.rewards) - len(judged),
            mean_reward=float(np.mean(judged)) if judged else None,
            tokens=log.tokens,
            seconds=time.perf_counter() - began,
            batch=collected.batch,
            verified=verified,
        )

    def sample(self) -> None:
        """Sample what the journal lacks."""
        task, journal = self.journal.task, self.journal
        total = len(task.prompts)
        parts = [(params, part) for params, part in self.parts() if journal.missing(part)]
        self.tell(_stage("sample", len(journal.done), total))
        if not parts:
            return
        model = self.request.model
        opened = self.kept.holding(model) if self.kept else open_sampler(model, self.request.sampler)
        with opened as sampler:
            for params, part in parts:
                self.sample_part(sampler, part, params)
        missing = journal.missing(range(total))
        if missing:
            raise DataError(
                f"{len(missing)} of {total} prompts were not answered, the first is number {missing[0]}"
            )

    def parts(self) -> Iterator[tuple[SamplingParams, list[int]]]:
        """Prompts that are asked for in one call, each once: again, it gets random numbers of its own."""
        prompts = self.journal.task.prompts
        times: dict[str, int] = {}
        turns: list[list[int]] = []
        for number, prompt in enumerate(prompts):
            turn = times[_key(prompt)] = times.get(_key(prompt), -1) + 1
            turns += [[]] if turn == len(turns) else []
            turns[turn].append(number)
        size = max(1, TOGETHER // self.request.n) if self.request.sampler.engine == "hf" else len(prompts)
        for turn, numbers in enumerate(turns):
            seed = int(mix(self.request.params.seed, self.version, turn)[0] >> np.uint64(1))
            for first in range(0, len(numbers), size):
                yield replace(self.request.params, seed=seed), numbers[first : first + size]

    def sample_part(self, sampler: Sampler, part: list[int], params: SamplingParams) -> None:
        prompts, total = self.journal.task.prompts, len(self.journal.task.prompts)
        if self.request.sampler.engine == "hf":
            found = sampler.stream([prompts[i] for i in part], self.request.n, params)
            self.journal.add(sorted((part[i], samples) for i, samples in found))
            self.tell(_stage("sample", len(self.journal.done), total))
            return
        numbers = self.journal.missing(part)
        asked = [prompts[i] for i in numbers]
        for number, samples in sampler.stream(asked, self.request.n, params):
            self.journal.add([(numbers[number], samples)])
            self.tell(_stage("sample", len(self.journal.done), total))

    def verify(self) -> Verification:
        """Score some responses again, from prompts all over the journal."""
        total = len(self.journal.task.prompts)
        places = np.unique(np.linspace(0, total - 1, COUNT).round().astype(int)).tolist()
        samples: list[Sample] = []
        for turn, number in enumerate(places):
            drawn = self.journal.samples(number)
            samples.append(drawn[turn % len(drawn)])
        self.tell(_stage("verify", 0, 1))
        try:
            return verify_samples(self.request.model, samples, self.request.params, count=len(samples))
        except OtherWeights:
            self.journal.remove()  # nothing of it is worth going on with
            raise

    def write_card(self, verified: Verification) -> None:
        """Say who sampled: its tokenizer, how it samples, and the weights of each version."""
        known = self.ds.policies().get(self.request.policy)
        if known is not None and known.tokenizer not in (None, verified.tokenizer):
            raise ConfigError(
                f"policy {self.request.policy} has another tokenizer in {self.ds.path} than "
                f"{self.request.model}",
                "give the new policy another name: --policy NAME",
            )
        versions = dict((known.model_extra or {}).get("versions", {})) if known else {}
        versions[str(self.version)] = {"weights": verified.weights, "model": self.request.model}
        sampling = {name: value for name, value in asdict(self.request.params).items() if name != "seed"}
        sampling["engine"] = self.request.sampler.engine
        facts: dict[str, Any] = {"sampling": sampling, "versions": versions}
        facts |= {"name": self.request.policy, "model": self.request.model, "tokenizer": verified.tokenizer}
        kept = {} if known is None else known.model_dump(exclude_none=True)
        self.ds.write_policy(PolicyCard(**(kept | facts)))

    def collect(self, log: Path) -> "CollectReport":
        """Append the log; a second time it adds nothing, as its ids are the same."""
        self.tell(_stage("collect", 0, 1))
        return self.ds.collect([str(log)], format="rows", run=self.journal.plan["id"])


def _key(prompt: str | Prompt) -> str:
    given = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    return repr((given.text, given.tools, None if given.ids is None else list(given.ids)))


def _stage(stage: str, done: int, total: int) -> dict[str, Any]:
    return {"event": "stage", "stage": stage, "done": done, "total": total}


def _silent(event: dict[str, Any]) -> None:
    """Tell nobody."""
