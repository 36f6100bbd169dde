"""The key by which near-identical prompts find each other, so that a split cannot part them.

It is a function of the prompt alone, so that every log, batch and year agrees. It ignores how a prompt is
written, never what it says: digits, symbols, roles and the system prompt all count.
"""

import re
import unicodedata
from typing import Any

from data_tools.collecting.ids import digest
from data_tools.collecting.prompts import Message, canonical_prompt, parse_prompt
from data_tools.logs.jsontext import canonical

_PROSE = ".,;:!?'\"`"
"""Punctuation that is left out at both ends of a word; inside one (1.5, don't) it stays."""

_ONE_SPELLING = str.maketrans(
    dict.fromkeys("‘’‚‛", "'") | dict.fromkeys("“”„‟«»", '"') | dict.fromkeys("‐‑‒–—−", "-")
)
_INVISIBLE = re.compile(
    "[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e01ef]"
)
_NO_WORDS_APART = re.compile(r" (?:(?=\W)|(?<=\W ))")
_DRAWN_BY_CHANCE = frozenset(("id", "tool_call_id"))


def prompt_cluster(prompt: str) -> str:
    """Return the hash that prompts share which differ in no more than spelling out the same thing.

    `prompt` is plain text or JSON text of messages; a text and a lone message of a user with that text agree.
    Raises Refused (`too_deep`).
    """
    parsed = parse_prompt(canonical_prompt(prompt))
    messages = [{"role": "user", "content": parsed}] if isinstance(parsed, str) else parsed
    return digest("prompt-cluster", *(part for message in messages for part in _parts(message))).hex()


def normalised(text: str) -> str:
    """Return a text without case, compatibility forms, invisible characters, prose punctuation, spare spaces.

    A text of nothing else is itself.
    """
    plain = text.lower() if text.isascii() else _one_form(text)
    words = filter(None, (word.strip(_PROSE) for word in plain.split()))
    return _NO_WORDS_APART.sub("", " ".join(words)) or text


def _one_form(text: str) -> str:
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return _INVISIBLE.sub("", folded.translate(_ONE_SPELLING))


def _parts(message: Message) -> list[str]:
    """What a message says: its role, its texts, and the rest but for ids, which are drawn anew each time."""
    rest = {key: value for key, value in message.items() if key not in ("role", "content", *_DRAWN_BY_CHANCE)}
    if isinstance(rest.get("tool_calls"), list):
        rest["tool_calls"] = [_without_ids(call) for call in rest["tool_calls"]]
    content = message.get("content")
    pieces = content if isinstance(content, list) else [content]
    return [str(message["role"]), *map(_piece, pieces), canonical(rest)]


def _piece(piece: Any) -> str:
    if isinstance(piece, dict) and isinstance(piece.get("text"), str):
        return normalised(piece["text"])
    return normalised(piece) if isinstance(piece, str) else canonical(piece)


def _without_ids(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    return {key: value for key, value in call.items() if key not in _DRAWN_BY_CHANCE}
