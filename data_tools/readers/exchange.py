"""One logged call to an OpenAI-compatible server: its request, the body that came back, the log's own fields.

There is no standard for logging the pair, only habits; the tables here name them. Which fields a log uses is
told by what they hold, so that a log may change its habit from record to record.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from data_tools.collecting.prompts import is_chat
from data_tools.collecting.reasons import Refused
from data_tools.readers.stream_pieces import streamed_body

Object = dict[str, Any]

RESPONSES = ("response", "response_body", "output", "outputs", "completion", "body")
REQUESTS = ("request", "request_body", "body", "input", "inputs", "proxy_server_request", "kwargs")
PARAMETERS = (
    "model_parameters", "parameters", "sampling_params", "sampling_parameters", "invocation_params",
    "extra_body",
)  # fmt: skip
"""Objects, within a request or beside it, that hold its sampling parameters."""

ASKED = ("messages", "prompt", "tools", "functions", "temperature", "top_p", "top_k", "n", "echo")
"""Fields of a request that may also stand beside the response, in a record that is no pair."""

RETURNED = (
    "id", "object", "created", "model", "choices", "usage", "prompt_token_ids", "prompt_logprobs",
    "prompt_text", "error",
)  # fmt: skip
"""Fields of a response body, by which one that stands in the record itself is taken out of it."""

STATUSES = ("status_code", "response_status", "http_status", "status")
ERRORS = ("error", "exception", "error_str")


@dataclass(slots=True)
class Exchange:
    """A call. `choices` are the responses as logged; `body` is the rest of what the server said.

    `around` holds the fields of the record that belong to neither side: the log's own, such as a reward.
    `beside` holds those that only go to `extra`: no column is looked for among them.
    """

    request: Object = field(default_factory=dict)
    body: Object = field(default_factory=dict)
    choices: list[Any] = field(default_factory=list)
    around: Object = field(default_factory=dict)
    beside: Object = field(default_factory=dict)


def exchange(record: Any) -> Exchange:
    """Take a record apart; raises Refused where the call failed, hit a cache, or has no response."""
    if not isinstance(record, dict):
        raise Refused("not_an_object", "an element that is no object")
    around = dict(record)
    body, wrapper = _body(around)
    request = _request(around)
    failed = failure(body or {}, wrapper, around)
    if failed:
        raise Refused("failed_call", failed)
    if str(around.get("cache_hit")).lower() == "true":
        raise Refused("cache_hit")
    if body is None:
        raise Refused("no_response", "a request without a response")
    choices = decoded(body.pop("choices", None))
    if not isinstance(choices, list):
        raise Refused("bad_record", f"choices is no list but {type(choices).__name__}")
    if not choices:
        raise Refused("no_response", "choices is empty")
    return Exchange(request, body, choices, {**wrapper, **around})


def is_exchange(record: Any) -> bool:
    """Whether a record is such a call, also a failed one; a piece of a stream is none."""
    if not isinstance(record, dict):
        return False
    around = dict(record)
    body, wrapper = _body(around)
    if body is not None and _are_choices(body.get("choices")):
        return True
    asked = "request" in record and bool({"messages", "prompt"} & _request(around).keys())
    is_call = asked or {"custom_id", "response"} <= record.keys()  # the latter: a line of a batch
    return is_call and (body is not None or bool(failure(wrapper, around)))


def _are_choices(value: Any) -> bool:
    """Whether these are the choices of a response, rather than pieces of a stream or options of a quiz."""
    value = decoded(value)
    if not isinstance(value, list):
        return False
    return any(isinstance(choice, dict) and _is_choice(choice) for choice in value)


def _is_choice(choice: Object) -> bool:
    whole = "text" in choice and bool({"index", "finish_reason", "logprobs"} & choice.keys())
    return (whole or isinstance(choice.get("message"), dict)) and "delta" not in choice


def _body(around: Object) -> tuple[Object | None, Object]:
    """Take the response out of a record: as a body with choices, and the fields wrapped around it."""
    if _are_choices(around.get("choices")):
        return _body_of_record(around), {}
    for name in RESPONSES:
        logged = around.get(name)
        value, wrapper = _unwrapped(decoded(logged))
        body = _as_body(value, logged)
        if name == "body" and not {"choices", "error"} & (body or {}).keys():
            continue  # "body" is the request as often as the response
        if body is not None or isinstance(value, dict):
            del around[name]
            return body, wrapper if body is not None else {**value, **wrapper}
    return (_body_of_record(around) if around.get("choices") == [] else None), {}


def _body_of_record(around: Object) -> Object:
    return {name: around.pop(name) for name in RETURNED if name in around}


def _unwrapped(value: Any) -> tuple[Any, Object]:
    """What an HTTP message holds, and the rest of the message: {"status_code": 200, "body": ...}."""
    if not isinstance(value, dict) or {"choices", "messages", "prompt"} & value.keys():
        return value, {}
    inner = decoded(value.get("body"))
    if not isinstance(inner, dict):
        return value, {}
    return inner, {name: item for name, item in value.items() if name != "body"}


def _as_body(value: Any, logged: Any) -> Object | None:
    """A response in any form as a body: a body, its pieces, messages, a text; None if it is none."""
    streamed = streamed_body(value)
    if streamed is not None:
        return streamed
    if isinstance(value, dict) and ("choices" in value or _is_error(value.get("error"))):
        return dict(value)
    if isinstance(value, dict) and ("role" in value or "content" in value):
        return {"choices": [{"message": value}]}
    if is_chat(value):
        alone = len(value) > 1 and all(message["role"] == "assistant" for message in value)
        return {"choices": [{"message": message} for message in (value if alone else [value])]}
    # Logs of failed calls say "{}" or "[]" where the response would be.
    return {"choices": [{"text": logged}]} if isinstance(logged, str) and value not in ({}, []) else None


def _request(around: Object) -> Object:
    """Take the request out of a record, its sampling parameters merged into it."""
    request: Object = {name: around.pop(name) for name in ASKED if name in around}
    for name in REQUESTS:
        value = _as_request(around.get(name))
        if value is not None:
            request |= {key: item for key, item in value.items() if item is not None or key not in request}
            del around[name]
            break
    for holder in (request, around):
        for name in PARAMETERS:
            value = decoded(holder.get(name))
            if isinstance(value, dict):
                del holder[name]
                request = {**value, **request}
    return request


def _as_request(logged: Any) -> Object | None:
    """A request in any form as an object: an object, messages, a text; None if it is none."""
    value, wrapper = _unwrapped(decoded(logged))
    if isinstance(value, dict):
        return {**wrapper, **value}
    if is_chat(value):
        return {"messages": value}
    return {"prompt": logged} if isinstance(logged, str) else None


def decoded(value: Any) -> Any:
    """The object or list of which a text is the JSON; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value


def failure(*levels: Mapping[str, Any]) -> str:
    """What went wrong according to an error or a status at any level; "" if nothing did."""
    for level in levels:
        for name in ERRORS:
            if _is_error(level.get(name)):
                return _told(level[name])
        for name in STATUSES:
            if _is_failure(level.get(name)):
                return f"{name} {level[name]}"
    return ""


def _is_error(error: Any) -> bool:
    return error is not None and error not in (False, "", "{}", "null", {}, [])


def _told(error: Any) -> str:
    """An error in a few words."""
    error = decoded(error)
    if isinstance(error, dict):
        error = error.get("message") or error.get("code") or error.get("type") or error
    return str(error)[:200]


def _is_failure(status: Any) -> bool:
    if isinstance(status, str):
        if status.strip().lower() in ("failure", "failed", "error"):
            return True
        status = int(status) if status.strip().removeprefix("-").isdecimal() else None
    return isinstance(status, int) and not isinstance(status, bool) and (status >= 400 or status < 0)
