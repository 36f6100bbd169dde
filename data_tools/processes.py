"""Processes that help this one: started anew, silent to Ctrl-C, and gone when it is gone."""

import ctypes
import fcntl
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

POLL_SECONDS = 1.0

PIPE_BYTES = 1 << 20
"""The most that Linux gives to a pipe of anybody; it begins with a sixteenth."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_FROM_HEAP = 32 << 20
"""glibc takes no higher value."""


def helpers(count: int, *, keeps: int = 0) -> ProcessPoolExecutor:
    """A pool of `count` processes, which import what they need: a fork would inherit threads and their locks.

    An interrupt from the terminal is left to this process, and however it ends, even by a kill, they end.
    Each of them keeps `keeps` bytes of memory that it has freed, for work that comes in like pieces.
    """
    pool = ProcessPoolExecutor(
        count, mp_context=get_context("spawn"), initializer=_begin, initargs=(os.getpid(), keeps)
    )
    _widen(pool)
    return pool


def _widen(pool: ProcessPoolExecutor) -> None:
    """Let a large result through in few pieces: its process waits until this one has taken the rest.

    The pool shows its pipe to nobody; where it is not found, things are as they were.
    """
    reader = getattr(getattr(pool, "_result_queue", None), "_reader", None)
    if reader is not None and hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):
            fcntl.fcntl(reader.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def _begin(parent: int, keeps: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if keeps:
        _keep_freed(keeps)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _keep_freed(size: int) -> None:
    """Have glibc not give back what is freed: to take it anew costs a page fault for each 4 KiB."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have none
        mallopt(M_MMAP_THRESHOLD, LARGEST_FROM_HEAP)
        mallopt(M_TRIM_THRESHOLD, size)
