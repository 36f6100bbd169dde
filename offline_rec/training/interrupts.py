"""Ctrl-C, or a scheduler's SIGTERM, as a wish: the step ends, is saved, and then the run stops."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While it is entered, the first signal sets `asked` and calls `tell`; a second acts as it did before.

    Handlers belong to the main thread: in any other, signals keep their effect.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self.asked = False
        self._tell = tell
        self._listens = threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if self._listens:
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()
        self._tell()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
