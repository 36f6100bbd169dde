"""A causal language model and its tokenizer from a local Hugging Face directory, or one clear error."""

import logging
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from data_tools.errors import ConfigError, DataError, MissingExtra
from offline_rec.models.adapters import base_of, is_adapter, open_merged
from offline_rec.models.quiet import quiet

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def choose_device(name: str = "auto") -> torch.device:
    """The device of that name; `auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}", "use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {name} is asked for, but torch sees no GPU",
            "use --device cpu or auto, or --processes in place of --gpus",
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; `auto` is bfloat16 on a GPU, float32 on a CPU (half is emulated there)."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}", f"use auto, {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def check_kernels(kernels: Collection[str], device: torch.device) -> None:
    """Raise ConfigError where GPU kernels are asked for that cannot run."""
    if kernels and device.type != "cuda":
        raise ConfigError(
            f"kernels {', '.join(kernels)} run on a GPU, and the device is {device}", "leave kernels empty"
        )
    if "triton" in kernels and find_spec("triton") is None:
        raise ConfigError(
            "kernels has triton, which is not installed",
            "pip install triton (torch's CUDA build for Linux brings it), or leave it out",
        )


def load_tokenizer(directory: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory, or of the base of an adapter that brings none.

    Raises DataError if the directory does not exist, holds no tokenizer, or one that does not load.
    """
    path = _directory(directory)
    there = any((path / name).exists() for name in TOKENIZER_FILES)
    if not there and is_adapter(path):
        return load_tokenizer(base_of(path), trust_remote_code=trust_remote_code)
    if not there:
        raise DataError(
            f"{path} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)})",
            "copy the tokenizer files of the model into the directory",
        )
    with quiet():
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                path, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:
            raise _unreadable(path, "tokenizer", error) from error


def load_model(
    directory: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantise: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The causal language model of a directory, in eval mode on `device`.

    An adapter is merged into the base model that it names; into the rounded weights of a quantised one,
    which then are full ones again. `quantise`: 4bit or 8bit weights of the linear layers, the head excepted.

    Raises DataError if the directory does not exist, holds no safetensors weights, or not all weights of the
    model it describes: a weight made up at random would be silently wrong.
    """
    path = _directory(directory)
    if is_adapter(path):
        options: dict[str, Any] = {"quantise": quantise, "trust_remote_code": trust_remote_code}
        base = load_model(base_of(path), device=device, dtype=dtype, **options)
        with quiet():
            plain = base if quantise is None else base.dequantize()
        return open_merged(plain, path).to(device).eval()
    if not (path / "config.json").exists():
        raise DataError(f"{path} has no config.json", "name a Hugging Face model directory")
    if not any(path.glob("*.safetensors")):
        raise _no_weights(path)
    rounding = _quantised(quantise, device, dtype)
    with quiet():
        from transformers import AutoModelForCausalLM

        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **rounding,
            )
        except Exception as error:
            raise _unreadable(path, "model", error) from error
    _check_weights(path, report)
    attend_as_configured(model)
    if quantise is None:
        return model.to(device).eval()
    for layer in model.modules():
        # On some CPUs a pass without gradient would lay the weights out anew, in a way that has no gradient.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return model.eval()


def attend_as_configured(model: Any) -> None:
    """Attend by plain products where a model caps its attention scores: torch's own attention has no cap.

    transformers leaves the cap out without a word then, so that log-probs are another model's (Gemma 2).
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")


def _quantised(kind: str | None, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments that make transformers round the weights as it reads them (arXiv 2305.14314)."""
    if kind is None:
        return {}
    if find_spec("bitsandbytes") is None:
        raise MissingExtra("bitsandbytes", "qlora")
    from transformers import BitsAndBytesConfig

    # It tells of a cast at every product of every layer.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if kind == "8bit":
        settings = BitsAndBytesConfig(load_in_8bit=True)
    else:
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return {"quantization_config": settings, "device_map": {"": device}}


def _check_weights(path: Path, report: Mapping[str, Any]) -> None:
    """Refuse weights that are missing or of another shape; warn of those that are no part of the model."""
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, found, wanted = mismatched[0]
        raise DataError(
            f"{path}: {len(mismatched)} weights have another shape than config.json says: {name} is "
            f"{tuple(found)}, not {tuple(wanted)}",
            "config.json belongs to another model, or the vocabulary was resized without it",
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise DataError(
            f"{path}: {len(missing)} weights of the model are not in its files: {', '.join(missing[:5])}",
            "the download or the save was incomplete, or config.json belongs to another model",
        )
    unused = sorted(report["unexpected_keys"])
    if unused:
        log.warning(
            "%s: %d weights in its files are no part of the model in config.json, and are left out: %s",
            *(path, len(unused), ", ".join(unused[:3])),
        )


def _directory(directory: str | Path) -> Path:
    path = Path(directory)
    if not path.is_dir():
        raise DataError(
            f"no model directory at {path}",
            "a model is a local Hugging Face directory; fetch one with: hf download NAME --local-dir DIR",
        )
    return path


def _no_weights(path: Path) -> DataError:
    if any(path.glob("*.bin")):
        return DataError(
            f"{path} holds pickled weights only (*.bin), which are never loaded",
            "save the model as safetensors: model.save_pretrained(DIR)",
        )
    return DataError(f"{path} holds no weights (*.safetensors)", "the download or the save was incomplete")


def _unreadable(path: Path, what: str, error: Exception) -> DataError:
    text = str(error)
    if "trust_remote_code" in text:
        return DataError(
            f"the {what} in {path} brings its own code, which is not run",
            "read that code, then allow it with trust_remote_code",
        )
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return DataError(
        f"the {what} in {path} does not load: {first}", "its files are incomplete or of another kind"
    )
