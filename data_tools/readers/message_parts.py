"""Messages made of parts, as OpenTelemetry's GenAI conventions have them, in the form of OpenAI's API."""

from collections.abc import Iterable
from typing import Any

from data_tools.readers.bodies import tool_call
from data_tools.readers.exchange import Object, decoded


def chat_of_parts(messages: Any) -> list[Object]:
    """Messages with `parts`; those that have `content` stay as they are."""
    value = decoded(messages)
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    found = value if isinstance(value, list) else [value]
    return [made for message in found if isinstance(message, dict) for made in _messages(message)]


def system_of_parts(instructions: Any) -> list[Object]:
    """System instructions, a text or parts, as a message; [] if there are none."""
    value = decoded(instructions)
    if not value:
        return []
    parts = value if isinstance(value, list) else [{"type": "text", "content": value}]
    return _messages({"role": "system", "parts": parts})


def _messages(message: Object) -> list[Object]:
    """One message; several where it answers several tool calls, as OpenAI has one message for each."""
    parts = decoded(message.get("parts"))
    if not isinstance(parts, list):
        return [{name: value for name, value in message.items() if name != "finish_reason"}]
    found = [part for part in parts if isinstance(part, dict)]
    results = [_tool_result(part) for part in found if part.get("type") == "tool_call_response"]
    others = [part for part in found if part.get("type") != "tool_call_response"]
    return results if results and not others else [*results, _message(message.get("role"), others)]


def _message(role: Any, parts: list[Object]) -> Object:
    made: Object = {"role": role, "content": _content(parts)}
    thoughts = [str(part.get("content")) for part in parts if part.get("type") == "reasoning"]
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    calls = [part for part in parts if part.get("type") == "tool_call"]
    if calls:
        made["tool_calls"] = [
            tool_call(call.get("id"), call.get("name"), call.get("arguments")) for call in calls
        ]
    return made


def _content(parts: Iterable[Object]) -> Any:
    """The text of the parts; a list where some are no text; None where nothing was said."""
    said = [part for part in parts if part.get("type") not in ("reasoning", "tool_call")]
    texts = [part.get("content") for part in said]
    if all(part.get("type") == "text" and isinstance(part.get("content"), str) for part in said):
        return "".join(map(str, texts)) if texts else None
    return [
        {"type": "text", "text": part.get("content")} if part.get("type") == "text" else part for part in said
    ]


def _tool_result(part: Object) -> Object:
    result = part.get("response", part.get("result"))
    return {"role": "tool", "tool_call_id": part.get("id"), "content": result}
