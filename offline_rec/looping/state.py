"""`state.json` of a loop: how many of its phases are done; and whether a resume is of the same loop."""

import json
import os
from pathlib import Path

from data_tools.errors import ConfigError, DataError
from offline_rec.config import CONFIG_FILE
from offline_rec.looping.config import LoopConfig, loop_config

STATE_FILE = "state.json"


def write_state(folder: Path, done: int) -> None:
    """Write it atomically, flushed to disk."""
    staged = folder / f".{STATE_FILE}.tmp"
    with staged.open("w", encoding="utf-8") as file:
        json.dump({"phases_done": done}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, folder / STATE_FILE)


def read_state(folder: Path) -> int | None:
    """The number of phases that are done, None where the loop never began; DataError if unreadable."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["phases_done"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}", "start a new loop") from error


def check_same(folder: Path, config: LoopConfig) -> None:
    """Raise ConfigError unless the directory holds this loop; more rounds are the same loop where they change
    nothing of those before.
    """
    file = folder / CONFIG_FILE
    if not file.exists():
        if read_state(folder) is None:
            raise ConfigError(f"{folder} holds no loop to resume", "leave --resume out to begin one")
        return
    old, new = loop_config(file).model_dump(), config.model_dump()
    free = {"keep_rounds", "keep_sampler", "side_by_side", "sampler_devices"}
    if not config.lag and config.fit.get("schedule", "constant") == "constant":
        free |= {"rounds"}
    changed = [
        f"{key}: {old[key]!r} -> {new[key]!r}" for key in old if key not in free and old[key] != new[key]
    ]
    if changed:
        raise ConfigError(
            f"the configuration is not that of the loop in {folder}: {'; '.join(changed)}",
            f"rec loop {file} --resume takes its own; another out begins a new loop",
        )
