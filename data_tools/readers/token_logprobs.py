"""Log-probs of tokens as OpenAI-compatible servers write them: chat entries, or lists of legacy completions.

Token texts are for display: several may share one character, so they never become ids. The one exception is a
text that is an id by the server's own promise, "token_id:123" (vLLM with return_tokens_as_token_ids).
"""

import re
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any

_ID = re.compile(r"token_id:(\d{1,10})")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Values as logged, one a token. `texts`, `offsets` and `ids` are as long, or None where unknown.

    `offsets` count characters from the start of the text that the tokens make up. `whole` is false where some
    were lost before they were logged, and nobody knows which.
    """

    values: list[Any]
    texts: list[str] | None = None
    offsets: list[int] | None = None
    ids: list[int] | None = None
    whole: bool = True

    @classmethod
    def of(cls, values: list[Any], texts: list[Any], ids: Any) -> "TokenLogprobs":
        """Those of an engine that gives ids; texts or ids of which one is missing are unknown."""
        return cls(values, _texts(texts), None, known_ids(ids))

    def after(self, start: int) -> "TokenLogprobs":
        """Those from token `start` on; their offsets are as they were."""
        values, texts, offsets, ids = self.values[start:], self.texts, self.offsets, self.ids
        return TokenLogprobs(
            values, texts and texts[start:], offsets and offsets[start:], ids and ids[start:]
        )

    def index_at(self, characters: int) -> int | None:
        """The first token behind that many characters; None if it cannot be told."""
        if not self.offsets and self.texts is None:
            return None
        starts = self.offsets or [0, *accumulate(map(len, self.texts or ()))]
        return next((at for at, start in enumerate(starts) if start >= characters), len(self.values))


def token_logprobs(block: Any) -> TokenLogprobs | None:
    """Read the `logprobs` of a choice; None if it has none."""
    if isinstance(block, TokenLogprobs):
        return block
    if isinstance(block, list):
        block = (
            {"content": block}
            if any(isinstance(entry, dict) for entry in block)
            else {"token_logprobs": block}
        )
    if not isinstance(block, dict):
        return None
    lists = [block[name] for name in ("content", "refusal") if isinstance(block.get(name), list)]
    if lists:
        return _of_entries(next(filter(None, lists), []))
    return _of_lists(block) if isinstance(block.get("token_logprobs"), list) else None


def known_ids(ids: Any) -> list[int] | None:
    """A list of token ids; None if it is empty or an item is no integer."""
    return ids if isinstance(ids, list) and set(map(type, ids)) == {int} else None


def _of_entries(entries: list[Any]) -> TokenLogprobs:
    try:
        values, tokens = list(map(itemgetter("logprob"), entries)), list(map(itemgetter("token"), entries))
    except (KeyError, TypeError):  # an entry that is incomplete, or none
        objects = [entry if isinstance(entry, dict) else {} for entry in entries]
        values, tokens = ([entry.get(name) for entry in objects] for name in ("logprob", "token"))
    texts = _texts(tokens)
    return TokenLogprobs(values, texts, None, _ids(texts))


def _of_lists(block: dict[str, Any]) -> TokenLogprobs:
    values = block["token_logprobs"]
    texts = _texts(block.get("tokens"))
    texts = texts if texts is not None and len(texts) == len(values) else None
    offsets = block.get("text_offset")
    return TokenLogprobs(values, texts, _offsets(offsets, len(values)), _ids(texts))


def _texts(tokens: Any) -> list[str] | None:
    return tokens if isinstance(tokens, list) and set(map(type, tokens)) <= {str} else None


def _offsets(offsets: Any, count: int) -> list[int] | None:
    """Offsets that can be used: SGLang writes -1 for all."""
    if not isinstance(offsets, list) or len(offsets) != count or not all(type(at) is int for at in offsets):
        return None
    return offsets if all(at >= 0 for at in offsets) and offsets == sorted(offsets) else None


def _ids(texts: list[str] | None) -> list[int] | None:
    if not texts or not _ID.fullmatch(texts[0]):
        return None
    found = [_ID.fullmatch(text) for text in texts]
    ids = [int(match[1]) for match in found if match]
    return ids if len(ids) == len(found) else None
