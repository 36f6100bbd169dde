"""Legacy completions with `echo`: the text begins with the prompt, and so do the log-probs.

Only the first token of a prompt has no log-prob: a null there, at the first character, tells an echo.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_tools.collecting.reasons import Refused
from data_tools.readers.token_logprobs import TokenLogprobs, token_logprobs


@dataclass(frozen=True, slots=True)
class Generated:
    """What the model wrote. `lost`: there are log-probs, but it cannot be told which are the response's."""

    text: str
    tokens: TokenLogprobs | None
    lost: bool = False


def is_echo(text: str, tokens: TokenLogprobs | None, prompt: Any) -> bool:
    """Whether a text and its log-probs begin with the prompt, though the log does not tell of an echo."""
    return isinstance(prompt, str) and prompt != "" and text.startswith(prompt) and _begins_with_null(tokens)


def _begins_with_null(tokens: TokenLogprobs | None) -> bool:
    return tokens is not None and tokens.values[:1] == [None] and (tokens.offsets or [0])[0] == 0


def without_echo(text: str, tokens: TokenLogprobs | None, prompt: Any, ids: tuple[Any, Any]) -> Generated:
    """Cut the prompt off an echoed text and its log-probs; `ids`: those of prompt and response, if known."""
    first = _first_token(tokens, prompt, ids)
    at = None
    if isinstance(prompt, str):
        at = len(prompt) if text.startswith(prompt) else None
    elif first is not None and tokens is not None and tokens.offsets is not None:
        at = [*tokens.offsets, len(text)][first]
    if at is None:
        raise Refused("bad_record", "the echoed text does not begin with the prompt")
    if tokens is None or first is None:
        return Generated(text[at:], None, lost=tokens is not None)
    return Generated(text[at:], tokens.after(first))


def _first_token(tokens: TokenLogprobs | None, prompt: Any, ids: tuple[Any, Any]) -> int | None:
    """The index of the first token of the response."""
    if tokens is None:
        return None
    asked, made = (len(part) if isinstance(part, list) else None for part in ids)
    if asked is not None and (made is None or asked + made == len(tokens.values)):
        return min(asked, len(tokens.values))
    return tokens.index_at(len(prompt)) if isinstance(prompt, str) else None


def echoed_prompt(usage: Any, choices: Sequence[Any]) -> str | None:
    """The prompt that the texts of a lone response begin with, where log-probs and usage agree on it."""
    known = usage if isinstance(usage, dict) else {}
    asked, made = known.get("prompt_tokens"), known.get("completion_tokens")
    if type(asked) is not int or type(made) is not int or asked < 1:
        return None
    found = {_opening(choice, asked) for choice in choices}
    shown = sum(len(tokens.values) - asked for tokens in map(_tokens, choices) if tokens)
    # Stop tokens are counted, but not always shown.
    return found.pop() if len(found) == 1 and 0 <= made - shown <= len(choices) else None


def _opening(choice: Any, count: int) -> str | None:
    """What the first `count` tokens of an echoed text spell."""
    tokens = _tokens(choice)
    if tokens is None or tokens.texts is None or not _begins_with_null(tokens) or len(tokens.values) < count:
        return None
    text, opening = choice.get("text"), "".join(tokens.texts[:count])
    aligned = tokens.offsets is None or tokens.offsets[count : count + 1] in ([], [len(opening)])
    return opening if isinstance(text, str) and text.startswith(opening) and aligned else None


def _tokens(choice: Any) -> TokenLogprobs | None:
    return token_logprobs(choice.get("logprobs")) if isinstance(choice, dict) else None
