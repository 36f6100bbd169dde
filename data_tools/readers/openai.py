"""Logs of OpenAI's API and of servers that speak it: requests and responses, chat or legacy completions."""

from collections.abc import Iterator, Sequence
from typing import Any

from data_tools.readers.base import Carries, Log, RecordReader, Refused, Values
from data_tools.readers.completions import completions
from data_tools.readers.exchange import exchange, is_exchange


class OpenAIReader(RecordReader):
    """One record is one call, {request, response} in any of the usual spellings; its choices are one group.

    A body without its request has no prompt, unless it echoes it.
    """

    name = "openai"
    title = "OpenAI chat and legacy completions, request and response (JSONL, JSON, Parquet)"
    carries = Carries(
        prompt="from the request",
        group="choices of a call, else equal prompts",
        reward="field beside the call",
        ids="optional",
        logprobs="optional",
        version="field beside the call",
        time="yes",
    )

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log that has a call among its first records."""
        return any(map(is_exchange, samples))

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the choices of a call."""
        yield from completions(exchange(record))
