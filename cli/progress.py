"""Progress on stderr, for eyes only: a bar is drawn only where stderr is a terminal."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bar:
    """A bar, moved by calling it."""

    def __init__(self, drawing: Progress, label: str) -> None:
        self._drawing = drawing
        self._task = drawing.add_task(label, total=None, numbers="")

    def __call__(
        self, done: float, total: float | None = None, numbers: Mapping[str, float] | None = None
    ) -> None:
        """`done` of `total` (None: unknown) of whatever is counted, with numbers to show beside."""
        shown = "  ".join(f"{name} {_short(value)}" for name, value in (numbers or {}).items())
        self._drawing.update(self._task, completed=done, total=total, numbers=shown)

    def stage(self, phase: str, done: float, total: float | None = None) -> None:
        """The same under another label."""
        self._drawing.update(self._task, description=phase)
        self(done, total)

    def note(self, text: str) -> None:
        """A line that stays, also where no bar is drawn."""
        if self._drawing.disable:
            click.echo(f"note: {text}", err=True)
        else:
            self._drawing.console.print(f"note: {text}", markup=False, highlight=False)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@contextmanager
def progress(label: str, *, shown: bool = True) -> Iterator[Bar]:
    """A bar under `label` while the block runs, if it is `shown` at all."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}", markup=False),
    )
    console = Console(stderr=True)
    hidden = not (shown and sys.stderr.isatty())
    with Progress(*columns, console=console, transient=True, disable=hidden) as drawing:
        yield Bar(drawing, label)
