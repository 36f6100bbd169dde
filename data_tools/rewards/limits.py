"""A time limit for a call, in whatever thread it is made."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from data_tools.rewards.reward import NotJudged

T = TypeVar("T")


class _Expired(BaseException):
    """Raised within the call: no `except Exception` on the way keeps it."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` gives; NotJudged if it takes longer.

    In the main thread it is interrupted, and may itself use what only works there. In another thread, or
    where the process uses its alarm clock already, the call is made in a thread that is left behind.
    """
    return _interrupted(seconds, call) if _alarm_is_free() else in_thread(seconds, call)


def in_thread(seconds: float, call: Callable[[], T]) -> T:
    """The same in a thread of its own, which nobody waits for any longer after that time."""
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, call()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise too_slow(seconds)
    done, value = outcome[0]
    if not done:
        raise value
    result: T = value
    return result


def _interrupted(seconds: float, call: Callable[[], T]) -> T:
    def expire(number: int, frame: FrameType | None) -> None:
        raise _Expired

    signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # and again, should something hold it back
        try:
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Expired:
        raise too_slow(seconds) from None
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _alarm_is_free() -> bool:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return False
    unused = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    return unused and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def too_slow(seconds: float) -> NotJudged:
    """The reason of a null that comes of a time limit."""
    return NotJudged(f"took longer than {seconds:g} s")
