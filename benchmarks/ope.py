"""`rec ope` at 10 thousand and 100 thousand held-out rows: peak memory and seconds, scoring and after it.

    python benchmarks/ope.py --output benchmarks/results/ope.json

Every measurement is a process of its own. The rows are groups of eight responses of 64 tokens; the model is
as small as one can be, so that what grows with the rows is seen beside what torch takes anyway.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from measuring import machine, rec

import data_tools
from offline_rec.models.quiet import quiet

VOCABULARY, PROMPT, RESPONSE, GROUP = 64, 16, 64, 8
HOLDOUT = 0.999


def write_model(folder: Path) -> None:
    """One layer of width 16 over the vocabulary of the log."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
    )
    with quiet():
        LlamaForCausalLM(config).save_pretrained(folder)


def write_log(path: Path, rows: int) -> None:
    """Responses of random tokens, with log-probs near those of an untrained model."""
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            group = number // GROUP
            ids = rng.integers(2, VOCABULARY, RESPONSE)
            row = {
                "group_id": f"g{group}",
                "prompt": f"Prompt number {group}: what comes next?",
                "prompt_ids": [2 + (group * 31 + i) % (VOCABULARY - 2) for i in range(PROMPT)],
                "response": " ".join(f"w{i}" for i in ids),
                "response_ids": ids.tolist(),
                "behavior_logprobs": (-np.log(VOCABULARY) + rng.normal(0, 0.02, RESPONSE)).round(5).tolist(),
                "reward": int(rng.integers(0, 2)),
                "policy": "bench",
                "temperature": 1.0,
                "logprob_kind": "processed",
                "finish_reason": "length",
            }
            file.write(json.dumps(row) + "\n")


def measure_size(folder: Path, rows: int) -> dict[str, Any]:
    """Score and judge, then judge again what is scored already."""
    log, dataset, model = folder / "log.jsonl", str(folder / "dataset"), str(folder / "model")
    write_model(folder / "model")
    write_log(log, round(rows / HOLDOUT))
    data_tools.open(dataset, create=True, holdout=HOLDOUT)
    rec("collect", str(log), "--into", dataset)
    log.unlink()
    first = rec("ope", model, "--data", dataset, "--json")
    again = rec("ope", model, "--data", dataset, "--json")
    held = data_tools.open(dataset).sql("SELECT count(*) FROM rollouts WHERE split = 'holdout'")
    return {
        "held_out_rows": held.column(0)[0].as_py(),
        "scored_and_judged": asdict(first),
        "judged_again": asdict(again),
    }


@click.command()
@click.option("--rows", multiple=True, type=int, default=[10_000, 100_000], show_default=True)
@click.option("--output", type=click.Path(dir_okay=False), help="JSON file to write.")
def main(rows: tuple[int, ...], output: str | None) -> None:
    """Measure each size, and how peak memory grows from the first to the last."""
    sizes = []
    for count in rows:
        with tempfile.TemporaryDirectory() as folder:
            sizes.append(measure_size(Path(folder), count))
        print(json.dumps(sizes[-1], indent=1))
    growth = {
        phase: round(sizes[-1][phase]["peak_mib"] / sizes[0][phase]["peak_mib"], 3)
        for phase in ("scored_and_judged", "judged_again")
    }
    print(f"peak memory, last size over first: {growth}")
    if output:
        facts = {"machine": machine("torch", "duckdb"), "sizes": sizes, "peak_memory_last_over_first": growth}
        Path(output).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
