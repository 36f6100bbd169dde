"""What is asked of a server at `/v1/completions`, and what is taken from its answers."""

import math
from collections.abc import Collection
from typing import Any

from data_tools.errors import DataError
from offline_rec.sampling.sampler import SamplingParams
from offline_rec.sampling.servers import Malformed
from offline_rec.sampling.vocabulary import Vocabulary

COMPLETIONS = "/v1/completions"


def settings(params: SamplingParams, stop_ids: Collection[int]) -> dict[str, Any]:
    """Everything that a request says of how tokens are drawn and what comes back."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "max_tokens": params.max_tokens,
        "stop_token_ids": sorted(stop_ids),
        # A server takes what is not said from the model's generation_config.json.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,  # that of the token itself, and no others
        "return_token_ids": True,
    }


def read_choice(
    choice: Any, prompt_ids: list[int], vocabulary: Vocabulary, params: SamplingParams
) -> tuple[list[int], list[float]]:
    """Ids of one response and their log-probs; a token that is drawn greedily, being certain, has 0."""
    if choice["finish_reason"] not in ("stop", "length"):
        raise Malformed(f"a response that ended by {choice['finish_reason']!r}")
    ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, list) or not 0 < len(ids) == len(logprobs):
        raise Malformed("not as many log-probs as token ids")
    if not all(isinstance(x, float | int) and math.isfinite(x) for x in logprobs):
        raise Malformed("log-probs that are no numbers")
    if choice.get("prompt_token_ids", prompt_ids) not in (prompt_ids, None):
        raise DataError(
            "the server took other prompt ids than it was sent", "its tokenizer is not that of the model"
        )
    vocabulary.check(ids, choice["finish_reason"])
    # Rounding may put the log-prob of a certain token above 0.
    return ids, [0.0 if params.temperature == 0 else min(float(x), 0.0) for x in logprobs]
