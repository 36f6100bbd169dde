"""Prompts as an engine gets them: token ids, within what the model can take, and a noise for each."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from data_tools.errors import ConfigError, DataError
from offline_rec.data.encoding import UNUSABLE, TextRow
from offline_rec.sampling.sampler import Noise, Prompt, Sample, SamplingParams
from offline_rec.sampling.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of an engine: samples of the prompt of that number, one for each key of `Noise`."""

    prompt: int
    ids: list[int]
    keys: list[bytes]

    @property
    def seed(self) -> int:
        """A seed for engines that make their own noise; sample i of the request may add i to it."""
        return int.from_bytes(self.keys[0][:8], "little") >> 2

    def draws(self, params: SamplingParams) -> int:
        """How many samples an engine has to draw: greedy ones are all the same, and vLLM gives one."""
        return len(self.keys) if params.temperature else 1

    def samples(self, drawn: Sequence[tuple[list[int], list[float]]], vocabulary: Vocabulary) -> list[Sample]:
        """A sample for each key, from the ids and log-probs that were drawn."""
        texts = vocabulary.texts([ids for ids, _ in drawn])
        made = [
            Sample(self.ids, ids, logprobs, vocabulary.finish_reason(ids), text)
            for (ids, logprobs), text in zip(drawn, texts, strict=True)
        ]
        return made * (len(self.keys) // len(drawn))


@dataclass(frozen=True)
class PromptReader:
    """Prompts to requests to an engine that takes `context` tokens in all, None for any number."""

    vocabulary: Vocabulary
    context: int | None

    def encode(self, prompts: Sequence[str | Prompt]) -> list[list[int]]:
        """Token ids of prompts, as responses that were logged as text get theirs; DataError names the first
        prompt that has none."""
        given = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
        made = self.vocabulary.encoder.encode([TextRow(p.text, p.tools, "", None, "length") for p in given])
        ids: list[list[int]] = []
        for number, (prompt, encoded) in enumerate(zip(given, made, strict=True)):
            if prompt.ids is not None and len(prompt.ids):
                ids.append([int(i) for i in prompt.ids])
            elif isinstance(encoded, str):
                raise DataError(f"prompt {number}: {UNUSABLE[encoded]}")
            else:
                ids.append(encoded.prompt_ids)
        return ids

    def requests(
        self, prompts: Sequence[str | Prompt], n: int, params: SamplingParams, skip: Container[int] = ()
    ) -> list[Request]:
        """`n` samples of each prompt, but of those in `skip`, whose noise is passed over."""
        if n < 1:
            raise ConfigError(f"the number of samples a prompt must be at least 1, got {n}")
        noise, made = Noise(params.seed), []
        for number, ids in enumerate(self.encode(prompts)):
            keys = noise.numbers(ids, n)
            if number not in skip:
                self._check(number, ids, params.max_tokens)
                made.append(Request(number, ids, keys))
        return made

    def _check(self, number: int, ids: list[int], max_tokens: int) -> None:
        if self.context is not None and len(ids) + max_tokens > self.context:
            raise DataError(
                f"prompt {number} has {len(ids)} tokens; with {max_tokens} new ones that is more "
                f"than the {self.context} positions of the model",
                "lower max_tokens or leave the prompt out",
            )
        if not 0 <= min(ids) <= max(ids) < self.vocabulary.size:
            raise DataError(
                f"prompt {number} has token ids outside the model's vocabulary of {self.vocabulary.size}",
                "its ids are of another tokenizer: give the prompt as text",
            )
