"""`loop`: rounds of refresh and fit; killed in any phase, it goes on to the same end.

A round's fit is a run of its own, as a fit never changes its data, and continues weights, optimizer and count
of updates from the checkpoint of the round before.
"""

import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import data_tools
from data_tools.errors import ConfigError, Interrupted
from data_tools.store.storage import open_storage
from data_tools.store.views import literal
from offline_rec.algorithms import algorithm
from offline_rec.cards.write import write_run_cards
from offline_rec.config import CONFIG_FILE, FitConfig, to_yaml
from offline_rec.looping.beside import Beside
from offline_rec.looping.config import LoopConfig
from offline_rec.looping.layout import PROMPTS_FILE, Layout
from offline_rec.looping.records import add_lineage, add_metrics
from offline_rec.looping.refreshing import BATCH, Refreshing, reward_of, sampler_settings
from offline_rec.looping.regime import Fit, Refresh
from offline_rec.looping.state import check_same, read_state, write_state
from offline_rec.sampling.journal import check_begun, write_task
from offline_rec.sampling.refresh import journal_folder, newest_version
from offline_rec.sampling.refresh_prompts import read_prompts
from offline_rec.training import checkpoint
from offline_rec.training.engines.place import Place
from offline_rec.training.fit import MODEL, FitResult, fit
from offline_rec.training.loop import CHECKPOINTS
from offline_rec.training.run_folder import held

if TYPE_CHECKING:
    from data_tools.dataset import Dataset

NOT_KEPT = (CHECKPOINTS, MODEL, "adapter", "index")
"""What is removed of a fit once later ones do not need it."""

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class LoopResult:
    """What a loop came to: `model` holds the weights after `steps` updates, or those where a guard `stopped`.

    `versions` of the policy sampled the `rows` that the dataset has of it.
    """

    out: Path
    model: Path
    steps: int
    versions: int
    rows: int
    stopped: str | None

    def facts(self) -> dict[str, Any]:
        """The same with paths as text."""
        return asdict(self) | {"out": str(self.out), "model": str(self.model)}

    def lines(self) -> list[str]:
        """The result as text."""
        versions = "a version" if self.versions == 1 else f"{self.versions} versions"
        shown = [f"{self.model}: after {self.steps} updates, on {self.rows} responses of {versions}"]
        if self.stopped:
            shown.append(f"stopped early: {self.stopped}")
        query = "SELECT step, policy_version, count(*) AS rows FROM lineage GROUP BY ALL ORDER BY ALL"
        return [*shown, f'which versions each update saw: rec sql {shlex.quote(str(self.out))} "{query}"']


def loop(config: LoopConfig, *, resume: bool = False, progress: Progress | None = None) -> LoopResult:
    """Run the rounds of a configuration; `resume` goes on with what was done before, to the same weights.

    `progress` is called with the events of refresh and fit. ConfigError where the directory holds another
    loop, or the dataset has rows of the policy already.
    """
    if Place.here().size > 1:
        raise ConfigError("a loop runs in one process", "leave the launcher out")
    folder = Path(config.out)
    if resume:
        check_same(folder, config)
    elif folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} exists already", "go on with it by --resume, or give another out")
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder), _interrupts_named(folder):
        return _Looping(config, progress or _silent).run()


class _Looping:
    """A loop between two of its phases, whose number is all its state: the rest is in the files."""

    def __init__(self, config: LoopConfig, tell: Progress) -> None:
        self.config = config
        self.layout = Layout.of(config)
        self.folder = self.layout.folder
        self.tell = tell
        if not config.offline:  # what is wrong with them is told before anything is written
            reward_of(config)
            sampler_settings(config)
        self.ds = self.open_dataset()
        self.done = self.begin()

    def open_dataset(self) -> "Dataset":
        """The dataset, made without a holdout if there is none: every prompt is asked to be trained on."""
        config = self.config
        if not open_storage(config.dataset).exists("rec.json"):
            if config.offline or config.prompts is None:
                raise ConfigError(
                    f"{config.dataset} is not a dataset, and prompts names none",
                    "name a file or a dataset of prompts",
                )
            return data_tools.open(config.dataset, create=True, holdout=0.0)
        ds = data_tools.open(config.dataset)
        if not config.offline and config.prompts is not None and ds.info.holdout:
            raise ConfigError(
                f"{config.dataset} holds prompts out of training, and {config.prompts} may name them",
                "take the prompts of the dataset (leave prompts out), or name a new dataset",
            )
        return ds

    def begin(self) -> int:
        """Write what all phases need, and return how many of them are done."""
        config, done = self.config, read_state(self.folder)
        if done is None:
            if not config.offline:
                self.check_policy()
                source = config.prompts or config.dataset
                task = read_prompts(source, where=config.where, columns=config.columns)
                write_task(task, self.folder / PROMPTS_FILE)
            write_state(self.folder, done := 0)
        # A longer loop replaces the configuration of the shorter one.
        staged = self.folder / f".{CONFIG_FILE}.tmp"
        staged.write_text(to_yaml(config), encoding="utf-8")
        os.replace(staged, self.folder / CONFIG_FILE)
        return done

    def check_policy(self) -> None:
        """Refuse a policy of which there are rows, or journaled samples, that are not of this loop."""
        name = self.config.policy
        if newest_version(self.ds, name) is not None:
            raise ConfigError(
                f"{self.config.dataset} has rows of the policy {name!r} already",
                "name another policy, or a new dataset",
            )
        check_begun(journal_folder(self.ds, name), name, resume=False)

    def run(self) -> LoopResult:
        if self.config.offline:
            return self.rounds(None)
        beside = self.config.side_by_side
        sampling = Beside(self.config, self.tell) if beside else Refreshing(self.layout, self.ds, self.tell)
        try:
            return self.rounds(sampling)
        finally:
            sampling.close()

    def rounds(self, sampling: Refreshing | Beside | None) -> LoopResult:
        """Do the phases that are not done, each when the samples and the weights that it needs are there."""
        stopped, steps = None, 0
        for number, phase in enumerate(self.layout.phases):
            if isinstance(phase, Fit):
                steps = phase.last
            if number < self.done:
                continue
            if isinstance(phase, Refresh):
                assert sampling is not None
                sampling.begin(number)
            else:
                if sampling is not None and self.needs(phase, sampling.pending):
                    sampling.wait()
                result = self.fit(phase)
                self.keep_records(phase)
                stopped, steps = result.stopped, result.model_step
            if stopped:
                break
            self.is_done(number, None if sampling is None else sampling.pending)
        if sampling is not None:
            sampling.wait()
        return self.finish(steps, stopped)

    def needs(self, fit: Fit, pending: int | None) -> bool:
        """Whether a fit trains on batches that are being sampled."""
        phase = None if pending is None else self.layout.phases[pending]
        return isinstance(phase, Refresh) and phase.first <= fit.last

    def is_done(self, number: int, pending: int | None) -> None:
        """Note how many phases are done; those after one under way are found to be done by a resume."""
        done = number + 1 if pending is None else pending
        write_state(self.folder, done)
        self.clean(done)

    def fit(self, phase: Fit) -> FitResult:
        run = self.layout.run_folder(phase)
        begun = (run / CONFIG_FILE).exists()
        if not begun:
            shutil.rmtree(run, ignore_errors=True)
        return fit(self.fit_config(phase), resume=begun, progress=self.tell)

    def fit_config(self, phase: Fit) -> FitConfig:
        config, steps = self.config, phase.last - phase.first + 1
        changes: dict[str, Any] = {"steps": steps, "no_signal": "train"}
        if config.fit.get("schedule", "constant") != "constant":
            changes["schedule_steps"] = config.steps
        if config.offline:
            return config.fit_config(self.layout.run_folder(phase), **changes)
        own = config.fit_config(self.layout.run_folder(phase))
        changes["where"] = _rows_of(phase, config.policy) + (f" AND ({own.where}\n)" if own.where else "")
        changes["groups_per_step"] = -(-phase.batches * config.groups_per_step // steps)
        if config.replay:
            preset = own.weight or algorithm(own.algorithm).shaping.get("weight", "1")
            changes["weight"] = f"({preset}) * ({config.replay_weight})"
        if config.lag:
            # Beside a fit newer samples may come, sooner or later: it takes no notice of them.
            changes["newest"] = {config.policy: self.layout.newest_before(phase)}
            changes["on_new_data"] = "ignore"
        if own.reference is None:
            changes["reference"] = config.model
        if phase.first > 1:
            changes["memory_check"] = False  # the first fit had the same model, and passed
            changes["continue_from"] = str(self.layout.checkpoint_after(phase.first - 1))
        return config.fit_config(self.layout.run_folder(phase), **changes)

    def keep_records(self, phase: Fit) -> None:
        """Add what a fit recorded to the records of the loop; a second time it changes nothing."""
        run = self.layout.run_folder(phase)
        add_metrics(run, self.folder, first=phase.first)
        policy, offline = self.config.policy, self.config.offline
        where = None if offline else _rows_of(phase, policy)
        one = not offline and phase.oldest == phase.version
        sampled = (policy, phase.version) if one else None
        add_lineage(run, self.folder, self.ds, where=where, sampled=sampled)

    def clean(self, done: int) -> None:
        """Remove what later phases do not need of earlier fits, but for their records."""
        finished = [phase for phase in self.layout.phases[:done] if isinstance(phase, Fit)]
        for phase in finished[: -self.config.keep_rounds]:
            for name in NOT_KEPT:
                shutil.rmtree(self.layout.run_folder(phase) / name, ignore_errors=True)

    def finish(self, steps: int, stopped: str | None) -> LoopResult:
        last = next(
            p for p in reversed(self.layout.phases) if isinstance(p, Fit) and p.first <= max(steps, 1)
        )
        target = self.folder / MODEL
        staged = target.with_name(f".{MODEL}.tmp")
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(self.layout.run_folder(last) / MODEL, staged)
        checkpoint.publish_folder(staged, target)
        write_run_cards(self.folder, steps)
        where = "true" if self.config.offline else f"policy = {literal(self.config.policy)}"
        query = f"""SELECT count(*) AS n, count(DISTINCT (policy, policy_version)) AS versions
            FROM rollouts WHERE {where}"""
        counted = self.ds.sql(query).to_pylist()[0]
        return LoopResult(self.folder, target, steps, counted["versions"], counted["n"], stopped)


def _rows_of(phase: Fit, policy: str) -> str:
    """The condition on `rollouts` that selects what a fit trains on."""
    fresh = f"TRY_CAST(extra->>'{BATCH}' AS BIGINT) BETWEEN {phase.first} AND {phase.last}"
    rows = f"policy_version = {phase.version} AND {fresh}"
    if phase.oldest < phase.version:
        rows = f"({rows} OR policy_version BETWEEN {phase.oldest} AND {phase.version - 1})"
    return f"policy = {literal(policy)} AND {rows}"


@contextmanager
def _interrupts_named(folder: Path) -> Iterator[None]:
    """Say how to go on with the loop, not with the fit that was interrupted in it."""
    try:
        yield
    except Interrupted as error:
        hint = f"go on with: rec loop {shlex.quote(str(folder / CONFIG_FILE))} --resume"
        raise Interrupted(error.message, hint) from error


def _silent(event: dict[str, Any]) -> None:
    """Tell nobody."""
