"""Which engine samples: settings, importable without torch, and the sampler that they name."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from data_tools.errors import ConfigError

if TYPE_CHECKING:
    from offline_rec.sampling.sampler import Sampler
    from offline_rec.sampling.servers import Connection

Engine = Literal["hf", "vllm", "server"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
KEY_VARIABLE = "REC_SERVER_KEY"
"""The environment variable with what servers ask as a password."""


@dataclass(frozen=True)
class SamplerSettings:
    """How a model is sampled.

    `hf`: by transformers in this process; `vllm`: by vLLM in this process; `server`: by the servers at `urls`
    or, with `launch`, by a vLLM server that is started for it with the interpreter `python`.

    `concurrency`: responses (hf) or requests for each server that run at once; `arguments`: command-line
    arguments of vLLM; `seeded`: draw noise that can be drawn again; `verify`: compare log-probs with a
    forward pass of the model before anything is sampled, which needs the memory for it.
    """

    engine: Engine = "hf"
    urls: tuple[str, ...] = ()
    launch: bool = False
    python: str | None = None
    served_model: str | None = None
    concurrency: int | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    arguments: tuple[str, ...] = ()
    seeded: bool = True
    verify: bool = True
    timeout: float = 600.0
    attempts: int = 8
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"unknown engine {self.engine!r}", f"use {', '.join(ENGINES)}")
        if self.engine == "server" and bool(self.urls) == self.launch:
            raise ConfigError(
                "engine server needs either the addresses of servers or one to be launched",
                "name them with --url http://HOST:PORT, or use --launch-vllm",
            )
        if self.engine != "server" and (self.urls or self.launch):
            raise ConfigError(
                f"engine {self.engine} asks no server", "use --engine server, or leave out --url"
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")


def open_sampler(
    model: str | Path, settings: SamplerSettings | None = None
) -> "AbstractContextManager[Sampler]":
    """A sampler of a model directory while the block runs; what was started for it ends with the block.

    Raises RecError where an engine does not start, is not installed, or does not draw from these weights.
    """
    chosen = settings or SamplerSettings()
    opened = {"hf": _open_hf, "vllm": _open_vllm, "server": _open_server}[chosen.engine]
    if chosen.engine == "vllm" or chosen.launch:
        _demand_whole(Path(model))
    return opened(Path(model), chosen)


@contextmanager
def _open_hf(model: Path, settings: SamplerSettings) -> "Iterator[Sampler]":
    from offline_rec.models.loading import choose_device, choose_dtype, load_model, load_tokenizer
    from offline_rec.sampling.hf_sampler import HFSampler

    device = choose_device()
    trust = settings.trust_remote_code
    loaded = load_model(
        model, device=device, dtype=choose_dtype(settings.dtype, device), trust_remote_code=trust
    )
    tokenizer = load_tokenizer(model, trust_remote_code=trust)
    yield HFSampler(loaded, tokenizer, max_sequences=settings.concurrency or 256, trust_remote_code=trust)


@contextmanager
def _open_vllm(model: Path, settings: SamplerSettings) -> "Iterator[Sampler]":
    from offline_rec.sampling.vllm_sampler import VLLMSampler

    sampler = VLLMSampler(
        model,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        seeded=settings.seeded,
        arguments=as_keywords(settings.arguments),
    )
    try:
        _verify(sampler, model, settings)
        yield sampler
    finally:
        sampler.close()


@contextmanager
def _open_server(model: Path, settings: SamplerSettings) -> "Iterator[Sampler]":
    from offline_rec.sampling.server_sampler import ServerSampler
    from offline_rec.sampling.vllm_server import LaunchSettings, launch
    from offline_rec.sampling.vocabulary import Vocabulary

    if not settings.launch:
        sampler = ServerSampler(_connection(settings), Vocabulary.load(model))
        _verify(sampler, model, settings)
        yield sampler
        return
    started = LaunchSettings(
        python=settings.python or sys.executable,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        arguments=settings.arguments,
    )
    with launch(model, started, _connection(settings)) as launched:
        _verify(launched, model, settings)
        yield launched


def _demand_whole(model: Path) -> None:
    from offline_rec.models.adapters import is_adapter

    if is_adapter(model):
        raise ConfigError(
            f"{model} holds an adapter, and vLLM is given whole models",
            "name the directory model/ of the run, into which it was merged, or use --engine hf",
        )


def _connection(settings: SamplerSettings) -> "Connection":
    from offline_rec.sampling.servers import Connection, Patience

    return Connection(
        settings.urls or ("http://127.0.0.1",),  # that of a launched server is known when it runs
        model=settings.served_model,
        concurrency=settings.concurrency,
        key=None if settings.launch else os.environ.get(KEY_VARIABLE),
        patience=Patience(settings.timeout, settings.attempts),
        seeded=settings.seeded,
    )


def _verify(sampler: "Sampler", model: Path, settings: SamplerSettings) -> None:
    if not settings.verify:
        return
    from offline_rec.models.loading import choose_device, choose_dtype
    from offline_rec.models.policy import Policy
    from offline_rec.sampling.verify import verify

    dtype = str(choose_dtype(settings.dtype, choose_device())).removeprefix("torch.")
    # On the CPU: the engine may have all of a GPU's memory.
    policy = Policy.load(model, device="cpu", dtype=dtype, trust_remote_code=settings.trust_remote_code)
    verify(sampler, policy).demand(f"engine {settings.engine}")


def as_keywords(arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of a command line as those of a function: `--max-num-seqs 32` is `max_num_seqs=32`."""
    found: dict[str, Any] = {}
    name = ""
    for part in (piece for argument in arguments for piece in argument.split("=", 1)):
        if part.startswith("--"):
            name = part.removeprefix("--").replace("-", "_")
            found[name] = True
        elif not name:
            raise ConfigError(f"{part!r} is no argument of vLLM", "write --NAME VALUE")
        else:
            found[name] = yaml.safe_load(part)
    return found
