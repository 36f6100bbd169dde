"""`card`: writes the card of a run's model, or of a dataset, anew from what lies there now."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import data_tools
from data_tools.errors import ConfigError, DataError
from data_tools.run_directory import is_run
from data_tools.store.storage import open_storage
from offline_rec.cards.data_card import data_card
from offline_rec.cards.loop_card import fit_of_loop, is_loop
from offline_rec.cards.markdown import BEGIN, with_notes_of
from offline_rec.cards.model_card import model_card
from offline_rec.config import CONFIG_FILE, fit_config
from offline_rec.tracing.runs import updates_of
from offline_rec.training.checkpoint import ADAPTER_FOLDER, MODEL_FOLDER

if TYPE_CHECKING:
    from data_tools.dataset import Dataset

FILE = "README.md"


@dataclass(frozen=True)
class Card:
    """The text of a card, and the file that it belongs to."""

    path: str
    text: str


def card(path: str | Path, *, write: bool = True) -> list[Card]:
    """The cards of a run directory's weights, or of a dataset; written to their places unless told not to.

    What stands below the mark at the end of an earlier card is kept. Raises DataError for a run without a
    model, ConfigError where a README.md is somebody else's.
    """
    storage = open_storage(path)
    if not is_run(storage):
        return [_dataset_card(data_tools.open(path), write=write)]
    run = Path(path)
    folders = [name for name in (MODEL_FOLDER, ADAPTER_FOLDER) if (run / name).is_dir()]
    if not folders:
        raise DataError(f"{run} has no model yet", f"end the run: rec fit --out {run} --resume")
    made = [Card(str(run / name / FILE), run_card(run, name)) for name in folders]
    for one in made if write else ():
        put(Path(one.path), one.text)
    return made


def run_card(run: Path, name: str = MODEL_FOLDER, *, updates: int | None = None) -> str:
    """The card of what a run ended with; `updates`: after how many, where its present card does not say."""
    folder, adapter = run / name, name == ADAPTER_FOLDER
    known = updates_of(folder) if updates is None else updates
    fit, loop = (fit_of_loop(run, known), run) if is_loop(run) else (run, None)
    text = model_card(fit, fit_config(fit / CONFIG_FILE), updates=known, loop=loop, adapter=adapter)
    old = folder / FILE
    return with_notes_of(old.read_text(encoding="utf-8"), text) if old.exists() else text


def write_run_cards(run: Path, updates: int) -> None:
    """Write the cards of what a fit, or a loop, has just ended with."""
    for name in (MODEL_FOLDER, ADAPTER_FOLDER):
        if (run / name).is_dir():
            put(run / name / FILE, run_card(run, name, updates=updates))


def put(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    staged = path.with_name(f".{path.name}.tmp")
    staged.write_text(text, encoding="utf-8")
    os.replace(staged, path)


def _dataset_card(ds: "Dataset", *, write: bool) -> Card:
    text = data_card(ds)
    storage, where = ds.storage, ds.storage.url(FILE)
    if storage.exists(FILE):
        old = storage.read(FILE).decode("utf-8", errors="replace")
        if BEGIN not in old:
            raise ConfigError(f"{where} was not written by rec card", "move it away, or name a file with -o")
        text = with_notes_of(old, text)
    if write:
        storage.write(FILE, text.encode())
    return Card(where, text)
