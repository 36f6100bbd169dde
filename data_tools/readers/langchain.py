"""Messages and generations as LangChain writes them, in the form of OpenAI's chat API."""

from typing import Any

from data_tools.readers.bodies import blocks_message, tool_call
from data_tools.readers.exchange import Object

ROLES = {
    "human": "user",
    "ai": "assistant",
    "aimessagechunk": "assistant",
    "humanmessagechunk": "user",
    "chat": None,
    "remove": None,
}
"""LangChain's types of messages whose role has another name; others are roles themselves."""

_KINDS = {
    "HumanMessage": "human",
    "AIMessage": "ai",
    "AIMessageChunk": "ai",
    "SystemMessage": "system",
    "ToolMessage": "tool",
    "FunctionMessage": "function",
}


def chat(messages: Any) -> list[Any] | None:
    """A list of messages, OpenAI's or LangChain's, also one inside another; None if the value is none."""
    if not isinstance(messages, list) or not messages:
        return None
    if len(messages) == 1 and isinstance(messages[0], list):
        return chat(messages[0])
    found = [message(item) for item in messages]
    return None if any(item is None for item in found) else found


def message(logged: Any) -> Object | None:
    """One message; None if the value is none."""
    if isinstance(logged, list) and len(logged) == 2 and all(isinstance(part, str) for part in logged):
        return {"role": ROLES.get(logged[0], logged[0]), "content": logged[1]}
    if not isinstance(logged, dict):
        return None
    if "role" in logged:
        return logged
    held = next((logged[name] for name in ("kwargs", "data") if isinstance(logged.get(name), dict)), logged)
    kind = held.get("type") or _named_kind(logged) or logged.get("type")
    if "content" not in held or not isinstance(kind, str):
        return None
    role = ROLES.get(kind.lower(), kind.lower()) or held.get("role")
    return _converted(held, role) if role else None


def _named_kind(logged: Object) -> str | None:
    """The type of a message in LangChain's serialised form, which names its class."""
    path = logged.get("id")
    return _KINDS.get(path[-1]) if isinstance(path, list) and path and isinstance(path[-1], str) else None


def _converted(held: Object, role: Any) -> Object:
    content = held.get("content")
    extra = held.get("additional_kwargs")
    more = extra if isinstance(extra, dict) else {}
    made: Object = {"role": role, "content": content}
    if role == "assistant" and isinstance(content, list):
        made |= blocks_message([part for part in content if _is_no_call(part)])
    made |= {name: more[name] for name in ("tool_calls", "function_call", "refusal") if more.get(name)}
    calls = held.get("tool_calls")
    if "tool_calls" not in made and isinstance(calls, list) and calls:
        made["tool_calls"] = [_tool_call(call) for call in calls]
    made |= {name: held[name] for name in ("tool_call_id", "name") if held.get(name)}
    return made


def _is_no_call(part: Any) -> bool:
    """Tool calls stand in `tool_calls` besides."""
    return not (isinstance(part, dict) and part.get("type") == "tool_use")


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict) or "function" in call:
        return call
    return tool_call(call.get("id"), call.get("name"), call.get("args"))


def generations(logged: Any) -> list[Object] | None:
    """The choices of `generations`, one list for each prompt; None if the value is none."""
    if not isinstance(logged, list) or not logged:
        return None
    flat = [item for part in logged for item in (part if isinstance(part, list) else [part])]
    if not all(isinstance(item, dict) for item in flat):
        return None
    return [_choice(at, item) for at, item in enumerate(flat)]


def _choice(index: int, generation: Object) -> Object:
    said = message(generation.get("message"))
    about = generation.get("generation_info")
    held = generation.get("message")
    inner = held.get("kwargs", held) if isinstance(held, dict) else {}
    known = inner.get("response_metadata") if isinstance(inner, dict) else None
    info = {**(known if isinstance(known, dict) else {}), **(about if isinstance(about, dict) else {})}
    choice: Object = {"index": index, "logprobs": info.pop("logprobs", None)}
    choice["finish_reason"] = info.pop("finish_reason", None) or info.pop("stop_reason", None)
    if said is None:
        choice["text"] = generation.get("text")
    else:
        choice["message"] = said
    return choice | ({"generation_info": info} if info else {})
