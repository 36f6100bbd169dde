"""Low-rank adapters on a frozen model, through peft: attaching, saving, opening, merging.

A weight W becomes W + (alpha / rank) * B A, of which only A and B are trained (arXiv 2106.09685). peft swaps
the layers inside the model, so body and output head stay where they are and log-probs are computed as ever.
B is zero at first: a fit begins as the model it starts from, bit for bit.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_tools.errors import ConfigError, DataError, MissingExtra
from offline_rec.config import FitConfig
from offline_rec.models.merging import NAME
from offline_rec.models.quiet import quiet
from offline_rec.models.saving import model_card, replacing, writing

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the names of a model's weights in an adapter's file."""


@dataclass(frozen=True)
class LoraSettings:
    """Rank and scale of adapters, the layers that get one (None: all linear but the head), the seed of A."""

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None
    seed: int = 0

    @classmethod
    def of(cls, config: FitConfig) -> "LoraSettings | None":
        """The settings that a configuration holds; None where all weights are fitted."""
        if config.lora_rank is None:
            return None
        return cls(config.lora_rank, config.lora_alpha, config.lora_targets, config.seed)


def is_adapter(directory: str | Path) -> bool:
    """Whether a directory holds an adapter, to be opened on its base model."""
    return (Path(directory) / CONFIG_FILE).is_file()


def base_of(directory: str | Path) -> Path:
    """The base model that an adapter names; `DataError` unless that is a local directory of a whole model."""
    path = Path(directory) / CONFIG_FILE
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path} cannot be read: {error}", "the adapter was saved incompletely") from error
    base = Path(named or "")
    if not named or not base.is_dir():
        raise DataError(
            f"the adapter in {directory} is made for {named or 'a base model it does not name'}, "
            "which is no local directory",
            f"fetch that model, and set base_model_name_or_path in {path} to its directory",
        )
    if is_adapter(base):
        raise DataError(f"the base model of the adapter in {directory}, {base}, is an adapter itself", MERGE)
    return base


MERGE = "merge the adapter into its base first, and name the merged model"


class Adapter:
    """Low-rank matrices inside a model, the only part of it that is trained."""

    def __init__(self, model: Any, settings: LoraSettings) -> None:
        """Freeze the model and put matrices beside its layers; the same for the same seed on any machine.

        `ConfigError` if no layer of the model is called as `settings.targets` say.
        """
        from_peft = _peft()
        targets = "all-linear" if settings.targets is None else list(settings.targets)
        config = from_peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=targets,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(), quiet():
            self._peft = _attach(model, config)
        self._draw(settings.seed)
        for place in ("input", "output"):
            layer = getattr(model, f"get_{place}_embeddings")()
            if hasattr(layer, "base_layer"):
                raise ConfigError(
                    f"lora_targets names the {place} embeddings of the model",
                    "name layers of its body, such as q_proj, or leave lora_targets out",
                )
        self._model = model

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        """Draw every A as peft does, but by a generator of its own: the same on any device, in any thread."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self._peft.named_parameters():
            if ".lora_A." in name:
                bound = parameter.shape[1] ** -0.5
                drawn = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
                parameter.copy_(drawn)

    def tensors(self, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The matrices under the names they have in a file; `state` replaces the model's own weights."""
        from peft import get_peft_model_state_dict

        named = None if state is None else {PREFIX + name: tensor for name, tensor in state.items()}
        found: dict[str, Tensor] = get_peft_model_state_dict(
            self._peft, state_dict=named, save_embedding_layers=False
        )
        return found

    def load(self, folder: Path) -> None:
        """Take the matrices that `save` wrote; `DataError` if they are those of another model or rank."""
        _fill(self._peft, folder)

    def save(
        self,
        directory: Path,
        *,
        base: str | Path,
        facts: Mapping[str, Any] | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """Write a directory that peft opens on the model at `base`; it appears whole, or stays as it was."""
        config = self._peft.peft_config[NAME]
        named = config.to_dict() | {"base_model_name_or_path": str(Path(base).resolve())}
        named |= {"inference_mode": True, "target_modules": sorted(config.target_modules)}
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.tensors(state).items()}
        with replacing(directory) as staged:
            staged.mkdir()
            with writing(staged):
                save_file(tensors, staged / WEIGHTS_FILE, metadata={"format": "pt"})
            (staged / CONFIG_FILE).write_text(json.dumps(named, indent=2, default=_plain), encoding="utf-8")
            card = model_card(directory.name, facts or {}, adapter=True)
            (staged / "README.md").write_text(card, encoding="utf-8")
        return directory


def open_merged(model: Any, directory: str | Path) -> Any:
    """The model with the adapter of a directory merged into its weights: a plain model again."""
    path = Path(directory)
    if not (path / WEIGHTS_FILE).is_file():
        raise DataError(
            f"{path} holds no {WEIGHTS_FILE}", "save the adapter as safetensors: nothing is unpickled"
        )
    from_peft = _peft()
    with quiet():
        try:
            config = from_peft.PeftConfig.from_pretrained(str(path))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path / CONFIG_FILE} cannot be read: {error}", MERGE) from error
        if not isinstance(config, from_peft.LoraConfig):
            raise DataError(f"the adapter in {path} is of type {config.peft_type}, not LORA", MERGE)
        wrapped = _attach(model, config)
        _fill(wrapped, path)
        return wrapped.merge_and_unload()


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtra("peft", "lora") from error
    return peft


def _attach(model: Any, config: Any) -> Any:
    """peft's own wrapper; the model inside it keeps its class, and is what computes."""
    try:
        return _peft().get_peft_model(model, config)
    except ValueError as error:
        # The only thing peft refuses that a user can cause: a model none of whose layers is named.
        told = str(error).split(". ")[0]
        raise ConfigError(
            f"no adapter can be put on this model: {told}", "name its linear layers in lora_targets"
        ) from error


def _fill(wrapped: Any, folder: Path) -> None:
    """Read the matrices of a folder into a model that has such ones; `DataError` where they differ."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    try:
        found = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{folder / WEIGHTS_FILE} cannot be read: {error}", "it was saved incompletely"
        ) from error
    wanted = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    shapes, theirs = ({name: tuple(t.shape) for name, t in each.items()} for each in (wanted, found))
    different = sorted(name for name in shapes.keys() | theirs.keys() if shapes.get(name) != theirs.get(name))
    if different:
        name = different[0]
        raise DataError(
            f"the adapter in {folder} does not fit the model: {name} is {theirs.get(name, 'absent')}, "
            f"not {shapes.get(name, 'of this model')}",
            "it was made for another base model, or with other settings",
        )
    set_peft_model_state_dict(wrapped, found)


def _plain(value: Any) -> Any:
    """What JSON has no form for: sets of names and enumerations."""
    return sorted(value) if isinstance(value, set) else str(getattr(value, "value", value))
