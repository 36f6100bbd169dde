"""The estimate of memory before a fit, against the peak that a step of it takes.

    python benchmarks/memory.py --output benchmarks/results/memory.json

Every case is a process of its own. It loads a model, then makes two updates (the second has the optimizer's
moments) of a micro-batch twice, on the CPU. Measured is the highest resident memory since before the load:
as it is, and with an allocator that gives back blocks of 1 MiB and more (MALLOC_MMAP_THRESHOLD_), which glibc
else keeps in pieces once it has seen larger ones.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any], tuple[int, int]]] = {
    "llama, few tokens": ("llama", WIDE, {}, (2, 128)),
    "llama, many tokens": ("llama", SMALL, {}, (8, 512)),
    "llama, recomputed": ("llama", SMALL, {"gradient_checkpointing": True}, (8, 512)),
    "llama, adapters": ("llama", SMALL, {"lora_rank": 8}, (8, 512)),
    "llama, bfloat16": ("llama", WIDE, {"dtype": "bfloat16"}, (4, 256)),
    "qwen3, long rows": ("qwen3", SMALL | {"head_dim": 64}, {}, (2, 1024)),
    "gpt2, many tokens": ("gpt2", {"n_embd": 256, "n_layer": 6, "n_head": 4}, {}, (8, 512)),
    "llama, large vocabulary": ("llama", SMALL | {"vocab_size": 100_000}, {}, (8, 256)),
}


def make_model(folder: Path, family: str, sizes: dict[str, int]) -> None:
    """A model of random weights, with a tokenizer that nothing uses."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    config = AutoConfig.for_model(family, **{"vocab_size": 32_000, "max_position_embeddings": 4096} | sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)


def resident(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) << 10


def measure(folder: Path, name: str) -> dict[str, Any]:
    """Estimate, then load and update, in this process."""
    import numpy as np
    import torch

    from offline_rec.config import FitConfig
    from offline_rec.data.ragged import Ragged
    from offline_rec.data.rows import Rows
    from offline_rec.models.adapters import LoraSettings
    from offline_rec.models.policy import Policy
    from offline_rec.training.engine import OptimizerSettings
    from offline_rec.training.engines.plain import TorchEngine
    from offline_rec.training.memory import estimate

    _, _, options, (batch, length) = CASES[name]
    config = FitConfig(dataset="none", model=str(folder), out="none", device="cpu", **options)
    needs = estimate(config, torch.device("cpu"), tokens=batch * length, longest=length)
    assert needs is not None
    rng = np.random.default_rng(0)
    half = np.full(batch, length // 2)
    ids = [Ragged(rng.integers(0, 32_000, batch * (length // 2)), np.cumsum([0, *half])) for _ in range(2)]
    ones = Ragged.full(half, 1, np.float32)
    temperature = np.ones(batch, np.float32)
    rows = Rows([str(i) for i in range(batch)], *ids, ones, ones, None, None, temperature)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest so far counts from here
    engine = TorchEngine("cpu")
    policy = Policy.load(
        folder,
        device="cpu",
        dtype=config.dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        lora=LoraSettings.of(config),
    )
    policy.module = engine.prepare(policy.module, OptimizerSettings.of(config))
    for _ in range(2):
        for _ in range(2):  # micro-batches: the second pass has the gradients of the first beside it
            engine.backward(-policy.logprobs(rows).sum())
        engine.step(1e-6)
    measured = resident("VmHWM") - before
    mib = {key: round(size / (1 << 20), 1) for key, size in needs.rows()}
    return {"estimate_mib": mib, "measured_mib": round(measured / (1 << 20), 1)}


def run(folder: str, name: str, allocator: dict[str, str]) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--one", folder, name]
    environment = {**os.environ, **allocator}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@click.command()
@click.option("--case", "cases", multiple=True, type=click.Choice(list(CASES)), help="All by default.")
@click.option("--output", type=click.Path(dir_okay=False), help="JSON file to write.")
@click.option("--one", nargs=2, hidden=True)
def main(cases: tuple[str, ...], output: str | None, one: tuple[str, str] | None) -> None:
    """Hold estimates against measured peaks."""
    if one:
        print(json.dumps(measure(Path(one[0]), one[1])))
        return
    found: list[dict[str, Any]] = []
    for name in cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), *CASES[name][:2])
            runs = [run(folder, name, allocator) for allocator in ({}, GIVES_BACK)]
        peak = runs[0]["estimate_mib"]["peak"]
        measured = [facts["measured_mib"] for facts in runs]
        found.append(
            {
                "case": name,
                "estimate_mib": runs[0]["estimate_mib"],
                "measured_mib": measured[0],
                "measured_giving_back_mib": measured[1],
                "estimate_to_measured": [round(peak / each, 2) for each in measured],
            }
        )
        print(found[-1])
    if output:
        import torch
        import transformers

        machine = {"machine": platform.machine(), "torch": torch.__version__}
        versions = machine | {"transformers": transformers.__version__}
        Path(output).write_text(json.dumps({**versions, "cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
