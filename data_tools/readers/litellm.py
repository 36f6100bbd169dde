"""Logs of the LiteLLM proxy: its spend log, and the payloads that it writes to object stores.

Every attempt is a record of its own: failed ones, answers from its cache, and calls of which it cut the
middle out of long texts or took the texts out are refused, each under its own reason. A call that several
logs hold has one id, so it counts once; payloads come first, as only they hold whole texts.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from data_tools.readers.base import Carries, Log, Passed, Refused
from data_tools.readers.bodies import answer, asked
from data_tools.readers.exchange import decoded, failure
from data_tools.readers.traced import Call, TracedReader, other_fields, own_columns

MARKS = {"litellm_truncated": "truncated_by_proxy", "redacted-by-litellm": "redacted"}
"""What the proxy writes where it cut a long text in the middle or took a text out: why that is refused."""

USED = (
    "messages", "response", "proxy_server_request", "model_parameters", "startTime", "status", "error_str",
    "cache_hit", "model",
)  # fmt: skip
_NOT_LOOKED_AT = ("logprobs", "tools", "usage")


class LiteLLMReader(TracedReader):
    """One record is one attempt to call a model through the proxy."""

    name = "litellm"
    title = "LiteLLM spend logs and S3/GCS payloads (JSONL, one JSON per call, CSV, Parquet)"
    carries = Carries(
        prompt="yes", group="choices of a call, else equal prompts", logprobs="optional", time="yes"
    )

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose records name LiteLLM's own fields."""
        return any(_is_of_litellm(record) for record in samples)

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Payloads before spend logs."""
        return sorted(super().plan(logs), key=lambda log: b'"proxy_server_request"' in log.head[: 1 << 14])

    def calls(self, record: Any, log: Log) -> Iterator[Call | Refused | Passed]:
        """Yield the call of a record."""
        request = _request(record)
        _refuse_failed(record)
        response = decoded(record.get("response"))
        mark = _mark_in([request, response])
        if mark:
            raise Refused(MARKS[mark], f"a text holds {mark}")
        body, choices = answer(record.get("response"))
        metadata = decoded(record.get("metadata"))
        tagged = metadata if isinstance(metadata, dict) else {}
        columns = own_columns(tagged.get("requester_metadata"), tagged.get("spend_logs_metadata"))
        columns |= {"run": self.name, "sampled_at": record.get("startTime")}
        if not body.get("model"):
            columns["policy"] = record.get("model")
        rest = {name: decoded(value) for name, value in other_fields(record, USED).items()}
        yield Call(_call_id(record), request, body, choices, columns, rest)


def _is_of_litellm(record: Any) -> bool:
    if not isinstance(record, dict) or not {"call_type", "startTime"} <= record.keys():
        return False
    return bool({"litellm_call_id", "model_group", "hidden_params", "custom_llm_provider"} & record.keys())


def _call_id(record: Any) -> str | None:
    """LiteLLM's own id of the attempt, else that of the response, which small servers use again."""
    if record.get("litellm_call_id"):
        return str(record["litellm_call_id"])
    given = record.get("request_id") or record.get("id")
    return f"{given}@{record.get('startTime')}" if given else None


def _request(record: Any) -> dict[str, Any]:
    """What was asked, from the fullest of the places that hold it; sampling parameters may stand beside."""
    proxied = decoded(record.get("proxy_server_request"))
    if isinstance(proxied, dict) and isinstance(proxied.get("body"), dict):
        proxied = proxied["body"]
    parameters = decoded(record.get("model_parameters"))
    request = dict(parameters) if isinstance(parameters, dict) else {}
    return request | asked(proxied) | asked(record.get("messages"))


def _refuse_failed(record: Any) -> None:
    failed = failure({"error": record.get("error_str"), "status": record.get("status")})
    if failed:
        raise Refused("failed_call", failed)
    given = str(record.get("request_id") or record.get("id"))
    if str(record.get("cache_hit")).lower() == "true" or "_cache_hit" in given:
        raise Refused("cache_hit")


def _mark_in(value: Any) -> str | None:
    """The mark of the proxy in a text anywhere in what was asked or answered; None if there is none."""
    if isinstance(value, str):
        return next((mark for mark in MARKS if mark in value), None)
    if isinstance(value, dict):
        value = [item for name, item in value.items() if name not in _NOT_LOOKED_AT]
    if not isinstance(value, list):
        return None
    return next((mark for item in value if (mark := _mark_in(item))), None)
