"""What of a run or a dataset goes to a hub, and what stays: only what is named here leaves.

A dataset's secret, with which ids of people were hashed, its rejects, which are raw text of logs, and the
hashes of erased ids never go.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import data_tools
from data_tools.errors import ConfigError, DataError
from data_tools.run_directory import is_run
from data_tools.store.dataset import PolicyCard
from data_tools.store.storage import open_storage
from offline_rec.cards.data_sections import place
from offline_rec.cards.write import FILE as CARD
from offline_rec.cards.write import Card, card
from offline_rec.training.checkpoint import ADAPTER_FOLDER, MODEL_FOLDER

if TYPE_CHECKING:
    from data_tools.dataset import Dataset

MODEL_FILES = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""Endings of the files of a model directory: weights as safetensors, configuration, tokenizer."""

WEIGHT_FILES = ("model", "adapter_model")
"""How the names of a model's weight files begin."""

DATA_FOLDERS = ("rollouts", "rewards", "policies")

STAYS = {
    "rejects": "raw text of logs that could not be used",
    "erased": "hashes of the ids of erased rows",
    "tokens": "made from the rows: made again where it is needed",
    "logprobs": "made from the rows: made again by rec score",
    "swaps": "notes of rewrites under way",
    "checkpoints": "weights and optimizer of updates on the way",
    "index": "the order and the weights of rows",
    "lineage": "which rows made which update",
    "rounds": "the fits of a loop",
    "eval": "samples with their prompts",
    "snapshot.json": "told in the card",
    "config.yaml": "told in the card",
    "ope.json": "told in the card",
    "metrics.jsonl": "told in the card, as far as it is the result",
}
"""Why something stays where it is; anything else that is not named stays as well."""

OTHER = "not a part of what is pushed"


@dataclass(frozen=True)
class Item:
    """A file of the repository: its name there, its size, and its content or where that lies."""

    name: str
    size: int
    content: bytes | Path

    @classmethod
    def of(cls, name: str, content: bytes | Path) -> "Item":
        """A file with its size."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        return cls(name, size, content)


@dataclass(frozen=True)
class Contents:
    """What is pushed, and what stays with the reason."""

    kind: Literal["model", "dataset"]
    items: list[Item]
    stays: dict[str, str]

    @property
    def size(self) -> int:
        """Bytes of all that is pushed."""
        return sum(item.size for item in self.items)

    def replaces(self, name: str) -> bool:
        """Whether a file that the repository has is an older part of the same, which these replace."""
        if name in {item.name for item in self.items}:
            return False
        if self.kind == "dataset":
            return name.split("/")[0] in DATA_FOLDERS and "/" in name
        return "/" not in name and name.startswith(WEIGHT_FILES) and ".safetensors" in name


def contents(path: str | Path, *, adapter: bool = False) -> Contents:
    """The files of the model of a run (or of its adapter), or of a dataset, with a card of this moment.

    Nothing is written. Raises DataError for a run without a model or a dataset without rows.
    """
    storage = open_storage(path)
    if not storage.is_local:
        raise ConfigError(f"{path} is not on this machine", "copy it to a local disk first")
    if is_run(storage):
        return _of_run(Path(path), ADAPTER_FOLDER if adapter else MODEL_FOLDER)
    if adapter:
        raise ConfigError(f"{path} is a dataset: it has no adapter", "leave --adapter out")
    return _of_dataset(data_tools.open(path))


def _of_run(run: Path, name: str) -> Contents:
    folder = run / name
    made = {Path(one.path).parent.name: one for one in card(run, write=False)}
    if name not in made:
        raise DataError(f"{run} has no {name}", "it is there once the fit has ended, of a fit of adapters")
    items, stays = [_card_item(made[name])], {}
    for file in sorted(folder.iterdir()):
        shown = f"{name}/{file.name}"
        if file.name == CARD:
            continue
        if file.is_symlink() or not file.is_file():
            stays[shown] = "a link or a folder"
        elif file.name.startswith(".") or file.suffix not in MODEL_FILES:
            stays[shown] = OTHER
        else:
            items.append(Item.of(file.name, file))
    stays |= {entry.name: _reason(entry.name) for entry in sorted(run.iterdir()) if entry.name != name}
    return Contents("model", items, stays)


def _of_dataset(ds: "Dataset") -> Contents:
    batches = ds.batches()
    if not batches:
        raise DataError(f"{ds.path} has no rows", "collect a log into it first")
    root = Path(ds.path)
    [made] = card(root, write=False)
    info = ds.info.model_copy(update={"secret": ""}).model_dump_json(indent=2)
    items = [_card_item(made), Item.of("rec.json", info.encode() + b"\n")]
    items += [Item.of(f"rollouts/{name}.parquet", root / f"rollouts/{name}.parquet") for name in batches]
    for name in ds.storage.stems("rewards", ".parquet"):
        items.append(Item.of(f"rewards/{name}.parquet", root / f"rewards/{name}.parquet"))
    items += [
        Item.of(f"policies/{stem}.json", _policy(ds, stem)) for stem in ds.storage.stems("policies", ".json")
    ]
    pushed = {"rec.json", CARD, *DATA_FOLDERS}
    stays = {e.name: _reason(e.name) for e in sorted(root.iterdir()) if e.name not in pushed}
    stays["the secret in rec.json"] = "what ids of people were hashed with"
    return Contents("dataset", items, stays)


def _policy(ds: "Dataset", stem: str) -> bytes:
    """A policy's card with its known fields alone, and of a path no folders of this machine."""
    found = PolicyCard.model_validate_json(ds.storage.read(f"policies/{stem}.json"))
    known = {name: getattr(found, name) for name in PolicyCard.model_fields} | {"model": place(found.model)}
    return PolicyCard(**known).model_dump_json(indent=2, exclude_none=True).encode() + b"\n"


def _card_item(made: Card) -> Item:
    return Item.of(CARD, made.text.encode())


def _reason(name: str) -> str:
    return STAYS.get(name, OTHER)
