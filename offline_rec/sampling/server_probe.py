"""What a server holds and gives, asked before it is used: its tokens, its log-probs, its seeds.

No weights are needed for it: log-probs from before the temperature do not change with the temperature, and a
token that top-k leaves no choice in has log-prob 0 only where log-probs are of the distribution drawn from.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from data_tools.errors import ConfigError, DataError
from offline_rec.sampling.completions import COMPLETIONS, settings
from offline_rec.sampling.sampler import SamplingParams
from offline_rec.sampling.servers import Connection, Malformed, ServerFailed, Servers
from offline_rec.sampling.vocabulary import Vocabulary

PROBE_TEXT = "Q: 12 + 345 = ?\nA: naïve 日本 (test_case) <b>\n\n  x'll"
SPREAD = 64
"""Tokens from all over the vocabulary whose texts, too, must become the same ids."""

HALVED = 0.5
SCALED = 1.4
"""Gaps between log-probs double at half the temperature where the temperature is in them, else they stay."""

Kind = Literal["processed", "tempered", "raw"]


@dataclass(frozen=True)
class Answers:
    """The name of the model, the tokens that it takes in all, and of which distribution its log-probs are.

    `processed`: the one drawn from; `tempered`: that without top-k and top-p; `raw`: without temperature too.
    Where `seeds` is false, a seed would make all samples of a request the same.
    """

    model: str
    context: int | None
    kind: Kind
    seeds: bool

    def check(self, params: SamplingParams) -> None:
        """Raise ConfigError where the log-probs would not be of the distribution drawn from."""
        cut = params.top_p < 1 or params.top_k > 0
        if params.temperature == 0 or self.kind == "processed" or (self.kind == "tempered" and not cut):
            return
        if self.kind == "raw" and params.temperature == 1 and not cut:
            return
        without = "temperature, top-p and top-k" if self.kind == "raw" else "top-p and top-k"
        raise ConfigError(
            f"the server's log-probs are from before {without}: they are not of the distribution drawn from",
            "start vLLM with --logprobs-mode processed_logprobs, or sample at --temperature 1 without top-p"
            " and top-k",
        )


async def examine(connection: Connection, vocabulary: Vocabulary) -> Answers:
    """Ask every server of the connection; RecError if they do not serve the model of that vocabulary."""
    found = await asyncio.gather(
        *(_examine_one(replace(connection, urls=(url,)), url, vocabulary) for url in connection.urls)
    )
    for url, answers in zip(connection.urls, found, strict=True):
        if (answers.model, answers.kind) != (found[0].model, found[0].kind):
            raise ConfigError(
                f"{url} serves {answers.model} with {answers.kind} log-probs, {connection.urls[0]} "
                f"{found[0].model} with {found[0].kind} ones",
                "start all servers alike",
            )
    contexts = [answers.context for answers in found if answers.context is not None]
    return replace(
        found[0], context=min(contexts, default=None), seeds=all(answers.seeds for answers in found)
    )


async def _examine_one(connection: Connection, url: str, vocabulary: Vocabulary) -> Answers:
    async with connection.open() as servers:
        model, context = await servers.ask("/v1/models", None, lambda body: _served(body, connection, url))
        probe = _Probe(servers, url, model, vocabulary)
        ids = await probe.tokens(context or vocabulary.context)
        kind = await probe.kind([ids[: 1 + cut] for cut in range(min(8, len(ids)))])
        return Answers(model, context, kind, await probe.seeds(ids[:8]))


def _served(body: Any, connection: Connection, url: str) -> tuple[str, int | None]:
    """The model's name on the server, and how many tokens it takes."""
    cards = {card["id"]: card.get("max_model_len") for card in body["data"]}
    name = connection.model or (next(iter(cards)) if len(cards) == 1 else None)
    if name is None or name not in cards:
        asked = "no model is named" if name is None else f"it does not serve {name}"
        raise ConfigError(f"{url}: {asked}; it serves {', '.join(cards)}", "name one with --served-model")
    return name, cards[name]


@dataclass(frozen=True)
class _Probe:
    """Questions to one server."""

    servers: Servers
    url: str
    model: str
    vocabulary: Vocabulary

    async def _ask(self, prompt: Any, params: SamplingParams, **more: Any) -> list[Any]:
        """The choices of an answer."""
        body = {"model": self.model, "prompt": prompt, **settings(params, self.vocabulary.stop_ids), **more}

        def read(answer: Any) -> list[Any]:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if not choices:
                raise Malformed("no choices")
            return choices

        return await self.servers.ask(COMPLETIONS, body, read)

    async def tokens(self, context: int | None) -> list[int]:
        """Ids of the probe, the same on both sides."""
        tokenizer, size = self.vocabulary.tokenizer, min(self.vocabulary.size, len(self.vocabulary.tokenizer))
        spread = [i * size // SPREAD for i in range(SPREAD)] if context is None or context > 256 else []
        text = PROBE_TEXT + tokenizer.decode(spread, skip_special_tokens=True)
        (choice,) = await self._ask(text, SamplingParams(max_tokens=1))
        if choice.get("token_ids") is None or choice.get("prompt_token_ids") is None:
            raise ServerFailed(
                f"{self.url} gives no token ids, which log-probs are of no use without",
                "use a version of vLLM or SGLang that knows return_token_ids, or --engine hf",
            )
        given: list[int] = choice["prompt_token_ids"]
        own = [tokenizer(text, add_special_tokens=special)["input_ids"] for special in (True, False)]
        if given not in own:
            raise self._other_tokenizer(given, min(own, key=lambda ids: len(ids) != len(given)))
        return given

    def _other_tokenizer(self, given: Sequence[int], own: Sequence[int]) -> DataError:
        at = next((i for i, (a, b) in enumerate(zip(given, own, strict=False)) if a != b), len(own) - 1)
        sides = [ids[at] if at < len(ids) else None for ids in (given, own)]
        return DataError(
            f"{self.url} serves {self.model} with another tokenizer than the model's: token {at} of a text "
            f"is {sides[0]} there, and {sides[1]} here",
            "start the server with the directory that --model names",
        )

    async def kind(self, prompts: list[list[int]]) -> Kind:
        """Of which distribution the log-probs are."""
        plain, halved = [
            await self._gaps(prompts, SamplingParams(temperature=t, max_tokens=1)) for t in (1.0, HALVED)
        ]
        only = await self._ask(prompts, SamplingParams(top_k=1, max_tokens=1))
        if halved < SCALED * plain:
            return "raw"
        certain = all(abs(choice["logprobs"]["token_logprobs"][0]) < 1e-4 for choice in only)
        return "processed" if certain else "tempered"

    async def _gaps(self, prompts: list[list[int]], params: SamplingParams) -> float:
        """Sum of the gaps between the two most likely tokens behind each prompt."""
        choices = await self._ask(prompts, params, logprobs=2, return_tokens_as_token_ids=True)
        gaps = 0.0
        for choice in choices:
            first, second, *_ = sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)
            gaps += first - second
        return gaps

    async def seeds(self, prompt: list[int]) -> bool:
        """Whether the samples of one request with a seed differ."""
        params = SamplingParams(temperature=1.5, max_tokens=8)
        choices = await self._ask(prompt, params, n=4, seed=0)
        return len({tuple(choice["token_ids"]) for choice in choices}) > 1
