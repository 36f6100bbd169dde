"""Streamed responses put together again: pieces ("chunks") of OpenAI's API as one body with choices.

Pieces of several choices interleave; the role may be missing, the usage comes last. Where a piece has text
but no log-probs while others have them, those of that choice are lost: nobody can say whose are missing.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from data_tools.collecting.reasons import Refused
from data_tools.readers.token_logprobs import TokenLogprobs

Object = dict[str, Any]

_TEXTS = ("content", "refusal", "reasoning", "reasoning_content")
_LISTS = ("token_ids", "prompt_token_ids")
_OF_TOKENS = ("content", "refusal", "tokens", "token_logprobs", "text_offset")


def is_piece(value: Any) -> bool:
    """Whether a value is a piece of a streamed chat, which no whole response can be taken for."""
    if not isinstance(value, dict) or not isinstance(value.get("choices"), list):
        return False
    named = isinstance(value.get("object"), str) and value["object"].endswith(".chunk")
    return named or any(isinstance(choice, dict) and "delta" in choice for choice in value["choices"])


def is_event(value: Any) -> bool:
    """Whether the data of a server-sent event is a piece, of a chat or of a legacy completion."""
    if not isinstance(value, dict) or not isinstance(value.get("choices"), list):
        return False
    return is_piece(value) or any(
        isinstance(choice, dict) and "text" in choice for choice in value["choices"]
    )


def streamed_body(logged: Any) -> Object | None:
    """The body that a field of a log holds in pieces: a list of them, or the text of an event stream."""
    if isinstance(logged, list) and logged and all(map(is_piece, logged)):
        found = list(logged)
    elif isinstance(logged, str) and logged.lstrip().startswith(("data:", "event:", ":")):
        lines = enumerate(logged.encode("utf-8", "replace").split(b"\n"), 1)
        found = [value for _, value in events_of(lines) if isinstance(value, Refused) or is_event(value)]
    else:
        return None
    stream = Stream()
    for piece in found:
        if isinstance(piece, Refused):
            stream.broken = piece.detail
        else:
            stream.add(piece)
    return stream.body() if stream.begun else None


def events_of(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, Any]]:
    """Yield line number and data of each server-sent event; None is the end, "[DONE]".

    Data that is no JSON is yielded as a Refused. Comments and fields other than `data` are skipped.
    """
    first, held = 0, b""
    for row, line in lines:
        text = line.strip()
        if text.startswith(b"data:"):
            first, held = first if held else row, held + text[5:].strip()
            value = _parsed(held)
            if isinstance(value, Refused):
                continue  # data may go on in the next line
            yield first, value
        elif held and not text:
            yield first, _parsed(held)
        elif text and not text.startswith((b":", b"event:", b"id:", b"retry:")):
            yield row, Refused("not_json", "no line of an event stream")
            continue
        else:
            continue
        held = b""
    if held:
        yield first, _parsed(held)


def _parsed(data: bytes) -> Any:
    if data == b"[DONE]":
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return Refused("torn_line", "the data of an event breaks off")


@dataclass(slots=True)
class Stream:
    """One streamed response, as far as its pieces are known; `broken` says that one of them is lost."""

    broken: str = ""
    _body: Object = field(default_factory=dict)
    _choices: dict[int, "_Choice"] = field(default_factory=dict)

    def add(self, piece: Object) -> None:
        """Add the next piece."""
        for name, value in piece.items():
            if name != "choices" and value is not None and (name == "usage" or name not in self._body):
                self._body[name] = value
        for at, part in enumerate(piece["choices"]):
            if not isinstance(part, dict):
                self.broken = f"a piece of a choice is no object but {type(part).__name__}"
                continue
            index = part["index"] if type(part.get("index")) is int else at
            try:
                self._choices.setdefault(index, _Choice()).add(part)
            except (AttributeError, TypeError) as error:
                self.broken = f"a piece cannot be read ({error})"

    @property
    def begun(self) -> bool:
        """Whether there was a piece of a choice."""
        return bool(self._choices)

    @property
    def finished(self) -> bool:
        """Whether every choice so far has said why it ended."""
        return self.begun and all(choice.fields.get("finish_reason") for choice in self._choices.values())

    def body(self) -> Object:
        """The response as one that was not streamed; a choice that is not whole is a Refused."""
        kind = self._body.get("object")
        named = {"object": kind.removesuffix(".chunk")} if isinstance(kind, str) else {}
        choices = [
            Refused("torn_stream", self.broken) if self.broken else choice.whole(index)
            for index, choice in sorted(self._choices.items())
        ]
        return {**self._body, **named, "choices": choices}


@dataclass(slots=True)
class _Choice:
    fields: Object = field(default_factory=dict)
    message: Object = field(default_factory=dict)
    text: str | None = None
    calls: list[Object] = field(default_factory=list)
    logprobs: Object = field(default_factory=dict)
    gap: bool = False

    def add(self, part: Object) -> None:
        delta = part.get("delta")
        said = self._add_delta(delta) if isinstance(delta, dict) else False
        if isinstance(part.get("text"), str):
            self.text = (self.text or "") + part["text"]
            said = said or part["text"] != ""
        measured = self._add_logprobs(part.get("logprobs"))
        self.gap |= said and not measured
        for name, value in part.items():
            if name in _LISTS and isinstance(value, list):
                self.fields[name] = self.fields.get(name, []) + value
            elif value is not None and name not in ("delta", "text", "logprobs", "index"):
                self.fields[name] = value

    def _add_delta(self, delta: Object) -> bool:
        """Add to the message; whether that was more than empty text."""
        said = False
        for name, value in delta.items():
            if name in _TEXTS and isinstance(value, str):
                self.message[name] = self.message.get(name, "") + value
                said = said or value != ""
            elif name == "tool_calls" and isinstance(value, list):
                for call in value:
                    self._add_call(call)
                said = said or bool(value)
            elif name == "function_call" and isinstance(value, dict):
                _add_function(self.message.setdefault(name, {}), value)
                said = True
            elif value is not None:
                self.message[name] = value
        return said

    def _add_call(self, call: Any) -> None:
        """Add a piece of a tool call; one with another id begins a call, also where servers give no index."""
        if not isinstance(call, dict):
            raise TypeError("a tool call that is no object")
        place = call.get("index") if type(call.get("index")) is int else None
        known = next((made for made in reversed(self.calls) if place is None or made["index"] == place), None)
        if known is None or (call.get("id") and known.get("id") and call["id"] != known["id"]):
            known = {"index": place}
            self.calls.append(known)
        for name, value in call.items():
            if name == "function" and isinstance(value, dict):
                _add_function(known.setdefault(name, {}), value)
            elif name != "index" and value not in (None, ""):
                known[name] = value

    def _add_logprobs(self, block: Any) -> bool:
        """Add log-probs; whether there were any."""
        lists = {name: block.get(name) for name in _OF_TOKENS} if isinstance(block, dict) else {}
        found = {name: values for name, values in lists.items() if isinstance(values, list) and values}
        for name, values in found.items():
            kept = [_without_alternatives(value) for value in values]
            self.logprobs[name] = self.logprobs.get(name, []) + kept
        return bool(found)

    def whole(self, index: int) -> Object | Refused:
        if not self.fields.get("finish_reason"):
            return Refused("torn_stream", f"the stream breaks off within choice {index}")
        made: Object = {"index": index, **self.fields}
        if self.logprobs:
            made["logprobs"] = TokenLogprobs([], whole=False) if self.gap else self.logprobs
        if self.text is not None:
            return {**made, "text": self.text}
        calls = [{name: value for name, value in call.items() if name != "index"} for call in self.calls]
        message = {"role": "assistant", "content": None, **self.message}
        return {**made, "message": {**message, "tool_calls": calls} if calls else message}


def _add_function(known: Object, piece: Object) -> None:
    for name, value in piece.items():
        if name == "arguments" and isinstance(value, str) and isinstance(known.get(name, ""), str):
            known[name] = known.get(name, "") + value
        elif value not in (None, ""):
            known[name] = value


def _without_alternatives(entry: Any) -> Any:
    """An entry without the log-probs of other tokens, which are not kept: they are most of a stream."""
    if not isinstance(entry, dict):
        return entry
    return {name: value for name, value in entry.items() if name != "top_logprobs"}
