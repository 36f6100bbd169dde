"""How rewards are written: `math`, `regex(pattern='####')`, `0.9*math + 0.1*my_module:format`.

A sum of terms. A term is a reward by name or `module:function`, with options in parentheses where it has any,
and a weight before it. Whatever is not written so is no spelling of a reward: it may be SQL.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import orjson

_TERM = re.compile(
    r"""\s*(?P<sign>[+-]?)\s*
    (?:(?P<weight>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*\*\s*)?
    (?P<name>[A-Za-z_]\w*(?:-[A-Za-z_]\w*)*(?:(?:\.[A-Za-z_]\w*)*:[A-Za-z_][\w.]*)?)\s*
    (?P<open>\(\s*(?P<empty>\))?)?\s*""",
    re.VERBOSE,
)
_OPTION = re.compile(
    r"""\s*(?P<key>[A-Za-z_]\w*)\s*=\s*
    (?:'(?P<single>(?:[^']|'')*)'|"(?P<double>(?:[^"]|"")*)"|(?P<bare>[^,()'"=<>\s][^,()'"]*?))
    \s*(?P<end>[,)])\s*""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Term:
    """A reward by name, its options, and the number that its value is multiplied by."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0


def terms(text: str) -> list[Term] | None:
    """The terms of a sum of rewards; None where the text is not written as one.

    A value in quotes is text, a quote in it doubled; without quotes it is a number, `true`, `false`, `null`,
    or else text. Backslashes stand for themselves.
    """
    found: list[Term] = []
    at = 0
    while at < len(text) or not found:
        match = _TERM.match(text, at)
        if match is None or (found and not match["sign"]):
            return None
        at = match.end()
        options: dict[str, Any] | None = {}
        if match["open"] and not match["empty"]:
            options, at = _options(text, at)
        if options is None:
            return None
        weight = float(match["weight"] or 1)
        found.append(Term(match["name"], options, -weight if match["sign"] == "-" else weight))
    return found


def _options(text: str, at: int) -> tuple[dict[str, Any] | None, int]:
    """The options up to the closing parenthesis, and where the text goes on; None where they are none."""
    options: dict[str, Any] = {}
    while match := _OPTION.match(text, at):
        if match["key"] in options:
            return None, at
        options[match["key"]] = _value(match)
        at = match.end()
        if match["end"] == ")":
            return options, at
    return None, at


def _value(match: re.Match[str]) -> Any:
    for kind, quote in (("single", "'"), ("double", '"')):
        if match[kind] is not None:
            return match[kind].replace(2 * quote, quote)
    try:
        return orjson.loads(match["bare"])
    except orjson.JSONDecodeError:
        return match["bare"]
