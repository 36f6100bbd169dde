"""A page as HTML: one file that needs nothing else, runs no script, and shows log text without obeying it."""

from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from offline_rec.reporting.blocks import Page
from offline_rec.reporting.plain_text import shown

TEMPLATES = Path(__file__).parent / "templates"


def render(page: Page, *, now: datetime | None = None) -> bytes:
    """The HTML of a page, in UTF-8."""
    made = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    html = _templates().get_template("page.html").render(page=page, made=made)
    # Whatever is no character any more was written out by then; nothing here may fail on a text.
    return html.encode("utf-8", "backslashreplace")


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["css"] = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))
    return environment


def _printed(value: Any) -> Any:
    """Every value that the template prints goes through here; what is Markup was made by this program."""
    if isinstance(value, Markup):
        return value
    return "" if value is None else shown(str(value))
