"""Markdown and YAML of cards, in which names and SQL of a log are text and nothing else."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

CHARACTERS = 300
"""A longer text is cut."""

BEGIN, END = "<!-- written by rec card -->", "<!-- end of what rec card wrote -->"
"""What stands after the end is the reader's own, and is kept."""

# What would start HTML, a mention or a link: shown by its entity.
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "://": ":&#47;&#47;", "www.": "www&#46;"}
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202f\u2066-\u2069\ufeff\ud800-\udfff]"
)
# What starts markup anywhere in a line; the entities from above stay as they are.
_ENTITY_OR_SPECIAL = re.compile(r"&(?:amp|lt|gt|#64|#47|#46);|[\\`*_{}\[\]()#+!|~$^=]")
_FRONT = re.compile(r"\A---\r?\n(.*?)\r?\n---\r?(?:\n|\Z)", re.S)


def text(value: Any, *, characters: int = CHARACTERS) -> str:
    """A value as one line of Markdown that shows its characters, whatever they are; null is `unknown`."""
    if value is None:
        return "unknown"
    line = plain(value, characters=characters)
    for mark, entity in _ENTITIES.items():
        line = re.sub(re.escape(mark), entity, line, flags=re.I)
    return _ENTITY_OR_SPECIAL.sub(lambda m: m[0] if len(m[0]) > 1 else f"\\{m[0]}", line)


def plain(value: Any, *, characters: int = CHARACTERS) -> str:
    """A value on one line without control characters, cut where it is long; numbers as they are told."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    line = " ".join(_CONTROL.sub("\ufffd", str(value)).split())
    return line if len(line) <= characters else f"{line[: characters - 1]}…"


def table(records: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> str:
    """Records with the same fields as a Markdown table; `names` head the columns."""
    if not records:
        return ""
    heads = names or [name.replace("_", " ") for name in records[0]]
    lines = [f"| {' | '.join(map(text, heads))} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(text(value) for value in record.values())} |" for record in records]
    return "\n".join(lines)


def facts(values: Mapping[str, Any]) -> str:
    """A table of names and values; what is null is left out."""
    return table([{"fact": name, "value": value} for name, value in values.items() if value is not None])


def fenced(code: str, language: str = "") -> str:
    """Code as a block that no line in it can end."""
    clean = _CONTROL.sub("\ufffd", code.replace("\r\n", "\n"))
    longest = max((len(run) for run in re.findall(r"`+", clean)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{clean.rstrip()}\n{fence}"


def folded(title: str, body: str) -> str:
    """A part that is opened by a click."""
    return f"<details><summary>{text(title)}</summary>\n\n{body}\n\n</details>"


def sections(parts: Mapping[str, str | None]) -> str:
    """Headings with their text; those without text are left out."""
    return "\n\n".join(f"## {title}\n\n{body}" for title, body in parts.items() if body)


def card(metadata: Mapping[str, Any], title: str, body: str) -> str:
    """A README.md with its metadata as YAML in front."""
    front = yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=False, width=10**6)
    return f"---\n{front}---\n\n{BEGIN}\n\n# {text(title)}\n\n{body}\n\n{END}\n"


def front_matter_of(path: Path) -> dict[str, Any]:
    """The metadata of a card; {} where there is none."""
    try:
        found = _FRONT.match(path.read_text(encoding="utf-8"))
        loaded = yaml.safe_load(found[1]) if found else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def with_notes_of(old: str, new: str) -> str:
    """The new card, followed by what a reader wrote after the old one."""
    _, end, notes = old.partition(END)
    return new + notes.removeprefix("\n") if end else new
