"""Reward curves of a task: regimes side by side, families of algorithms one above the other."""

from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.paper.found import Found, Place
from benchmarks.paper.plan import ALGORITHMS, REGIMES
from data_tools.errors import ConfigError

ROWS = (
    ("clipped, 0.2/0.2", ("grpo", "oneside-is", "oneside-nois", "twoside-nois", "ring-nois")),
    ("clipped wide; penalised", ("oneside-is-wide", "oneside-nois-wide", "opmd", "asymre")),
    ("reweighted; imitation", ("red-drop", "red-weight", "both", "raft", "sft")),
)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b")
"""Told apart by readers of any colour vision (Okabe and Ito), on light and dark pages."""
GREY = "#808080"
STEADY = {"svg.hashsalt": "paper", "svg.fonttype": "none", "font.size": 8, "text.color": GREY}
"""The same results give the same file."""


def draw(results: Found, task: str, path: Path) -> None:
    """Mean reward on held-out prompts over updates, at each algorithm's better rate; bands from the lowest
    to the highest seed, the base dotted, REINFORCE grey in every panel.

    Raises ConfigError without matplotlib.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError("figures need matplotlib", "pip install -e '.[bench]'") from error
    matplotlib.use("svg")
    from matplotlib import pyplot

    places = [results.place(task, regime) for regime in REGIMES]
    places = [place for place in places if place.runs]
    axes_colours = dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
    with matplotlib.rc_context(STEADY | axes_colours):
        figure, axes = pyplot.subplots(
            len(ROWS),
            len(places),
            figsize=(2.6 * len(places) + 2.2, 2.2 * len(ROWS)),
            sharex=True,
            sharey=True,
            squeeze=False,
        )
        for row, (title, names) in zip(axes, ROWS, strict=True):
            for axis, place in zip(row, places, strict=True):
                _panel(axis, place, names)
            row[0].set_ylabel(f"{title}\nreward")
            _legend(row, names)
        for axis, place in zip(axes[0], places, strict=True):
            axis.set_title(place.regime, fontsize=9, color=GREY)
        for axis in axes[-1]:
            axis.set_xlabel("updates")
        figure.tight_layout()
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def _panel(axis: Any, place: Place, names: tuple[str, ...]) -> None:
    _curve(axis, place, "reinforce", GREY)
    for name, colour in zip(names, COLOURS, strict=False):
        _curve(axis, place, name, colour)
    bases = [run.base for rates in place.runs.values() for seeds in rates.values() for run in seeds.values()]
    axis.axhline(fmean(bases), color=GREY, linewidth=0.6, linestyle=":")
    axis.spines[["top", "right"]].set_visible(False)
    axis.patch.set_alpha(0)


def _curve(axis: Any, place: Place, name: str, colour: str) -> None:
    runs = list(place.of(name).values())
    if not runs:
        return
    updates = runs[0].updates
    points = list(zip(*(run.rewards for run in runs), strict=True))
    axis.plot(updates, [fmean(point) for point in points], color=colour, linewidth=1.3, label=name)
    if len(runs) > 1:
        low, high = [min(point) for point in points], [max(point) for point in points]
        axis.fill_between(updates, low, high, color=colour, alpha=0.15, linewidth=0)


def _legend(row: Any, names: tuple[str, ...]) -> None:
    """Right of the last panel, with what any panel of the row shows."""
    lines = {line.get_label(): line for axis in row for line in axis.get_lines()}
    shown = [name for name in ("reinforce", *names) if name in lines]
    row[-1].legend(
        [lines[name] for name in shown],
        [ALGORITHMS[name].short for name in shown],
        loc="center left",
        bbox_to_anchor=(1.02, 0.5),
        frameon=False,
        labelcolor=GREY,
    )
