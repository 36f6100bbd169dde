"""Prompts and responses as text or chat messages: telling them apart, a canonical form, where they meet."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson

from data_tools.logs.jsontext import canonical, dump

Message = dict[str, Any]


def parse_prompt(text: str) -> str | list[Message]:
    """Read a stored prompt: a JSON array of objects with a "role" is a chat, anything else is plain text."""
    if not text.startswith("[") or '"role"' not in text:
        return text
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if is_chat(value) else text


def is_chat(value: object) -> bool:
    """Whether a value is a non-empty list of messages."""
    return bool(value) and isinstance(value, list) and all(isinstance(m, dict) and "role" in m for m in value)


def canonical_prompt(text: str) -> str:
    """One text for equal prompts: sorted keys, no empty fields or weights, texts joined, arguments parsed."""
    prompt = parse_prompt(text)
    return (
        prompt if isinstance(prompt, str) else canonical([_canonical_message(message) for message in prompt])
    )


def canonical_json(text: str) -> str:
    """One text for equal JSON values; a text that is no JSON is itself."""
    try:
        return canonical(orjson.loads(text))
    except orjson.JSONDecodeError:
        return text


def _canonical_message(message: Message) -> Message:
    kept = {key: value for key, value in message.items() if value not in (None, [], {}) and key != "weight"}
    if isinstance(kept.get("content"), list):
        kept["content"] = text_of(kept["content"]) if is_text(kept["content"]) else kept["content"]
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_canonical_call(call) for call in kept["tool_calls"]]
    return kept


def _canonical_call(call: Any) -> Any:
    """A tool call with its arguments as a value, whether they were logged as text or as one."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with suppress(orjson.JSONDecodeError):
            function["arguments"] = orjson.loads(function["arguments"])
    return {**call, "function": function}


def is_text(content: object) -> bool:
    """Whether the content of a message is text only."""
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(part, str) or _text_part(part) is not None for part in content
    )


def text_of(content: object) -> str | None:
    """The text of a message's content; None where it has none (never the word "None")."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [part if isinstance(part, str) else _text_part(part) for part in content]
    return "".join(text for text in texts if text is not None)


def _text_part(part: object) -> str | None:
    if isinstance(part, dict) and part.get("type") in (None, "text", "output_text", "input_text"):
        text = part.get("text")
        return text if isinstance(text, str) else None
    return None


def split_conversation(messages: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Cut a conversation where its response begins: behind the last turn of a user or the system.

    Tool results between assistant turns belong to the response: one trajectory may call tools. A turn that is
    not to be learned from belongs to the prompt, with the results of its tools.
    """
    cut = len(messages)
    while cut and _is_of_response(messages[cut - 1]):
        cut -= 1
    if cut and isinstance(messages[cut - 1], dict) and _is_assistant(messages[cut - 1]):
        while cut < len(messages) and messages[cut].get("role") == "tool":
            cut += 1
    return list(messages[:cut]), list(messages[cut:])


def _is_of_response(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") not in ("assistant", "tool"):
        return False
    return is_learned_from(message)


def is_learned_from(message: Message) -> bool:
    """Whether a message is not excluded from learning by a `weight` of 0, as OpenAI's fine-tuning has it."""
    return message.get("weight") != 0 or isinstance(message["weight"], bool)


def response_parts(value: Any) -> tuple[str | None, str | None, list[str]]:
    """Turn a logged message or list of messages into (text, JSON of the messages, flags).

    The text is that of the last assistant turn. The messages are kept where they hold more than that text.
    """
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None, None, []
    turns = [message for message in messages if _is_assistant(message)]
    if not turns:
        return None, None, []
    text = text_of(turns[-1].get("content"))
    if len(messages) == 1 and not _holds_more(turns[0]):
        return text, None, []
    flags = [] if all(is_text(message.get("content")) for message in messages) else ["multimodal"]
    written = [_with_text_arguments(message, flags) for message in messages]
    return text or "", dump(written), flags


def _is_assistant(message: Message) -> bool:
    return message.get("role") == "assistant" or ("role" not in message and "content" in message)


def _holds_more(message: Message) -> bool:
    beyond = {key for key, value in message.items() if value not in (None, [], {}, "")}
    beyond -= {"role", "content", "weight"}
    return bool(beyond) or not (message.get("content") is None or isinstance(message["content"], str))


def _with_text_arguments(message: Message, flags: list[str]) -> Message:
    """Tool arguments as JSON text, the form of the OpenAI API; broken ones stay as they are, flagged."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_text_argument(call, flags) for call in calls]}


def _with_text_argument(call: Any, flags: list[str]) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    arguments = call["function"].get("arguments")
    if isinstance(arguments, dict | list):
        return {**call, "function": {**call["function"], "arguments": dump(arguments)}}
    if isinstance(arguments, str) and arguments and not _is_json(arguments):
        flags.append("broken_tool_arguments")
    return call


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
