"""OpenInference attributes of a model's span: flat names with dots, lists of such, or nested objects."""

from collections.abc import Mapping
from typing import Any

from data_tools.readers.bodies import answer, asked
from data_tools.readers.exchange import Object, decoded

SPAN_KIND = "openinference.span.kind"
_MESSAGES = ("llm.input_messages", "llm.output_messages", "llm.prompts", "llm.choices", "llm.tools")
SPAN_CONTENT = (*_MESSAGES, "input.value", "output.value", "llm.invocation_parameters")


def tree(attributes: Mapping[str, Any]) -> Object:
    """Attributes as nested objects: {"llm.input_messages.0.message.role": ...} and its other spellings."""
    root: Object = {}
    for name, value in attributes.items():
        _put(root, name.split("."), value)
    return root


def _put(node: Object, path: list[str], value: Any) -> None:
    for key in path[:-1]:
        inner = node.get(key)
        if not isinstance(inner, dict):
            inner = node[key] = {}
        node = inner
    if value is None:
        return
    if isinstance(value, Mapping):
        inner = node.setdefault(path[-1], {})
        for name, item in value.items():
            if isinstance(inner, dict):
                _put(inner, str(name).split("."), item)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        node[path[-1]] = [tree(item) if isinstance(item, Mapping) else item for item in value]
    else:
        node[path[-1]] = value


def items(value: Any) -> list[Any]:
    """The items of a list, which may be spelled as an object with numbers for names."""
    if isinstance(value, dict):
        numbered = sorted((int(name), item) for name, item in value.items() if name.isdecimal())
        return [item for _, item in numbered]
    return value if isinstance(value, list) else []


def inner(node: Any, *path: str) -> Any:
    """What is at a path of nested objects; None if nothing is."""
    for name in path:
        node = node.get(name) if isinstance(node, dict) else None
    return node


def span_request(attributes: Object) -> Object:
    """The request: messages or prompts, tools and invocation parameters."""
    parameters = decoded(inner(attributes, "llm", "invocation_parameters"))
    request: Object = dict(parameters) if isinstance(parameters, dict) else {}
    for name in ("messages", "prompt", "input"):
        request.pop(name, None)
    messages = [_message(item) for item in items(inner(attributes, "llm", "input_messages"))]
    prompts = [inner(item, "prompt", "text") for item in items(inner(attributes, "llm", "prompts"))]
    tools = [decoded(inner(item, "tool", "json_schema")) for item in items(inner(attributes, "llm", "tools"))]
    if messages:
        request["messages"] = messages
    elif prompts:
        request["prompt"] = prompts
    else:
        request |= asked(inner(attributes, "input", "value"))
    if tools and "tools" not in request:
        request["tools"] = tools
    model = inner(attributes, "llm", "model_name")
    return request | ({"model": model} if model else {})


def span_choices(attributes: Object) -> list[Any]:
    """The responses; [] if there are none. One finish reason is that of a single response."""
    messages = [_message(item) for item in items(inner(attributes, "llm", "output_messages"))]
    texts = [inner(item, "completion", "text") for item in items(inner(attributes, "llm", "choices"))]
    choices: list[Any] = [{"index": at, "message": message} for at, message in enumerate(messages)]
    choices = choices or [{"index": at, "text": text} for at, text in enumerate(texts)]
    if not choices:
        value = inner(attributes, "output", "value")
        choices = [] if value in (None, "") else answer(value, structured=True)[1]
    reason = inner(attributes, "llm", "finish_reason")
    if len(choices) == 1 and reason and isinstance(choices[0], dict):
        return [{**choices[0], "finish_reason": choices[0].get("finish_reason") or reason}]
    return choices


def _message(item: Any) -> Object:
    """A message in the form of OpenAI's API."""
    held = inner(item, "message")
    fields = held if isinstance(held, dict) else {}
    made: Object = {"role": fields.get("role"), "content": fields.get("content")}
    parts = [inner(part, "message_content") for part in items(fields.get("contents"))]
    if parts and made["content"] is None:
        made["content"] = [_part(part) for part in parts]
    calls = [inner(call, "tool_call") for call in items(fields.get("tool_calls"))]
    if calls:
        made["tool_calls"] = [_tool_call(call) for call in calls]
    return made | {name: fields[name] for name in ("name", "tool_call_id") if fields.get(name)}


def _part(part: Any) -> Any:
    if inner(part, "type") == "text":
        return {"type": "text", "text": inner(part, "text")}
    url = inner(part, "image", "image", "url")
    return {"type": "image_url", "image_url": {"url": url}} if url else part


def _tool_call(call: Any) -> Object:
    function = {name: inner(call, "function", name) for name in ("name", "arguments")}
    return {"id": inner(call, "id"), "type": "function", "function": function}
