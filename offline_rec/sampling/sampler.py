"""What every sampler takes and gives: prompts and parameters in, responses with ids and log-probs out.

An engine is one class with the method `stream` of `Sampler`. Everything an off-policy objective needs is
recorded here, at the source: the engine's own token ids, and the log-prob of each of them under the
distribution that it was really drawn from.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_tools.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a response continues, in the form of a dataset: plain text or a JSON list of chat messages.

    `tools` is the JSON of tool definitions. Token ids, where given, go before the text.
    """

    text: str
    tools: str | None = None
    ids: Sequence[int] | None = None


Progress = Callable[[int], None]
"""Called with the number of samples that were finished since the last call."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn: scores over the temperature, then `top_k`, then `top_p`, then renormalised.

    `temperature` 0 is greedy; `top_k` 0 keeps all tokens. `max_tokens` counts the end-of-sequence token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}", "1 keeps every token")
        if self.top_k < 0:
            raise ConfigError(f"top_k must not be negative, got {self.top_k}", "0 keeps every token")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One response as its engine drew it.

    `logprobs[t]` belongs to `response_ids[t]`, after temperature, top-k and top-p (a greedy token, being
    certain, has 0). `finish_reason` is `stop`, the ids ending with the end-of-sequence token, or `length`.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str


class Sampler(Protocol):
    """An engine that samples one policy."""

    def stream(
        self,
        prompts: Sequence[str | Prompt],
        n: int,
        params: SamplingParams,
        *,
        skip: Container[int] = (),
    ) -> Iterator[tuple[int, list[Sample]]]:
        """The number of each prompt with its `n` samples, as prompts finish, in any order.

        Prompts whose number is in `skip` are left out: their samples are there already, and what is drawn
        for the others is what it would have been beside them. Closing the iterator ends the sampling.
        """
        ...

    def sample(
        self,
        prompts: Sequence[str | Prompt],
        n: int,
        params: SamplingParams,
        *,
        progress: Progress | None = None,
    ) -> list[list[Sample]]:
        """`n` samples for each of `prompts`, in their order."""
        found: list[list[Sample]] = [[] for _ in prompts]
        for number, samples in self.stream(prompts, n, params):
            found[number] = samples
            if progress is not None:
                progress(len(samples))
        return found

    @property
    def alive(self) -> bool:
        """Whether it can still be asked: what it asks may have ended."""
        return True

    def update_weights(self, directory: str | Path) -> None:
        """Go on with the weights of another directory, of the same tokenizer.

        Raises RecError where the engine cannot be brought to draw from them, as a forward pass knows them.
        """
        ...


@dataclass
class Noise:
    """The uniform numbers of each sample, a function of the seed, the prompt and the sample's number alone.

    So a sample depends neither on its batch nor on what else is asked for, a sampling that was cut off can
    be completed, and two policies sampled with one seed share their noise. A prompt that occurs again in the
    same call goes on counting its samples.
    """

    seed: int
    _drawn: Counter[bytes] = field(default_factory=Counter)

    def numbers(self, prompt_ids: Sequence[int], n: int) -> list[bytes]:
        """Keys of the next `n` samples of a prompt."""
        prompt = np.asarray(prompt_ids, np.int64).tobytes()
        first = self._drawn[prompt]
        self._drawn[prompt] += n
        start = hashlib.blake2b(prompt, digest_size=16, salt=self.seed.to_bytes(16, "little", signed=True))
        keys = []
        for number in range(first, first + n):
            state = start.copy()
            state.update(number.to_bytes(8, "little"))
            keys.append(state.digest())
        return keys

    @staticmethod
    def uniforms(keys: Sequence[bytes], count: int) -> NDArray[np.float64]:
        """[len(keys), count] numbers in [0, 1)."""
        rows = np.empty((len(keys), count))
        for row, key in zip(rows, keys, strict=True):
            bits = np.random.Philox(key=int.from_bytes(key, "little"))
            np.random.Generator(bits).random(out=row)
        return rows
