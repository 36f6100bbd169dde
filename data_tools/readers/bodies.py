"""Requests and responses in the forms of several APIs, as messages and choices of OpenAI's chat API.

Platforms log what an application sent and got: chat or legacy completions, OpenAI's Responses API,
Anthropic's Messages API, a bare message, a text.
"""

from collections.abc import Sequence
from typing import Any

from data_tools.collecting.prompts import is_chat, is_text, text_of
from data_tools.collecting.reasons import Refused
from data_tools.logs.jsontext import dump
from data_tools.readers.exchange import Object, decoded, failure

NO_ANSWER = "there is no response in the record"

Answer = tuple[Object, list[Any]]
"""A response: its body without the choices, and the choices."""


def answer(logged: Any, *, structured: bool = False) -> Answer:
    """The response in a logged value; raises Refused where there is none.

    `structured` says that an object of no API's form is what the model wrote, as JSON.
    """
    value = decoded(logged)
    if value in (None, "", {}, []):
        raise Refused("no_response", NO_ANSWER)
    if isinstance(value, dict):
        found = _of_body(value)
        if found is not None:
            return found
        failed = failure({"error": value.get("error")})
        if failed:
            raise Refused("failed_call", failed)
        if not structured and (isinstance(logged, dict) or "object" in value):
            raise Refused("no_response", f"a body of no completion, with {', '.join(list(value)[:6])}")
    if is_chat(value):
        turns = [message for message in value if message["role"] == "assistant"]
        alone = len(turns) == len(value)
        return {}, [{"message": message} for message in (value if alone else turns[-1:])]
    return {}, [{"text": logged if isinstance(logged, str) else dump(logged)}]


def _of_body(value: Object) -> Answer | None:
    if isinstance(value.get("choices"), list):
        return {name: item for name, item in value.items() if name != "choices"}, value["choices"]
    if value.get("object") == "response" and isinstance(value.get("output"), list):
        return _of_responses_api(value)
    if value.get("type") == "message" and isinstance(value.get("content"), list):
        return _of_anthropic(value)
    if isinstance(value.get("message"), dict) and "content" in value["message"]:
        rest = {name: item for name, item in value.items() if name not in ("message", "done_reason")}
        return rest, [{"message": value["message"], "finish_reason": value.get("done_reason")}]
    if "role" in value or "content" in value:
        return {}, [{"message": value}]
    return None


def _of_anthropic(value: Object) -> Answer:
    used = ("content", "role", "type", "stop_reason")
    choice = {"message": blocks_message(value["content"]), "finish_reason": value.get("stop_reason")}
    return {name: item for name, item in value.items() if name not in used}, [choice]


def blocks_message(blocks: Sequence[Any]) -> Object:
    """An assistant's message from Anthropic's blocks of text, thinking and tool use."""
    message: Object = {"role": "assistant", "content": None}
    found = [block for block in blocks if isinstance(block, dict)]
    calls = [block for block in found if block.get("type") == "tool_use"]
    thoughts = [str(block.get("thinking")) for block in found if block.get("type") == "thinking"]
    said = [block for block in blocks if block not in calls and not _is_thinking(block)]
    if said:
        message["content"] = text_of(said) if is_text(said) else said
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [
            tool_call(call.get("id"), call.get("name"), call.get("input")) for call in calls
        ]
    return message


def _is_thinking(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") in ("thinking", "redacted_thinking")


def tool_call(identity: Any, name: Any, arguments: Any) -> Object:
    """A tool call in the form of OpenAI's API."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _of_responses_api(value: Object) -> Answer:
    message: Object = {"role": "assistant", "content": None}
    items = [item for item in value["output"] if isinstance(item, dict)]
    texts = [item.get("content") for item in items if item.get("type") == "message"]
    calls = [item for item in items if item.get("type") == "function_call"]
    if texts:
        message["content"] = "".join(text_of(text) or "" for text in texts)
    if calls:
        message["tool_calls"] = [
            tool_call(call.get("call_id"), call.get("name"), call.get("arguments")) for call in calls
        ]
    incomplete = value.get("incomplete_details")
    cut = incomplete.get("reason") if isinstance(incomplete, dict) else None
    finish = cut or ("tool_calls" if calls else "stop" if value.get("status") == "completed" else None)
    rest = {name: item for name, item in value.items() if name not in ("output", "object")}
    return rest, [{"message": message, "finish_reason": finish}]


def asked(logged: Any) -> Object:
    """A request as an object with `messages` or `prompt`; {} if the value holds neither."""
    value = decoded(logged)
    if is_chat(value):
        return {"messages": value}
    if not isinstance(value, dict):
        return (
            {}
            if value in (None, "", [])
            else {"prompt": [logged if isinstance(logged, str) else dump(logged)]}
        )
    request = dict(value)
    if "messages" not in request and "input" in request:
        request |= asked(request.pop("input"))
    system = next((request.pop(name) for name in ("system", "instructions") if request.get(name)), None)
    if system is not None and is_chat(request.get("messages")):
        request["messages"] = [{"role": "system", "content": system}, *request["messages"]]
    elif system is not None and request.get("prompt"):
        first = request.pop("prompt")
        turn = first[0] if isinstance(first, list) else first
        request["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": turn}]
    if "role" in request and "content" in request:
        return {"messages": [request]}
    if isinstance(request.get("prompt"), str):
        request["prompt"] = [request["prompt"]]  # [1, 2] in a text are no token ids
    return request
