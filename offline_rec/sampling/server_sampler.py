"""Sampling from servers with the OpenAI API (vLLM, SGLang) that hold the model of a local directory.

Prompts go out as token ids, made here, to `/v1/completions`, and the engine's own ids come back with their
log-probs. A server that gives none is of no use: ids that are made again from the text are not always the
ones that were drawn, and only those have log-probs. Each request says every setting that changes the
distribution, so that a server's own defaults change nothing.
"""

import asyncio
import queue
import threading
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_tools.errors import ConfigError
from offline_rec.sampling.completions import COMPLETIONS, read_choice, settings
from offline_rec.sampling.prompts import PromptReader, Request
from offline_rec.sampling.sampler import Prompt, Sample, Sampler, SamplingParams
from offline_rec.sampling.server_probe import Answers, examine
from offline_rec.sampling.servers import Connection, Malformed, Servers, in_thread
from offline_rec.sampling.vocabulary import Vocabulary

RESPONSES_IN_FLIGHT = 512
"""Responses that a server is asked for at once, unless told: what fills the batches of a large GPU."""

Result = tuple[Request, list[Sample]]


class ServerSampler(Sampler):
    """Samples the servers of `connection`, which must hold the model that `vocabulary` is of.

    They are examined first: RecError says where their tokenizer or their log-probs do not do.
    """

    def __init__(self, connection: Connection, vocabulary: Vocabulary) -> None:
        self.connection = connection
        self.vocabulary = vocabulary
        self.answers: Answers = in_thread(lambda: examine(connection, vocabulary))
        context = self.answers.context or vocabulary.context
        self.reader = PromptReader(vocabulary, context)

    def stream(
        self,
        prompts: Sequence[str | Prompt],
        n: int,
        params: SamplingParams,
        *,
        skip: Container[int] = (),
    ) -> Iterator[tuple[int, list[Sample]]]:
        """The number of each prompt with its `n` samples, as the servers finish them.

        When a prompt cannot be had, those that the servers are at are still given, then the error is raised.
        """
        self.answers.check(params)
        with _Work(self, self.reader.requests(prompts, n, params, skip), params) as work:
            for request, samples in work:
                yield request.prompt, samples

    def update_weights(self, directory: str | Path) -> None:
        """Not possible: how a server that others started gets weights is theirs to know."""
        raise ConfigError(
            f"the servers {', '.join(self.connection.urls)} were started by others: they keep their weights",
            f"restart them with {directory}, or let this command start one",
        )

    def body(self, request: Request, params: SamplingParams) -> dict[str, Any]:
        """What a server is sent."""
        return {
            "model": self.answers.model,
            "prompt": request.ids,
            "n": request.draws(params),
            **({"seed": request.seed} if self.connection.seeded and self.answers.seeds else {}),
            **settings(params, self.vocabulary.stop_ids),
        }

    def read(self, body: Any, request: Request, params: SamplingParams) -> list[Sample]:
        """The samples in an answer, in the order of their numbers; Malformed if there are not all of them."""
        choices = sorted(body["choices"], key=lambda choice: choice["index"])
        n = request.draws(params)
        if [choice["index"] for choice in choices] != list(range(n)):
            raise Malformed(f"{len(choices)} choices for n = {n}")
        drawn = [read_choice(choice, request.ids, self.vocabulary, params) for choice in choices]
        return request.samples(drawn, self.vocabulary)


class _Work:
    """Requests under way in a thread with an event loop of its own; iterating gives what is finished."""

    def __init__(self, sampler: ServerSampler, requests: list[Request], params: SamplingParams) -> None:
        self._sampler = sampler
        self._params = params
        self._waiting = iter(requests)
        responses = max((len(request.keys) for request in requests), default=1)
        limit = sampler.connection.concurrency or max(RESPONSES_IN_FLIGHT // responses, 1)
        self._width = min(limit * len(sampler.connection.urls), max(len(requests), 1))
        self._done: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()
        self._failed = False
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="rec-requests", daemon=True)

    def __enter__(self) -> "_Work":
        self._task = self._loop.create_task(self._all())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Cancelling closes the connections, at which servers stop to generate.
        if self._task is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._loop.close()

    def __iter__(self) -> Iterator[Result]:
        error = None
        while (item := self._done.get()) is not None:
            if isinstance(item, BaseException):
                error = error or item
            else:
                yield item
        if error is not None:
            raise error

    def _run(self) -> None:
        assert self._task is not None
        try:
            self._loop.run_until_complete(self._task)
        except BaseException as error:  # raised where the results are taken
            self._done.put(error)
        finally:
            self._done.put(None)

    async def _all(self) -> None:
        async with self._sampler.connection.open() as servers, asyncio.TaskGroup() as group:
            for _ in range(self._width):
                group.create_task(self._work(servers))

    async def _work(self, servers: Servers) -> None:
        for request in self._waiting:
            # What is finished and not yet taken is kept in memory: not more than is under way.
            while self._done.qsize() > self._width and not self._failed:
                await asyncio.sleep(0.02)
            if self._failed:
                return
            try:
                self._done.put((request, await self._one(servers, request)))
            except Exception as error:  # the others may end what they are at
                self._failed = True
                self._done.put(error)

    async def _one(self, servers: Servers, request: Request) -> list[Sample]:
        sampler, params = self._sampler, self._params
        return await servers.ask(
            COMPLETIONS, sampler.body(request, params), lambda body: sampler.read(body, request, params)
        )
