"""`optimizer.safetensors`: whole tensors under `KEY/PARAMETER`, the same from every engine.

Keys are those of AdamW's state, and `weight` for the float32 copy of a half-precision parameter. Tensors are
written and read one at a time, so that no rank ever holds all of them.
"""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from data_tools.errors import DataError
from data_tools.store.storage import write_error

OPTIMIZER_FILE = "optimizer.safetensors"
STATE = ("exp_avg", "exp_avg_sq", "step", "weight")
CODES = {torch.float32: "F32", torch.float64: "F64"}


@dataclass(frozen=True)
class Piece:
    """A tensor to be written; `take` makes it, on all ranks together where it has to be gathered."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    take: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def write_state(folder: Path, pieces: Sequence[Piece], *, leads: bool) -> None:
    """Write the pieces to `folder` if this rank `leads`, else only take part in making them.

    `DataError` names the file where the disk does not take it.
    """
    if not leads:
        for piece in pieces:
            piece.take()
        return
    path = folder / OPTIMIZER_FILE
    try:
        with path.open("wb") as file:
            file.write(_header(pieces))
            for piece in pieces:
                file.write(_content(piece))
    except OSError as error:
        raise write_error(str(path), error) from error


def _content(piece: Piece) -> memoryview:
    tensor = piece.take().detach().to("cpu", piece.dtype)
    if tuple(tensor.shape) != piece.shape:  # the header is written already
        raise RuntimeError(f"{piece.name} is {tuple(tensor.shape)}, not {piece.shape}")
    content: memoryview = tensor.reshape(-1).numpy().data
    return content


def _header(pieces: Sequence[Piece]) -> bytes:
    """What a safetensors file begins with: the length of a JSON object, and that object."""
    entries: dict[str, Any] = {}
    end = 0
    for piece in pieces:
        start, end = end, end + piece.size
        entries[piece.name] = {
            "dtype": CODES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class SavedState:
    """An optimizer's state on disk, read parameter by parameter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        opened: Any = safe_open(folder / OPTIMIZER_FILE, framework="pt")
        self._file = opened
        self._left = set(opened.keys())

    def take(self, name: str, shape: Sequence[int]) -> dict[str, Tensor]:
        """What is saved of a parameter, by key; `DataError` if it has another shape."""
        found = {key: f"{key}/{name}" for key in STATE if f"{key}/{name}" in self._left}
        self._left -= set(found.values())
        tensors = {key: self._file.get_tensor(entry) for key, entry in found.items()}
        for key, tensor in tensors.items():
            if key != "step" and tuple(tensor.shape) != tuple(shape):
                raise DataError(f"{self.folder}: {name} is {tuple(tensor.shape)}, not {tuple(shape)}")
        return tensors

    def check_all_taken(self) -> None:
        """Raise DataError unless all that is saved was asked for."""
        if self._left:
            raise DataError(
                f"{self.folder}: {min(self._left)} is of another model", "resume with the same model"
            )
