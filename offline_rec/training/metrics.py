"""`metrics.jsonl`: one JSON object a step, the same in a resumed run as in one that was never interrupted.

Everything that differs from run to run (seconds, rates, memory) lies under `timing`.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
FILE = "metrics.jsonl"


class MetricsLog:
    """Appends records, each whole on disk as one line before the next is begun."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; numbers that are not finite become null."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(record), allow_nan=False) + "\n")

    def sync(self) -> None:
        """Flush to disk: a checkpoint must not outlive the records of its steps."""
        if self.path.exists():
            with self.path.open("a") as file:
                os.fsync(file.fileno())

    def drop_after(self, step: int) -> None:
        """Keep the records up to a step, so that a resumed run writes the later ones again."""
        kept = [line for record, line in _lines(self.path) if record["step"] <= step]
        staged = self.path.with_suffix(".tmp")
        staged.write_text("".join(kept), encoding="utf-8")
        os.replace(staged, self.path)


def read_metrics(folder: Path) -> list[Record]:
    """The records of a run directory, a torn last line left out."""
    return [record for record, _ in _lines(folder / FILE)]


def finite(value: Any) -> Any:
    """The same value with None for every float that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(path: Path) -> Iterator[tuple[Record, str]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        # A killed process may leave half a line at the end; whatever followed it would be unordered.
        try:
            record = json.loads(line)
        except ValueError:
            return
        yield record, line if line.endswith("\n") else line + "\n"
