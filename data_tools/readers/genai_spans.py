"""What a model's span holds by OpenTelemetry's GenAI conventions, whatever their generation.

Up to 1.36 prompts and completions are in events (as JSON text, or one event a message) or in flat attributes
such as gen_ai.prompt.0.content; from 1.37 they are messages of parts, in attributes or in an event. An event
stands in its span, or is a log record that names the span.
"""

import re
from collections.abc import Iterator
from typing import Any

from data_tools.readers.exchange import Object, decoded
from data_tools.readers.message_parts import chat_of_parts, system_of_parts

CALLS = ("chat", "text_completion", "generate_content", "completion")
"""Operations that ask a model for a text; those of agents and tools repeat what is in these."""

CONTENT = (
    "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions", "gen_ai.prompt",
    "gen_ai.completion", "gen_ai.tool.definitions",
)  # fmt: skip
"""How the names of attributes begin that hold what was asked and answered."""

Events = list[tuple[str, Object]]
"""Events of a span: name and attributes."""

EVALUATION = "gen_ai.evaluation.result"
DETAILS = "gen_ai.client.inference.operation.details"
"""The event that holds all of a call: what was asked, how, and what was answered."""

SAMPLING = ("temperature", "top_p", "top_k", "seed", "max_tokens", "frequency_penalty", "presence_penalty")
_FLAT = re.compile(r"gen_ai\.(prompt|completion)\.(\d+)\.(.+)")
_TOOL_CALL = re.compile(r"tool_calls\.(\d+)\.(id|name|arguments)")
_SPOKEN = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")
_CHOICE = "gen_ai.choice"
_OLDEST = ("gen_ai.content.prompt", "gen_ai.content.completion")


def is_genai_call(attributes: Object) -> bool:
    """Whether attributes are those of a call of a model."""
    operation = attributes.get("gen_ai.operation.name") or attributes.get("llm.request.type")
    if operation is not None:
        return operation in CALLS
    return "gen_ai.request.model" in attributes or "gen_ai.response.model" in attributes


def is_message(event: str) -> bool:
    """Whether an event of this name holds messages of a call."""
    return event in (DETAILS, _CHOICE, *_OLDEST) or _SPOKEN.fullmatch(event) is not None


def genai_request(attributes: Object, events: Events) -> Object:
    """The request of a call: messages, tools and sampling parameters."""
    request = {name: attributes.get(f"gen_ai.request.{name}") for name in SAMPLING}
    request["model"] = attributes.get("gen_ai.request.model")
    request["n"] = attributes.get("gen_ai.request.choice.count")
    request["tools"] = decoded(attributes.get("gen_ai.tool.definitions"))
    messages = _prompt(attributes, events)
    if messages:
        request["messages"] = [*system_of_parts(attributes.get("gen_ai.system_instructions")), *messages]
    return {name: value for name, value in request.items() if value is not None}


def _prompt(attributes: Object, events: Events) -> list[Object]:
    for name in ("gen_ai.input.messages", "gen_ai.prompt"):
        if attributes.get(name) not in (None, "", []):
            return chat_of_parts(attributes[name])
    flat = _flat(attributes, "prompt")
    return flat or [_spoken(match[1], body) for name, body in events if (match := _SPOKEN.fullmatch(name))]


def _spoken(role: str, body: Object) -> Object:
    """The message of an event named after its role."""
    known = _known(body)
    message = {"role": known.get("role") or role, "content": known.get("content")}
    calls = decoded(known.get("tool_calls"))
    message |= {"tool_calls": calls} if calls else {}
    return message | ({"tool_call_id": known["id"]} if role == "tool" and known.get("id") else {})


def _known(body: Object) -> Object:
    """What an event says: its attributes, and what some exporters pack into one of them."""
    held = decoded(body.get("body") or body.get("gen_ai.event.content"))
    return {**body, **held} if isinstance(held, dict) else body


def genai_choices(attributes: Object, events: Events) -> list[Object]:
    """The choices of a call; [] if it holds none."""
    reasons = decoded(attributes.get("gen_ai.response.finish_reasons"))
    ends = reasons if isinstance(reasons, list) else [reasons]
    choices = []
    for at, (index, message, reason) in enumerate(_answers(attributes, events)):
        end = reason or (ends[at] if at < len(ends) else None)
        choices.append({"index": at if index is None else index, "message": message, "finish_reason": end})
    return choices


def _answers(attributes: Object, events: Events) -> Iterator[tuple[Any, Object, Any]]:
    """Index, message and finish reason of each response, as far as they are told."""
    for name in ("gen_ai.output.messages", "gen_ai.completion"):
        value = decoded(attributes.get(name))
        if value not in (None, "", []):
            for message in value if isinstance(value, list) else [value]:
                yield from _answer(message)
            return
    flat = _flat(attributes, "completion")
    if flat:
        yield from ((None, message, message.pop("finish_reason", None)) for message in flat)
        return
    for name, body in events:
        if name == _CHOICE:
            known = _known(body)
            message = decoded(known.get("message"))
            said = message if isinstance(message, dict) else {"content": message or known.get("content")}
            calls = decoded(known.get("tool_calls"))  # beside the message, or in it
            said = {"tool_calls": calls, **said} if calls else said
            yield known.get("index"), {"role": "assistant", **said}, known.get("finish_reason")


def _answer(message: Any) -> Iterator[tuple[Any, Object, Any]]:
    if isinstance(message, str):
        yield None, {"role": "assistant", "content": message}, None
    elif isinstance(message, dict):
        for made in chat_of_parts([message]):
            yield None, {"role": "assistant", **made}, message.get("finish_reason")


def _flat(attributes: Object, side: str) -> list[Object]:
    """Messages that are spread over attributes by their number: gen_ai.prompt.0.role, ..."""
    found: dict[int, Object] = {}
    for name, value in attributes.items():
        match = _FLAT.fullmatch(name)
        if match and match[1] == side:
            found.setdefault(int(match[2]), {})[match[3]] = value
    return [_gathered(fields, side) for _, fields in sorted(found.items())]


def _gathered(fields: Object, side: str) -> Object:
    message: Object = {"role": fields.get("role") or ("user" if side == "prompt" else "assistant")}
    message["content"] = fields.get("content")
    calls: dict[int, Object] = {}
    for name, value in fields.items():
        match = _TOOL_CALL.fullmatch(name)
        if match:
            calls.setdefault(int(match[1]), {})[match[2]] = value
    if calls:
        message["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {name: call.get(name) for name in ("name", "arguments")},
            }
            for _, call in sorted(calls.items())
        ]
    known = {name: fields[name] for name in ("finish_reason", "tool_call_id") if fields.get(name)}
    return message | known
