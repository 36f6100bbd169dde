"""Tokens of a response as they are shown: texts where a tokenizer is at hand, and colours."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offline_rec.reporting.blocks import Token

if TYPE_CHECKING:
    from data_tools.store.dataset import StoredDataset

RATIO_STEPS = (0.05, 0.3, 1.0, 2.5)
"""Log-ratios, in nats, from which on a token has the next stronger colour."""

SURPRISE_STEPS = (0.5, 1.5, 3.0, 6.0)
"""The same for -log-prob."""

RATIO_KEY = "Blue tokens became likelier, orange ones less likely (log-ratio, in nats):"
SURPRISE_KEY = "The stronger the orange, the less likely the token was when it was sampled:"
PENDING = 8
"""Tokens that may together be one character."""


class Decoder(Protocol):
    """What turns token ids into text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str:
        """The text of ids."""


def decoder_of(ds: "StoredDataset", models: Sequence[str | Path] = ()) -> Decoder | None:
    """The tokenizer of a model directory, or of a policy of the dataset, whichever is there; no weights."""
    cards = [card.model for card in ds.policies().values() if card.model]
    for folder in [*models, *cards]:
        path = Path(folder) / "tokenizer.json"
        try:
            if path.is_file():
                return _load(path)
        except Exception:  # what is no tokenizer is none: texts are shown without it
            continue
    return None


def _load(path: Path) -> Decoder:
    from tokenizers import Tokenizer

    tokenizer: Decoder = Tokenizer.from_str(json.dumps(json.loads(path.read_text(encoding="utf-8"))))
    return tokenizer


def texts(decoder: Decoder, ids: Sequence[int], response: str) -> list[str] | None:
    """The text of each token; None if together they are not the response, so the tokenizer is another one's.

    A character of several tokens belongs to the last of them.
    """
    try:
        if decoder.decode(ids, skip_special_tokens=True).strip() != response.strip():
            return None
        return _pieces(decoder, ids)
    except Exception:  # ids beyond the vocabulary, as decoders of several kinds report them
        return None


def _pieces(decoder: Decoder, ids: Sequence[int]) -> list[str]:
    found: list[str] = []
    before: list[int] = []
    pending: list[int] = []
    for one in ids:
        pending.append(one)
        # Decoded after the token before, as some tokenizers drop the blank that a text begins with.
        known = decoder.decode(before, skip_special_tokens=False)
        piece = decoder.decode([*before, *pending], skip_special_tokens=False)[len(known) :]
        if piece.endswith("\ufffd") and len(pending) < PENDING:
            found.append("")
            continue
        found.append(piece)
        before, pending = [pending[-1]] if len(pending) == 1 else before, []
    if pending:
        found[-1] = decoder.decode(pending, skip_special_tokens=False)
    return found


def ratio_token(text: str, ratio: float, logprob: float) -> Token:
    """A token coloured by its log-ratio."""
    if not math.isfinite(ratio):
        return Token(text, "no log-ratio", "")
    title = f"log-ratio {ratio:+.2f}" + (f", logged {logprob:.2f}" if math.isfinite(logprob) else "")
    return Token(text, title, _colour(ratio, RATIO_STEPS))


def surprise_token(text: str, logprob: float) -> Token:
    """A token coloured by how unlikely it was."""
    if not math.isfinite(logprob):
        return Token(text, "no log-prob", "")
    return Token(text, f"log-prob {logprob:.2f}", _colour(logprob, SURPRISE_STEPS))


def _colour(value: float, steps: Sequence[float]) -> str:
    level = sum(abs(value) >= step for step in steps)
    return f"{'p' if value > 0 else 'n'}{level}" if level else ""
