"""A command that ends with whoever asked for it: `python keeper.py COMMAND...`.

The command runs in a process group of its own, for as long as the standard input of this process is open.
When that closes, as it does when the other side dies in any way, the whole group is ended. Needs nothing but
Python.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

GRACE = 15.0
"""Seconds that a command is given to end by itself."""


def keep(command: Sequence[str]) -> int:
    """Run the command to its end, or to that of standard input; its exit code."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    threading.Thread(target=_end_with_input, args=(child.pid,), daemon=True).start()
    code = child.wait()
    # What it has started may outlive it.
    end(child.pid)
    return code


def _end_with_input(group: int) -> None:
    # Not through sys.stdin, whose lock a thread must not hold when Python ends.
    while os.read(0, 1 << 12):
        pass
    end(group)


def end(group: int) -> None:
    """End all processes of a group: asked first, then killed."""
    _signal(group, signal.SIGTERM)
    give_up = time.monotonic() + GRACE
    while _signal(group, 0) and time.monotonic() < give_up:
        time.sleep(0.05)
    _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    """Whether the group was there to get the signal."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(keep(sys.argv[1:]))
