"""Logs of SGLang's own /generate: text, ids and log-probs of the sampled tokens, weight versions.

The log-probs are those after the temperature (`SGLANG_RETURN_ORIGINAL_LOGPROB` would change that, and a log
can say so as `logprob_kind`). A response holds its prompt only as ids, and only where it was asked for all of
them; else the request must be in the log. Ids include the stop token.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from data_tools.readers.base import Carries, Log, RecordReader, Refused, Values
from data_tools.readers.exchange import Object
from data_tools.readers.native import NativeForm
from data_tools.readers.token_logprobs import TokenLogprobs

NOT_KEPT = frozenset(
    f"{side}_{kind}_logprobs"
    for side in ("input", "output")
    for kind in ("token", "top", "token_ids")
) | {"hidden_states", "routed_experts"}  # fmt: skip


def _choices(response: Object) -> list[Object]:
    logged = response.get("meta_info")
    if not isinstance(logged, dict):
        raise Refused("bad_record", f"meta_info is no object but {type(logged).__name__}")
    if "finish_reason" in logged and logged["finish_reason"] is None:
        raise Refused("bad_record", "a piece of a stream, not a whole response: finish_reason is null")
    choice = {name: value for name, value in logged.items() if name not in NOT_KEPT}
    choice |= {
        "response_id": logged.get("id"),
        "text": response.get("text"),
        "token_ids": response.get("output_ids"),
        "prompt_token_ids": response.get("prompt_token_ids") or _prompt_ids(logged),
        "logprobs": _tokens(logged.get("output_token_logprobs")),
    }
    finish = logged.get("finish_reason")
    if (
        isinstance(finish, dict)
        and finish.get("type") == "abort"
        and not (choice["text"] or choice["token_ids"])
    ):
        choice["error"] = finish.get("message") or "aborted"
    return [choice]


def _prompt_ids(logged: Object) -> list[int] | None:
    """Ids of the prompt from its log-probs, if they cover all of it: they may start anywhere in it."""
    tokens = _tokens(logged.get("input_token_logprobs"))
    whole = (
        tokens is not None
        and tokens.values[:1] == [None]
        and len(tokens.values) == logged.get("prompt_tokens")
    )
    return tokens.ids if tokens is not None and whole else None


def _tokens(entries: Any) -> TokenLogprobs | None:
    """Entries [log-prob, id, text or null] of tokens."""
    if not isinstance(entries, list) or not entries:
        return None
    if set(map(type, entries)) != {list} or set(map(len, entries)) != {3}:
        entries = [_three(entry) for entry in entries]
    values, ids, texts = map(list, zip(*entries, strict=True))
    return TokenLogprobs.of(values, texts, ids)


def _three(entry: Any) -> list[Any]:
    """An entry of any shape as one of three parts."""
    return [*entry, None, None, None][:3] if isinstance(entry, list) else [None] * 3


FORM = NativeForm(
    mark="meta_info",
    fields=frozenset({"text", "output_ids", "prompt_token_ids", "meta_info", "index"}),
    prompts=("text", "input_ids"),
    choices=_choices,
)


class SglangReader(RecordReader):
    """One record is a response of /generate, alone or with its request; arrays are taken apart."""

    name = "sglang"
    title = "SGLang /generate, request and response (JSONL, JSON, Parquet)"
    carries = Carries(
        prompt="ids if all were asked for, or from the request",
        group="responses of a call, else equal prompts",
        reward="field beside the call",
        ids="yes",
        logprobs="optional, after temperature",
        version="yes, per token if it changed",
    )

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose responses have SGLang's `meta_info` beside a text or ids."""
        found = next(filter(None, map(FORM.responses, samples)), [])
        return any(
            isinstance(response["meta_info"], dict) and bool({"text", "output_ids"} & response.keys())
            for response in found
        )

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the responses of a record."""
        yield from FORM.rows(record)
