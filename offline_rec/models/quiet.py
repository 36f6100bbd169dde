"""Silence for libraries that print to a terminal which is not theirs."""

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers, and what it imports, from logging, warning and drawing progress bars.

    One thread at a time: what is silenced belongs to the process, and must be found as it was left.
    """
    with _lock:
        disabled = logging.root.manager.disable
        # Importing transformers may import DeepSpeed, whose logger writes as soon as it exists.
        logging.disable(logging.WARNING)
        try:
            with warnings.catch_warnings(action="ignore"), _without_bars():
                yield
        finally:
            logging.disable(disabled)


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
