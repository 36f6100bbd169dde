"""What a page is made of: sections of blocks, plain values that the template turns into HTML."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from markupsafe import Markup


@dataclass(frozen=True)
class Fact:
    """A number with its name, and a few words that say what it means."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Facts:
    """Numbers that stand out."""

    kind: ClassVar[str] = "facts"
    facts: Sequence[Fact]


@dataclass(frozen=True)
class Note:
    """A sentence: why something is empty, or how to read it; `code` is what to run."""

    kind: ClassVar[str] = "note"
    text: str
    code: str = ""


@dataclass(frozen=True)
class Bar:
    """A cell that also draws its number as a bar, `share` of the width."""

    text: str
    share: float


@dataclass(frozen=True)
class Span:
    """A cell that draws an interval: `low` to `high` with `value`, shares of the width; `zero` if in view."""

    text: str
    low: float
    value: float
    high: float
    zero: float | None = None


Cell = str | Bar | Span


@dataclass(frozen=True)
class Table:
    """Rows under a question; columns of numbers are aligned to the right."""

    kind: ClassVar[str] = "table"
    question: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: Sequence[int] = ()
    says: str = ""
    broad: bool = False
    """Whether it takes the room of two in a grid."""


@dataclass(frozen=True)
class Legend:
    """A series: its name, and which of the page's colours it has."""

    name: str
    colour: int


@dataclass(frozen=True)
class Chart:
    """A drawing under the question that it answers; `numbers` are those it draws, to be unfolded."""

    kind: ClassVar[str] = "chart"
    question: str
    svg: Markup
    legend: Sequence[Legend] = ()
    says: str = ""
    numbers: Table | None = None


@dataclass(frozen=True)
class Grid:
    """Blocks side by side where there is room."""

    kind: ClassVar[str] = "grid"
    blocks: Sequence[Any]


@dataclass(frozen=True)
class Folded:
    """Long text, unfolded on demand."""

    kind: ClassVar[str] = "folded"
    title: str
    text: str


@dataclass(frozen=True)
class Token:
    """A token: its text, what is known about it, and its colour class."""

    text: str
    title: str
    colour: str


@dataclass(frozen=True)
class Response:
    """A response of a group as it is shown; `facts` are short values with names."""

    facts: Sequence[Fact]
    text: str
    left_out: int
    tokens: Sequence[Token] = ()
    tokens_left_out: int = 0
    words: bool = True
    """Whether the tokens have texts; else they are a strip of colours below the text."""
    tone: str = ""
    prompt: str = ""


@dataclass(frozen=True)
class Group:
    """A prompt and some of its responses, side by side."""

    title: str
    says: str
    prompt: str
    responses: Sequence[Response]
    left_out: int
    open: bool = False


@dataclass(frozen=True)
class Groups:
    """Groups to look through; `key` says what colours of tokens mean."""

    kind: ClassVar[str] = "groups"
    groups: Sequence[Group]
    key: str = ""
    both: bool = True
    """Whether colours go both ways."""


@dataclass(frozen=True)
class Section:
    """A part of the page with its name in the menu."""

    anchor: str
    title: str
    blocks: Sequence[Any]


@dataclass(frozen=True)
class Page:
    """Everything on a page."""

    title: str
    subject: str
    subtitle: str
    sections: Sequence[Section] = field(default_factory=list)
