"""The refreshes of a loop, one after another, each done once however often it is begun."""

import logging
from typing import TYPE_CHECKING, Any

import torch

from data_tools.errors import ConfigError, RecError
from offline_rec import rewards
from offline_rec.data.order import shuffled
from offline_rec.looping.config import LoopConfig
from offline_rec.looping.layout import PROMPTS_FILE, Layout
from offline_rec.looping.regime import Refresh
from offline_rec.rewards import Reward
from offline_rec.sampling.choose import SamplerSettings
from offline_rec.sampling.journal import is_unfinished, read_task
from offline_rec.sampling.kept import KeptSampler
from offline_rec.sampling.refresh import Progress, journal_folder, newest_version, refresh
from offline_rec.sampling.sampled_rows import Task
from offline_rec.sampling.sampler import SamplingParams
from offline_rec.sampling.verify_samples import OtherWeights

if TYPE_CHECKING:
    from data_tools.dataset import Dataset

log = logging.getLogger(__name__)

BATCH = "loop_step"
"""Field of a row's `extra`: the update that trains on it first."""


class Refreshing:
    """Samples the batches of a loop's phases; `close` ends an engine that was kept for the next one."""

    pending: int | None = None
    """The phase that is under way and has to be waited for: none, as each is done when `begin` returns."""

    def __init__(self, layout: Layout, ds: "Dataset", tell: Progress) -> None:
        self.layout = layout
        self.config = layout.config
        self.ds = ds
        self.tell = tell
        self.reward = reward_of(self.config)
        self.task = read_task(layout.folder / PROMPTS_FILE)
        self.settings = sampler_settings(self.config)
        self.kept = KeptSampler(self.settings) if is_kept(self.config, self.settings) else None
        self._went_on = False

    def begin(self, number: int) -> None:
        """Sample the batches of a phase, unless that was done before."""
        phase = self.layout.phases[number]
        assert isinstance(phase, Refresh)
        try:
            self._refresh(phase)
        except RecError as error:
            if self.kept is None or not (self.kept.died or isinstance(error, OtherWeights)):
                raise
            log.warning("version %d: %s; sampling goes on with a new engine", phase.version, error.message)
            self.kept.close()
            self._went_on = False
            self._refresh(phase)

    def wait(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """End the engine, if one is open."""
        if self.kept is not None:
            self.kept.close()

    def _refresh(self, phase: Refresh) -> None:
        config = self.config
        # A loop that was killed may have done it, or begun it, without its state saying so.
        resume = is_unfinished(journal_folder(self.ds, config.policy))
        if not resume and not self._went_on:
            newest = newest_version(self.ds, config.policy)
            if newest is not None and newest >= phase.version:
                return
        refresh(
            self.ds,
            self.layout.model_after(phase.updates),
            prompts=None if resume else self.batches(phase.first, phase.last),
            n=config.n,
            params=SamplingParams(
                config.temperature, config.top_p, config.top_k, config.max_tokens, config.seed
            ),
            policy=config.policy,
            version=phase.version,
            reward=self.reward,
            sampler=self.kept or self.settings,
            resume=resume,
            progress=self.tell,
        )
        self._went_on = True  # what follows was not done before: only this loop samples the policy

    def batches(self, first: int, last: int) -> Task:
        """The prompts of some batches: a part of an endless stream, shuffled anew in each pass."""
        total, size = len(self.task.prompts), self.config.groups_per_step
        orders: dict[int, list[int]] = {}
        chosen: list[int] = []
        for place in range((first - 1) * size, last * size):
            epoch, ordinal = divmod(place, total)
            if epoch not in orders:
                orders[epoch] = shuffled(total, self.config.seed, epoch).tolist()
            chosen.append(orders[epoch][ordinal])
        columns = {name: [values[i] for i in chosen] for name, values in self.task.columns.items()}
        columns[BATCH] = [first + number // size for number in range(len(chosen))]
        return Task([self.task.prompts[i] for i in chosen], columns)


def reward_of(config: LoopConfig) -> Reward | None:
    """The reward that a loop judges by; none offline."""
    if config.offline or config.reward is None:
        return None
    return rewards.get(config.reward, **config.reward_options)


def sampler_settings(config: LoopConfig) -> SamplerSettings:
    """The settings of the sampler; ConfigError where they are none."""
    try:
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in config.sampler.items()
        }
        return SamplerSettings(**given)
    except TypeError as error:
        raise ConfigError(f"sampler: {error}".replace("SamplerSettings.__init__() ", "")) from error


def is_kept(config: LoopConfig, settings: SamplerSettings) -> bool:
    """Whether an engine stays open from round to round."""
    if config.keep_sampler is not None:
        return config.keep_sampler
    slow_to_start = settings.engine == "vllm" or settings.launch
    return slow_to_start and (config.side_by_side or not torch.cuda.is_available())
