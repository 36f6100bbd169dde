"""Runs what is missing of the plan, each run in a process of one thread, and keeps a JSON file for each."""

import fcntl
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.paper.plan import Cell, Effort
from benchmarks.paper.tasks import TASKS
from benchmarks.paper.world import Size, name_of, recipe_of
from data_tools.errors import ConfigError

Say = Callable[[str], None]
STOP_SECONDS = 30
"""How long a run that is told to end may take for it."""


class Results:
    """The results under a directory: `cells/NAME.json`, each whole or not there."""

    def __init__(self, out: Path, effort: Effort, size: Size) -> None:
        self.out = out
        self.effort = effort
        self.size = size

    def path(self, cell: Cell) -> Path:
        return self.out / "cells" / f"{cell.name}.json"

    def key(self, cell: Cell) -> str:
        """The name of everything that a result depends on."""
        world = recipe_of(TASKS[cell.task], cell.seed, self.size)
        return name_of({"cell": cell.content(self.effort), "world": world})

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a cell, None if it was not run, or not as it would be now."""
        try:
            found = json.loads(self.path(cell).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return found if found["key"] == self.key(cell) else None

    def write(self, cell: Cell, result: dict[str, Any]) -> None:
        path = self.path(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.tmp")
        staged.write_text(json.dumps({"key": self.key(cell), **result}) + "\n", encoding="utf-8")
        os.replace(staged, path)

    def failure(self, cell: Cell) -> Path:
        return self.out / "failed" / f"{cell.name.replace('/', '-')}.txt"

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in cells if self.read(cell) is None]


Work = Callable[[Results, Cell], dict[str, Any]]
"""Gives the result of a cell; a function of a module, as it is called in other processes."""


def run(
    results: Results,
    cells: Sequence[Cell],
    *,
    work: Work,
    workers: int = 2,
    hours: float | None = None,
    say: Say = print,
) -> list[Cell]:
    """Have `work` done for the cells that have no result, `workers` at a time; returns those that failed.

    After `hours` no further cell is begun. However it ends, what is finished is kept, and another call does
    the rest. ConfigError where another process runs cells into the same directory.
    """
    missing = results.missing(cells)
    until = time.monotonic() + 3600 * hours if hours is not None else float("inf")
    say(f"{len(cells)} runs, {len(cells) - len(missing)} of them done")
    # A server that has imported everything: a run begins in no time, and none inherits another's threads.
    context = get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    running: dict[BaseProcess, Cell] = {}
    failed: list[Cell] = []
    with _alone(results.out):
        try:
            while running or (missing and time.monotonic() < until):
                while missing and len(running) < workers and time.monotonic() < until:
                    cell = missing.pop(0)
                    process = context.Process(target=_in_process, args=(work, results, cell), daemon=True)
                    process.start()
                    running[process] = cell
                connection.wait([process.sentinel for process in running])
                for process in [p for p in running if p.exitcode is not None]:
                    cell = running.pop(process)
                    failed += [] if _told(results, cell, len(missing) + len(running), say) else [cell]
        finally:
            _end(list(running))
    return failed


def _told(results: Results, cell: Cell, left: int, say: Say) -> bool:
    """Say what a run came to; False if it came to nothing."""
    found = results.read(cell)
    if found is None:
        say(f"{cell.name}: failed, see {results.failure(cell)}")
        return False
    spent = sum(found["cpu_seconds"].values())
    base, end = found["base"]["reward"], found["end"]["reward"]
    say(f"{cell.name}: {base:.3f} -> {end:.3f}, {spent:.0f} s of a core; {left} left")
    return True


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(STOP_SECONDS)


def _in_process(work: Work, results: Results, cell: Cell) -> None:
    """In a process of its own: one cell, or the reason why there is none."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    failure = results.failure(cell)
    failure.unlink(missing_ok=True)
    try:
        results.write(cell, work(results, cell))
    except Exception:
        failure.parent.mkdir(parents=True, exist_ok=True)
        failure.write_text(traceback.format_exc(), encoding="utf-8")


def _end_with_parent() -> None:
    """However the parent ends, its runs do: another one will want their folders."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the directory, with the number of this process in `run.pid`."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "run.pid").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another process runs cells into {out}", "wait for it, or stop it") from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def estimate(results: Results, cells: Sequence[Cell]) -> Iterator[tuple[str, int, int, float | None]]:
    """For each task and regime: cells done, cells in all, mean seconds of a core (None if none is done)."""
    for place in dict.fromkeys((cell.task, cell.regime) for cell in cells):
        own = [cell for cell in cells if (cell.task, cell.regime) == place]
        spent = [sum(r["cpu_seconds"].values()) for r in map(results.read, own) if r is not None]
        yield "/".join(place), len(spent), len(own), sum(spent) / len(spent) if spent else None
