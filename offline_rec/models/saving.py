"""Model directories that other tools open as they are, and the name of the weights in them."""

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from data_tools.store.storage import write_error
from offline_rec.models.merging import INSIDE, has_adapter, plain_weights
from offline_rec.models.quiet import quiet

CARD = """---
library_name: {library}
pipeline_tag: text-generation
tags:
- offline-rec
---

# {title}

A policy fitted with `rec` to responses that were already logged.

| fact | value |
|---|---|
{facts}

```python
{usage}
```
"""

USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")"""

ADAPTER_USAGE = """\
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("PATH")"""


@torch.no_grad()
def weights_fingerprint(model: nn.Module, *, merged: bool = True) -> str:
    """32 hex digits over names, shapes and values of the parameters, adapters merged into them if `merged`.

    Values count as float32, so a model has the same fingerprint whether its file, or the copy in memory,
    keeps them in half precision or in full; a save and a reload keep it. Tied parameters count once.
    """
    digest = hashlib.blake2b(digest_size=16)
    named = sorted(model.named_parameters(), key=lambda pair: pair[0].replace(INSIDE, "."))
    for name, value in plain_weights(model, named, merged=merged):
        digest.update(f"{name} {tuple(value.shape)}\n".encode())
        digest.update(value.data.to("cpu", torch.float32).reshape(-1).numpy().data)
    return digest.hexdigest()


def save_directory(
    model: Any,
    tokenizer: Any,
    directory: str | Path,
    *,
    facts: Mapping[str, Any] | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write safetensors, configuration, generation settings, tokenizer and a model card with `facts`.

    The directory appears whole, or stays as it was. `state` replaces the model's own weights, for engines
    that gather them.
    """
    target = Path(directory)
    if state is None and has_adapter(model):
        state = model.state_dict()
    weights = None if state is None else dict(plain_weights(model, state.items(), merged=True))
    with replacing(target) as staged:
        with writing(staged), quiet():
            _save_model(model, staged, weights)
            tokenizer.save_pretrained(staged)
        (staged / "README.md").write_text(model_card(target.resolve().name, facts or {}), encoding="utf-8")
    return target


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A place to write a directory to, which takes that of `target` if the body ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield staged
        _replace(staged, target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a DataError that names the path safetensors could not write: its own error is no OSError."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        code = int(found[1]) if found else 0
        raise write_error(str(path), OSError(code, os.strerror(code) if code else str(error))) from error


def model_card(title: str, facts: Mapping[str, Any], *, adapter: bool = False) -> str:
    """A README.md in the form that model hubs show; values are text, whatever they hold."""
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items()]
    library, usage = ("peft", ADAPTER_USAGE) if adapter else ("transformers", USAGE)
    return CARD.format(title=title, facts="\n".join(rows), library=library, usage=usage)


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def _save_model(model: Any, directory: Path, state: dict[str, Tensor] | None) -> None:
    """Save the model, and its generation settings as they are: saving refuses those of some known models."""
    settings = model.generation_config
    try:
        if settings is not None:
            model.generation_config = type(settings)()
        model.save_pretrained(directory, state_dict=state)
    finally:
        model.generation_config = settings
    if settings is not None:
        settings.to_json_file(directory / "generation_config.json")


def _replace(staged: Path, target: Path) -> None:
    """Put the staged directory in place of the target, which a rename cannot do while it holds files."""
    if not target.exists():
        os.rename(staged, target)
        return
    old = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.old")
    os.rename(target, old)
    os.rename(staged, target)
    shutil.rmtree(old, ignore_errors=True)
