"""Processes that help this one: started anew, silent to Ctrl-C, and gone when it is gone."""

import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

POLL_SECONDS = 1.0


def helpers(count: int) -> ProcessPoolExecutor:
    """A pool of `count` processes, which import what they need: a fork would inherit threads and their locks.

    An interrupt from the terminal is left to this process, and however it ends, even by a kill, they end.
    """
    return ProcessPoolExecutor(
        count, mp_context=get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),)
    )


def _end_with(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
