"""One run: the loop of its regime, and its policy judged every twenty updates."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.paper.judging import judge
from benchmarks.paper.plan import ALGORITHMS, Cell, Effort
from benchmarks.paper.runner import Results
from benchmarks.paper.tasks import TASKS
from benchmarks.paper.world import World, prepare
from offline_rec.looping.config import LoopConfig
from offline_rec.looping.loop import loop
from offline_rec.training.metrics import read_metrics

KEPT = ("kl_k3", "ess_response", "kept_share_positive", "kept_share_negative", "logprob_mean", "grad_norm")
"""What is kept of the metrics of an update."""


def work(results: Results, cell: Cell) -> dict[str, Any]:
    """The result of a cell, after its base policy was made if it was not there."""
    torch.set_num_threads(1)  # several wait for each other many times longer than a model this small computes
    world = prepare(results.out / "worlds", cell.task, cell.seed, results.size)
    return run_cell(cell, results.effort, world, results.out / "scratch" / cell.name.replace("/", "-"))


def run_cell(cell: Cell, effort: Effort, world: World, scratch: Path) -> dict[str, Any]:
    """The result of a cell, as plain values; its files are in `scratch` meanwhile."""
    shutil.rmtree(scratch, ignore_errors=True)
    began = os.times()
    config = loop_config(cell, effort, world, scratch)
    done = loop(config)
    fitted = os.times()
    curve = [{"update": 0} | world.facts["watched"]]
    for update, model in _models(config, effort, done.out):
        if update < done.steps:
            curve.append({"update": update} | judge(world, model, world.size.watched))
    end = judge(world, done.model, world.size.judged)
    curve.append({"update": done.steps} | end)
    result = {
        "curve": curve,
        "base": world.facts["judged"],
        "end": end,
        "stopped": done.stopped,
        "metrics": _metrics(effort, done.out),
        "cpu_seconds": {"loop": _spent(began, fitted), "judging": _spent(fitted, os.times())},
    }
    shutil.rmtree(scratch, ignore_errors=True)
    return result


def loop_config(cell: Cell, effort: Effort, world: World, scratch: Path) -> LoopConfig:
    """What `rec loop` would take for it."""
    fit = {"lr": cell.lr, "groups_per_step": effort.groups, "device": "cpu", "memory_check": False}
    fit |= ALGORITHMS[cell.algorithm].fit
    if cell.algorithm == "raft":
        fit["keep"] = f"reward >= {TASKS[cell.task].success}"
    regime = effort.regime(cell.regime)
    offline = regime.get("offline", False)
    if offline:
        fit |= {"save_every": effort.watch_every, "keep_checkpoints": effort.updates}
        regime |= {"dataset": str(world.dataset)}
    else:
        regime |= {"dataset": str(scratch / "dataset"), "prompts": str(world.dataset)}
        regime |= {"reward": world.task.reward, "keep_rounds": effort.updates}
    return LoopConfig(
        model=str(world.base),
        out=str(scratch / "run"),
        n=effort.responses,
        max_tokens=world.task.max_tokens,
        fit=fit,
        seed=cell.seed,
        **regime,
    )


def _models(config: LoopConfig, effort: Effort, out: Path) -> Iterator[tuple[int, Path]]:
    """The updates after which a policy is judged, and its directory."""
    rounds = sorted((out / "rounds").iterdir())
    for update in range(effort.watch_every, effort.updates + 1, effort.watch_every):
        if config.offline:
            model = rounds[0] / "checkpoints" / f"step-{update}" / "model"
        else:
            model = next(r for r in rounds if int(r.name.split("-")[1]) == update) / "model"
        if model.exists():
            yield update, model


def _metrics(effort: Effort, out: Path) -> list[dict[str, Any]]:
    """Some of the metrics of the updates after which the policy was judged, and of the first."""
    records = {record["step"]: record for record in read_metrics(out)}
    watched = [1, *range(effort.watch_every, effort.updates + 1, effort.watch_every)]
    return [
        {"update": step} | {name: _short(records[step].get(name)) for name in KEPT}
        for step in watched
        if step in records
    ]


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _spent(began: os.times_result, ended: os.times_result) -> float:
    return round(sum(ended[:4]) - sum(began[:4]), 2)
