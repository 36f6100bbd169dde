"""What a whole command costs: seconds, processor seconds, and the most memory it and its children held."""

import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SAMPLE_SECONDS = 0.02
LOOKED_AT = 100
"""A look at memory is followed by a pause that is at least so many times as long."""

TELL = """
import atexit, sys
def tell():
    fields = {}
    for name in ("status", "io"):
        with open(f"/proc/self/{name}") as file:
            fields.update(line.split(":", 1) for line in file)
    sys.stderr.write(f"\\n{fields['VmHWM'].split()[0]} {fields['rchar'].strip()}")
atexit.register(tell)
"""
"""Prints the peak memory in KiB and the bytes read of the process when it ends."""


@dataclass(frozen=True)
class Measured:
    """One command: how long it took, the most memory it held, and the bytes it asked the system to read.

    Memory is that of the process and its children together, shared pages counted once.
    """

    seconds: float
    cpu_seconds: float
    peak_mib: float
    read_mib: float


def measure(code: str, *arguments: str) -> Measured:
    """Run Python code in a fresh process, which tells as its last line what only itself can know."""
    # VmHWM and not ru_maxrss, which also counts this process: the child shares its memory until it execs.
    os.sync()  # what was written before must not be written now
    with tempfile.TemporaryFile("w+") as errors:
        used, start = os.times(), time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-c", TELL + code, *arguments], stdout=subprocess.DEVNULL, stderr=errors
        ) as process:
            watch = _Watch(process.pid)
            process.wait()
        seconds, now = time.perf_counter() - start, os.times()
        together_kib = watch.stop()
        errors.seek(0)
        *said, told = errors.read().splitlines()
    if process.returncode:
        raise SystemExit("\n".join(said))
    alone_kib, read_bytes = map(int, told.split())
    cpu = now.children_user + now.children_system - used.children_user - used.children_system
    peak_kib = max(alone_kib, together_kib)
    return Measured(*(round(x, 2) for x in (seconds, cpu, peak_kib / 2**10, read_bytes / 2**20)))


def rec(*arguments: str) -> Measured:
    """Run a command of `rec`."""
    code = "import sys; from cli.main import rec\nif __name__ == '__main__': rec(sys.argv[1:])"
    return measure(code, *arguments)


class _Watch:
    """Adds up the memory of a process and its children, again and again until it is stopped."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak_kib = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> int:
        """End the watch; returns the peak in KiB, 0 where there were no children."""
        self._done.set()
        self._thread.join()
        return self._peak_kib

    def _watch(self) -> None:
        pause = SAMPLE_SECONDS
        while not self._done.wait(pause):
            began = time.perf_counter()
            if children := _children(self._pid):
                self._peak_kib = max(self._peak_kib, sum(map(_kib, [self._pid, *children])))
            # The system walks through all pages of a process, which waits meanwhile: it must not notice.
            pause = max(SAMPLE_SECONDS, LOOKED_AT * (time.perf_counter() - began))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            own = [int(child) for child in (task / "children").read_text().split()]
            found += [*own, *(grandchild for child in own for grandchild in _children(child))]
    return found


def _kib(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def machine(*packages: str) -> dict[str, object]:
    """Where figures come from."""
    found: dict[str, object] = {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def median(values: Sequence[float]) -> float:
    """The middle one, or the lower of two."""
    return sorted(values)[(len(values) - 1) // 2]
