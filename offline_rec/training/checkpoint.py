"""Checkpoints that are whole or not there: written beside, verified tensor by tensor, then renamed.

`checkpoints/step-N/` holds `model/` (a Hugging Face directory) or, of a fit of adapters, `adapter/`, the
optimizer's state as safetensors, `state.json`, and `manifest.json` with what must be in them. Nothing is
pickled.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
MODEL_FOLDER = "model"
ADAPTER_FOLDER = "adapter"
Shape = list[int]


def staging_folder(root: Path, step: int) -> Path:
    """An empty hidden folder beside the final place, for all ranks to write to."""
    folder = root / f".step-{step}.tmp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def commit(staged: Path, step: int, state: dict[str, Any], shapes: Mapping[str, Sequence[int]]) -> Path:
    """Complete, verify and publish what lies in `staged`; returns the checkpoint's folder.

    `shapes` are those of the parameters that `model/` or `adapter/` must hold. `OSError` if what was written
    does not read back so.
    """
    (staged / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    manifest = _manifest(staged)
    (staged / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    problem = _unlike_model(manifest["tensors"], shapes) or verify(staged)
    if problem:
        raise OSError(f"the checkpoint of step {step} is not whole: {problem}")
    _sync_tree(staged)
    final = staged.parent / f"step-{step}"
    shutil.rmtree(final, ignore_errors=True)
    os.rename(staged, final)
    sync(final.parent)
    return final


def verify(folder: Path) -> str | None:
    """What is wrong with a checkpoint: a missing file, a tensor that is empty or not as written; or None.

    Opens every tensor.
    """
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        read_state(folder)
        for name, size in manifest["files"].items():
            if (folder / name).stat().st_size != size:
                return f"{name} has not {size} bytes"
        for name, expected in manifest["tensors"].items():
            found = dict(_shapes(folder / name))
            if found != expected:
                return f"{name} does not hold the tensors that were written"
            empty = [tensor for tensor, shape in found.items() if 0 in shape]
            if empty:
                return f"{name}: {empty[0]} is empty"
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def steps(root: Path) -> list[int]:
    """The steps that have a checkpoint folder, whole or not, oldest first."""
    found = [path.name.removeprefix("step-") for path in root.glob("step-*") if path.is_dir()]
    return sorted(int(name) for name in found if name.isdigit())


def latest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, and what is wrong with each newer one that was skipped."""
    torn: list[str] = []
    for step in reversed(steps(root)):
        folder = root / f"step-{step}"
        problem = verify(folder)
        if problem is None:
            return folder, torn
        torn.append(f"{folder.name}: {problem}")
    return None, torn


def read_state(folder: Path) -> dict[str, Any]:
    """What `commit` was given."""
    state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    return state


def prune(root: Path, keep: set[int], last: int) -> None:
    """Remove all checkpoints but the `last` newest and those in `keep`, and what killed writers left."""
    for step in steps(root)[:-last]:
        if step not in keep:
            shutil.rmtree(root / f"step-{step}")
    for left in root.glob(".step-*.tmp"):
        shutil.rmtree(left)


def publish_folder(staged: Path, final: Path) -> None:
    """Put a finished folder in its place; one that stood there before is replaced."""
    _sync_tree(staged)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(staged, final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest(folder: Path) -> dict[str, Any]:
    """Sizes of all files, shapes of all tensors."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}
    tensors = {name: dict(_shapes(folder / name)) for name in files if name.endswith(".safetensors")}
    return {"files": files, "tensors": tensors}


def _shapes(file: Path) -> Iterator[tuple[str, Shape]]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            yield name, list(opened.get_tensor(name).shape)


def _unlike_model(tensors: dict[str, dict[str, Shape]], shapes: Mapping[str, Sequence[int]]) -> str | None:
    """The first parameter that was written in another shape, or that cannot have been written at all."""
    folders = (f"{MODEL_FOLDER}/", f"{ADAPTER_FOLDER}/")
    files = (found for name, found in tensors.items() if name.startswith(folders))
    saved = {name: shape for found in files for name, shape in found.items()}
    for name, shape in shapes.items():
        if saved.get(name, list(shape)) != list(shape):
            return f"{name} is {saved[name]}, not {list(shape)}"
    # Names may differ (tied or renamed weights), so that absence shows in the number of elements.
    wanted, found = (sum(math.prod(shape) for shape in each.values()) for each in (shapes, saved))
    return f"it holds {found} of {wanted} weights" if found < wanted else None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync_tree(folder: Path) -> None:
    for path in (*_files(folder), *(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync(path)
