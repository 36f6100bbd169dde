"""Personal data in text, found by patterns whose checksums or rules hold, and replaced by its kind.

Names and addresses have no pattern: those take Presidio, which is used where it is installed.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from data_tools.errors import ConfigError

_EMAIL = re.compile(r"[\w.%+-]{1,64}@(?:[\w-]{1,63}\.)+[^\W\d_]{2,24}\b")
_CARD = re.compile(
    r"(?<!\w)(?<!\d[.,])"
    r"(?:\d{13,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{1,4}(?:\1\d{1,3})?|\d{4}([ -])\d{6}\2\d{4,5})"
    r"(?!\w|[.,]\d)"
)
_IP4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)")
_IP6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_INTERNATIONAL = re.compile(r"(?<![\w)])\+[1-9]\d{0,2}(?:[ .-]?\(?\d{1,12}\)?){1,6}(?!\w)")
_AMERICAN = re.compile(
    r"(?<![\w.+-])(?:1[ .-])?"
    r"(?:\([2-9]\d{2}\) ?[2-9]\d{2}[ .-]|[2-9]\d{2}([.-])[2-9]\d{2}\1)\d{4}(?!\w|[.-]\d)"
)
"""Spaces alone do not make three numbers a phone number: sums and lists look the same."""

_CARD_BEGINS = re.compile(r"3[04-9]|4|5[0-8]|6|2[2-7]")


def luhn(digits: str) -> bool:
    """Return whether the last digit is the check digit of the others (ISO/IEC 7812)."""
    doubled = [int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(digits))]
    return sum(value - 9 * (value > 9) for value in doubled) % 10 == 0


def _is_card(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    return 13 <= len(digits) <= 19 and bool(_CARD_BEGINS.match(digits)) and luhn(digits)


def _is_address(text: str) -> bool:
    """Whether it is a valid IP address of some machine; those every machine has (127.0.0.1, ::) are kept."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    few_groups = address.version == 6 and len(re.findall(r"[0-9A-Fa-f]+", text)) < 3  # a::b of program code
    return not (address.is_loopback or address.is_unspecified or few_groups)


def _is_international(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    if digits.startswith("1"):  # the numbering plan of North America
        return len(digits) == 11 and digits[1] not in "01" and digits[4] not in "01"
    return 8 <= len(digits) <= 15


def _always(text: str) -> bool:
    return True


_PATTERNS: tuple[tuple[str, str, re.Pattern[str], Callable[[str], bool]], ...] = (
    ("email", "@", _EMAIL, _always),
    ("ip", ":", _IP6, _is_address),
    ("ip", ".", _IP4, _is_address),
    ("card", "", _CARD, _is_card),
    ("phone", "+", _INTERNATIONAL, _is_international),
    ("phone", "", _AMERICAN, _always),
)
"""(kind, a character that the text must hold, where to look, what must be true of it)."""

_ANY = re.compile(r"@|\d[\d .():+-]{5}|[0-9A-Fa-f]:[0-9A-Fa-f:]")
"""Some part of every match; most texts have none."""

_ENCODED = re.compile(r"data:[\w.+/-]+;base64,")

PRESIDIO_KINDS = {
    "EMAIL_ADDRESS": "email",
    "PHONE_NUMBER": "phone",
    "CREDIT_CARD": "card",
    "IP_ADDRESS": "ip",
}
_NOT_PERSONAL = frozenset(("DATE_TIME", "URL"))
_SCORE = 0.5


class Redactor:
    """Replaces personal data by its kind in capitals, `[EMAIL]`; counts what it replaced in `counts`.

    `analyse` finds (kind, start, end) in a text beyond the patterns. The same text always becomes the same.
    """

    def __init__(self, analyse: Callable[[str], list[tuple[str, int, int]]] | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._analyse = analyse

    @property
    def means(self) -> str:
        """What is looked for, in words."""
        patterns = "e-mail addresses, card numbers, IP addresses and phone numbers by pattern"
        return patterns + (", and what Presidio finds" if self._analyse else "")

    def value(self, value: Any) -> Any:
        """Return a JSON-like value with every text in it redacted, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bytes):
            text = value.decode("utf-8", "backslashreplace")
            made = self.text(text)
            return value if made == text else made
        if isinstance(value, list | tuple):
            return self._items(value)
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        return self._number(value)

    def text(self, text: str) -> str:
        """Return a text redacted."""
        if _ENCODED.match(text):
            return text
        made = text if self._analyse is None else self._by_analysis(text, self._analyse(text))
        if not _ANY.search(made):
            return made
        for kind, mark, pattern, holds in _PATTERNS:
            if mark in made:
                made = self._replaced(made, kind, pattern, holds)
        return made

    def _replaced(self, text: str, kind: str, pattern: re.Pattern[str], holds: Callable[[str], bool]) -> str:
        def replacement(found: re.Match[str]) -> str:
            if not holds(found[0]):
                return found[0]
            self.counts[kind] += 1
            return f"[{kind.upper()}]"

        return pattern.sub(replacement, text)

    def _by_analysis(self, text: str, found: list[tuple[str, int, int]]) -> str:
        for kind, start, end in sorted(found, key=lambda one: -one[1]):
            self.counts[kind] += 1
            text = f"{text[:start]}[{kind.upper()}]{text[end:]}"
        return text

    def _number(self, value: Any) -> Any:
        """A card number may stand as a number; whole floats are what tables make of integers."""
        if not isinstance(value, int | float) or not 1e12 <= value < 1e19 or value != int(value):
            return value
        made = self._replaced(str(int(value)), "card", _CARD, _is_card)
        return made if made.startswith("[") else value

    def _items(self, items: Sequence[Any]) -> Sequence[Any]:
        """Items one by one; texts of tokens together, since no single one would be recognised."""
        made = [self.value(item) for item in items]
        if made != list(items):
            return made
        tokens = [item.get("token") if isinstance(item, dict) else item for item in items]
        texts = [token for token in tokens if isinstance(token, str)]
        if len(texts) < 2 or len(texts) < len(tokens):
            return items
        whole = "".join(texts)
        redacted = self.text(whole)
        return items if redacted == whole else [redacted]


def redactor() -> Redactor:
    """Return a redactor with Presidio where it is installed (the extra `redact`), else by patterns alone.

    Raises ConfigError where Presidio is installed without its language model.
    """
    try:
        from presidio_analyzer import AnalyzerEngine
    except ImportError:
        return Redactor()
    try:
        engine = AnalyzerEngine()
    except (Exception, SystemExit) as error:  # spaCy leaves the process where a download fails
        raise ConfigError(
            f"Presidio is installed but cannot start: {error}",
            "install its language model: python -m spacy download en_core_web_lg",
        ) from error
    entities = [name for name in engine.get_supported_entities(language="en") if name not in _NOT_PERSONAL]

    def analyse(text: str) -> list[tuple[str, int, int]]:
        found = engine.analyze(text=text, language="en", entities=entities, score_threshold=_SCORE)
        surest = sorted(found, key=lambda one: (-one.score, one.start, -one.end))
        return _apart([(_kind(one.entity_type), one.start, one.end) for one in surest])

    return Redactor(analyse)


def _kind(entity: str) -> str:
    return PRESIDIO_KINDS.get(entity, entity.lower())


def _apart(found: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Those that overlap none before them."""
    kept: list[tuple[str, int, int]] = []
    for kind, start, end in found:
        if all(end <= other[1] or start >= other[2] for other in kept):
            kept.append((kind, start, end))
    return kept
