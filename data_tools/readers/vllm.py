"""Logs of a vLLM server: OpenAI's API with token ids, weight versions and stop reasons besides.

What vLLM adds is read wherever it stands (completions.py); this reader tells its logs, and what they carry.
Whether its log-probs are those before (`raw_logprobs`, the default) or after temperature and top-p
(`processed_logprobs`) is not in a response: it is unknown unless the log says so. Ids include the stop token.
"""

from collections.abc import Sequence
from typing import Any

from data_tools.collecting.reasons import Refused
from data_tools.readers.base import Carries, Log
from data_tools.readers.exchange import Exchange, exchange, is_exchange
from data_tools.readers.openai import OpenAIReader
from data_tools.readers.token_logprobs import token_logprobs

OF_BODY = {"prompt_token_ids", "prompt_logprobs", "kv_transfer_params", "prompt_text"}
OF_CHOICE = {"token_ids", "stop_reason", "prompt_token_ids", "weight_versions", "routed_experts"}


class VllmReader(OpenAIReader):
    """One record is one call to a vLLM server, with its request or the prompt ids it returned."""

    name = "vllm"
    title = (
        "vLLM server responses, with return_token_ids or return_tokens_as_token_ids (JSONL, JSON, Parquet)"
    )
    carries = Carries(
        prompt="ids, or from the request",
        group="choices of a call, else equal prompts",
        reward="field beside the call",
        ids="optional",
        logprobs="optional",
        version="optional, per token",
        time="yes",
    )

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first call with a response shows what only vLLM writes.

        The first alone counts: a log that grows must not change its format, or its ids would change.
        """
        return next((_is_of_vllm(call) for call in map(_answered, samples) if call is not None), False)


def _answered(record: Any) -> Exchange | None:
    if not is_exchange(record):
        return None
    try:
        return exchange(record)
    except Refused:
        return None


def _is_of_vllm(call: Exchange) -> bool:
    choices = [choice for choice in call.choices if isinstance(choice, dict)]
    if OF_BODY & call.body.keys() or any(OF_CHOICE & choice.keys() for choice in choices):
        return True
    tokens = [token_logprobs(choice.get("logprobs")) for choice in choices]
    return any(found is not None and found.ids is not None for found in tokens)
