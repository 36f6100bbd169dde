"""From the results of runs to one JSON file, and from that to the page and its figures."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.paper.figures import draw
from benchmarks.paper.found import found
from benchmarks.paper.page import page
from benchmarks.paper.plan import cells
from benchmarks.paper.runner import Results
from benchmarks.paper.tasks import TASKS
from benchmarks.paper.world import recipe_of

PUBLISHED = "benchmarks/results/paper.json"
FIGURES = "docs/paper"


def gather(results: Results) -> dict[str, Any]:
    """What paper.json holds: effort, the worlds that are there, and the runs that are done."""
    every = cells()
    done = {cell.name: result for cell in every if (result := results.read(cell)) is not None}
    return {
        "effort": asdict(results.effort),
        "size": asdict(results.size),
        "planned": len(every),
        "worlds": _worlds(results),
        "runs": {name: _short(done[name]) for name in sorted(done)},
    }


def _worlds(results: Results) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted((results.out / "worlds").glob("*/facts.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        recipe = facts.pop("recipe")
        if recipe == recipe_of(TASKS[recipe["name"]], recipe["seed"], results.size):
            found[f"{recipe['name']}/{recipe['seed']}"] = facts
    return found


def _short(result: Mapping[str, Any]) -> dict[str, Any]:
    curve, last = result["curve"], result["metrics"][-1]
    return {
        "updates": [point["update"] for point in curve],
        "rewards": [point["reward"] for point in curve],
        "right": result["end"]["right"],
        "base": result["base"]["reward"],
        "end": result["end"]["reward"],
        "kl": last["kl_k3"],
        "kept": [last["kept_share_positive"], last["kept_share_negative"]],
        "cpu_seconds": round(sum(result["cpu_seconds"].values()), 1),
    } | ({"stopped": result["stopped"]} if result["stopped"] else {})


def write_json(facts: Mapping[str, Any], path: Path) -> None:
    """One line a run, so that a change shows."""
    runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in facts["runs"].items())
    rest = {name: value for name, value in facts.items() if name != "runs"}
    head = json.dumps(rest, indent=1).removesuffix("\n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "runs": {{\n{runs}\n }}\n}}\n', encoding="utf-8")


def write_page(facts: Mapping[str, Any], path: Path, *, figures: str = "figures") -> None:
    path.write_text(page(found(facts), figures=figures), encoding="utf-8")


def write_figures(facts: Mapping[str, Any], folder: Path) -> None:
    """A figure for each task, `TASK.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    results = found(facts)
    for task in results.tasks:
        draw(results, task, folder / f"{task}.svg")
