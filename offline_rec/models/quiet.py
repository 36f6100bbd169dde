"""Silence for libraries that print to a terminal which is not theirs."""

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers, and what it imports, from logging, warning and drawing progress bars."""
    # Importing transformers may import DeepSpeed, whose logger writes as soon as it exists.
    _hush()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _without_bars():
                yield
    finally:
        _speak()


_lock = threading.Lock()
_before: list[int] = []


def _hush() -> None:
    with _lock:
        _before.append(logging.root.manager.disable)
        logging.disable(logging.WARNING)


def _speak() -> None:
    """Restore what was before the first of those that overlap, as threads may, once the last ends."""
    with _lock:
        level = _before.pop()
        if not _before:
            logging.disable(level)


@contextmanager
def _without_bars() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
