"""The sampler that settings ask for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data_tools.errors import ConfigError
from offline_rec.sampling.sampler import Sampler


@dataclass(frozen=True)
class SamplerSettings:
    """Which engine samples."""

    engine: str = "hf"


@contextmanager
def open_sampler(model: str | Path, settings: SamplerSettings) -> Iterator[Sampler]:
    """A sampler of a model directory, closed in the end; ConfigError for an unknown engine."""
    if settings.engine != "hf":
        raise ConfigError(f"unknown engine {settings.engine!r}", "known: hf")
    from offline_rec.models.policy import Policy
    from offline_rec.sampling.hf_sampler import HFSampler

    policy = Policy.load(model)
    yield HFSampler(policy.model, policy.tokenizer)
