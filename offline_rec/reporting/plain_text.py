"""What a page shows of a value: text of logs that is seen and never obeyed, numbers at a sensible length."""

import math
import unicodedata
from datetime import datetime
from typing import Any

KEPT = frozenset("\n\t\u200c\u200d")
"""Characters that are no printable ones and stay: line breaks, and the joiners of Indic scripts and emoji."""

NOTHING = 1e-7
"""What is smaller is rounding."""

_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def shown(text: str) -> str:
    """The text with every character that acts unseen (control, direction, half a pair) written out."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_character, text.replace("\r\n", "\n")))


def _character(c: str) -> str:
    if c in KEPT or c.isprintable() or unicodedata.category(c) not in _UNSEEN:
        return c
    return f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"


def shortened(text: str, limit: int) -> tuple[str, int]:
    """The text within a limit, and how many characters were left out: its middle, as an end often matters."""
    if len(text) <= limit:
        return text, 0
    tail = limit // 4
    left_out = len(text) - limit
    return f"{text[: limit - tail]} […{left_out:,} characters…] {text[len(text) - tail :]}", left_out


def name(value: Any, limit: int = 80) -> str:
    """A name from a log on one line."""
    text = "unnamed" if value is None else str(value)
    return " ".join(text[: limit + 1].split()) if len(text) <= limit else f"{text[: limit - 1]}…"


def number(value: Any, digits: int = 3) -> str:
    """A number as people read it: whole ones with separators, others with a few significant digits."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "\u2212")
    number = float(value)
    if not math.isfinite(number):
        return "–"
    size, sign = abs(number), "\u2212" if number < 0 else ""
    if size >= 1000 or size == int(size):
        return f"{sign}{size:,.0f}"
    if size >= 10:
        return f"{sign}{size:.{1 if size >= 100 else 2}f}"
    if size >= 10 ** (1 - digits):
        return f"{sign}{size:.{digits}f}"
    return f"{sign}{size:.{digits - 1}g}" if size >= NOTHING else "≈ 0"


def signed(value: float | None) -> str:
    """A difference, with its sign."""
    return f"+{number(value)}" if value is not None and value > 0 else number(value)


def share(part: float | None, whole: float | None = 1) -> str:
    """A share in percent; of nothing there is none."""
    if part is None or not whole:
        return "–"
    percent = round(100 * part / whole, 7)
    if percent in (0, 100):
        return f"{percent:.0f} %"
    return f"{percent:.1f} %" if 1 <= percent <= 99 else f"{percent:.2g} %" if percent < 1 else "> 99 %"


def moment(value: datetime | None) -> str:
    """A time to the minute."""
    return "–" if value is None else value.strftime("%Y-%m-%d %H:%M")


def size(count: int) -> str:
    """Bytes in the unit that fits."""
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"


def plural(count: int, word: str) -> str:
    """`1 row`, `2 rows`, `2 batches`."""
    ending = "" if count == 1 else "es" if word.endswith(("ch", "sh", "s")) else "s"
    return f"{count:,} {word}{ending}"
