"""Charts as SVG that takes its colours from the page, so that one drawing serves light, dark and paper.

Only numbers and words of this program are drawn: names from logs stand in the HTML around a chart.
"""

import io
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 5.0, 2.6
"""Inches of 72 points: about the width of a phone, so that nothing is scaled down there."""

COLOURS = {
    "#010101": "var(--ink)",
    "#010102": "var(--muted)",
    "#010103": "var(--grid)",
    **{f"#01010{3 + i}": f"var(--s{i})" for i in range(1, 7)},
}
"""Colours that are drawn with, and the properties of the page that take their place."""

INK, MUTED, GRID, *SERIES = COLOURS

_SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "text.color": INK,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.unicode_minus": True,
    "lines.linewidth": 1.6,
    "axes.formatter.limits": (-4, 5),
}


@dataclass(frozen=True)
class Line:
    """A curve: y over x, None where there is no value; `low` and `high` bound a band around it."""

    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 1
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    dashed: bool = False
    points: bool = False


def lines(
    curves: Sequence[Line],
    *,
    x: str,
    y: str = "",
    log: bool = False,
    says: str = "",
    level: float | None = None,
) -> Markup:
    """Curves; `level` draws a line across, such as the 1 of a ratio."""

    def draw(axes: "Axes") -> None:
        for curve in curves:
            _draw_line(axes, curve)
        if level is not None:
            axes.axhline(level, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
        if log:
            axes.set_yscale("log")
        axes.set_xlabel(x)
        axes.set_ylabel(y)

    return _drawn(draw, says)


def _draw_line(axes: "Axes", curve: Line) -> None:
    colour = SERIES[curve.colour - 1]
    values = _floats(curve.y)
    if curve.low is not None and curve.high is not None:
        axes.fill_between(
            curve.x, _floats(curve.low), _floats(curve.high), color=colour, alpha=0.18, linewidth=0
        )
    few = curve.points or sum(value == value for value in values) < 3
    axes.plot(
        curve.x,
        values,
        color=colour,
        linestyle=(0, (4, 2)) if curve.dashed else "-",
        marker="o" if few else None,
        markersize=4,
    )


def bars(
    edges: Sequence[float],
    stacks: Sequence[Sequence[float]],
    *,
    x: str,
    y: str = "responses",
    tips: Sequence[str] = (),
    dates: bool = False,
    says: str = "",
    colours: Sequence[int] = (),
) -> Markup:
    """Bars between edges, one stack upon another; `tips` are shown where the pointer rests."""

    def draw(axes: "Axes") -> None:
        lefts, rights = edges[:-1], edges[1:]
        gaps = [0.06 * (right - left) for left, right in zip(lefts, rights, strict=True)]
        floor = [0.0] * len(lefts)
        for colour, heights in zip(colours or range(1, len(stacks) + 1), stacks, strict=True):
            drawn = axes.bar(
                [left + gap for left, gap in zip(lefts, gaps, strict=True)],
                heights,
                [right - left - 2 * gap for left, right, gap in zip(lefts, rights, gaps, strict=True)],
                bottom=floor,
                align="edge",
                color=SERIES[colour - 1],
                linewidth=0,
            )
            floor = [a + b for a, b in zip(floor, heights, strict=True)]
            for patch, tip in zip(drawn, tips, strict=False):
                patch.set_gid(f"tip {tip}")
        axes.grid(visible=False, axis="x")
        axes.margins(x=0.02, y=0.06)
        _count_axis(axes)
        if dates:
            _date_axis(axes)
        else:
            _whole_ticks(axes, edges)
        axes.set_xlabel(x)
        axes.set_ylabel(y)

    return _drawn(draw, says)


def _whole_ticks(axes: "Axes", edges: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    whole = all((edge + 0.5) == int(edge + 0.5) for edge in edges)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=whole))
    if whole:
        axes.xaxis.set_major_formatter("{x:,.0f}")


def _count_axis(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_formatter(lambda count, _: _short(count))


def _short(count: float) -> str:
    """A count in at most five characters."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 10 * size or (count >= size and unit != "k"):
            return f"{count / size:.3g}{unit}"
    return f"{count:,.0f}"


def _date_axis(axes: "Axes") -> None:
    import matplotlib.dates

    dates: Any = matplotlib.dates  # not typed yet
    locator = dates.AutoDateLocator(maxticks=6)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))


def _floats(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


_numbers = itertools.count(1)


def _drawn(draw: Callable[["Axes"], None], says: str) -> Markup:
    """The SVG of a drawing. The objects of matplotlib are used, none of its state: no backend is chosen."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: Any = _SETTINGS | {"svg.hashsalt": f"rec-{next(_numbers)}"}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        # Fixed, as a layout that is computed costs as much as the drawing.
        figure.subplots_adjust(left=0.135, right=0.985, top=0.965, bottom=0.19)
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.tick_params(length=0)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _themed(text.getvalue(), says)


_FONT = re.compile(r"font-family: [^;\"]*;? ?")
_STYLE = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>", re.S)
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.S)
_TIP = re.compile(r'<g id="tip ([^"]*)">')
_ID = re.compile(r'<g id="[^"]*"(/?)>')
_TAG = re.compile(r"<[^>]*>")
_SHORT = re.compile(r"(\d+\.\d{2})\d+")
_BLANK = re.compile(r"\n\s*")


def _themed(svg: str, says: str) -> Markup:
    """The element alone, for the middle of a page: no ids that others have, no font or colours of its own."""
    body = svg[svg.index("<svg") :]
    inner = body[body.index(">") + 1 :]
    inner = _METADATA.sub("", _STYLE.sub("", inner))
    inner = _TIP.sub(r"<g><title>\1</title>", inner)
    inner = _ID.sub(r"<g\1>", _FONT.sub("", inner))
    # Coordinates to a hundredth of a point; words between the tags stay as they are.
    inner = _BLANK.sub(" ", _TAG.sub(lambda tag: _SHORT.sub(r"\1", tag[0]), inner))
    for colour, name in COLOURS.items():
        inner = inner.replace(colour, name)
    size = f"{WIDTH * 72:g} {HEIGHT * 72:g}"
    return Markup(f'<svg viewBox="0 0 {size}" role="img" aria-label="{escape(says)}">{inner}')
