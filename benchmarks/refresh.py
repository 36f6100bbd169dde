"""Sampling through the samplers against calling vLLM directly with the same settings: tokens a second.

    python benchmarks/refresh.py --rounds 5 --output benchmarks/results/refresh.json

`generate` is vLLM's own `LLM.generate`, all prompts in one call, with log-probs of the sampled tokens and a
seed for each request; `in-process` is `VLLMSampler` on the same engine. `requests` sends the same requests to
a vLLM server as fast as it takes them, and throws the answers away; `server` is `ServerSampler` on it.
Ways take turns, and the first round of each is not counted; the ratio is the median over rounds. In-process,
time is that of the processor, so that a busy machine disturbs it little; vLLM has one thread. Needs vLLM in
this environment.
"""

import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx2
import torch

from offline_rec.demo.model import build_tokenizer
from offline_rec.sampling.choose import SamplerSettings, open_sampler
from offline_rec.sampling.sampler import SamplingParams

PAIRS = (("in-process", "generate"), ("server", "requests"))


def small_model(directory: Path) -> Path:
    """A Llama of four layers and 0.9 million parameters, of characters, that mostly goes on to the end."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def by_generate(sampler: Any, prompts: list[str], n: int, params: SamplingParams) -> int:
    """Tokens that `LLM.generate` gives."""
    from vllm import SamplingParams as VLLMParams

    settings = [
        VLLMParams(
            n=n,
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_tokens,
            seed=request.seed,
            logprobs=0,
        )
        for request in sampler.reader.requests(prompts, n, params)
    ]
    inputs = [{"prompt_token_ids": ids} for ids in sampler.reader.encode(prompts)]
    outputs = sampler._llm.generate(inputs, settings, use_tqdm=False)
    return sum(len(one.token_ids) for output in outputs for one in output.outputs)


def by_requests(sampler: Any, prompts: list[str], n: int, params: SamplingParams) -> int:
    """Tokens of the same requests, sent by a bare client."""

    async def run() -> int:
        bodies = [sampler.body(request, params) for request in sampler.reader.requests(prompts, n, params)]
        async with httpx2.AsyncClient(timeout=600, trust_env=False, verify=False) as client:
            url = f"{sampler.connection.urls[0]}/v1/completions"
            answers = await asyncio.gather(*(client.post(url, json=body) for body in bodies))
        return sum(answer.json()["usage"]["completion_tokens"] for answer in answers)

    return asyncio.run(run())


def by_sampler(sampler: Any, prompts: list[str], n: int, params: SamplingParams) -> int:
    """Tokens that the sampler gives."""
    return sum(len(s.response_ids) for _, samples in sampler.stream(prompts, n, params) for s in samples)


def measure(
    ways: dict[str, Callable[[], int]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Tokens a second of each way in each round, by turns."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = clock()
            tokens = way()
            if number:
                rates[name].append(tokens / (clock() - start))
    return rates


@click.command()
@click.option(
    "--model", help="A model directory. [default: a Llama of 0.9 million parameters, made on the spot]"
)
@click.option("--prompts", default=64, show_default=True)
@click.option("-n", "n", default=8, show_default=True)
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(model: str | None, prompts: int, n: int, max_tokens: int, rounds: int, output: Path | None) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    with tempfile.TemporaryDirectory() as folder:
        directory = model or str(small_model(Path(folder) / "model"))
        texts = [f"{i} + {i * 7} = ? Let me think about it." for i in range(prompts)]
        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=max_tokens)
        found: dict[str, list[float]] = {}
        for settings, (ours, direct), by_direct, clock in (
            (SamplerSettings("vllm"), PAIRS[0], by_generate, time.process_time),
            (SamplerSettings("server", launch=True), PAIRS[1], by_requests, time.perf_counter),
        ):
            with open_sampler(directory, settings) as sampler:
                ways = {
                    direct: partial(by_direct, sampler, texts, n, params),
                    ours: partial(by_sampler, sampler, texts, n, params),
                }
                found |= measure(ways, rounds, clock)
    ratios = {
        ours: round(statistics.median(a / b for a, b in zip(found[ours], found[direct], strict=True)), 3)
        for ours, direct in PAIRS
    }
    rates = {
        name: {"median": round(statistics.median(r)), "rounds": [*map(round, r)]} for name, r in found.items()
    }
    for ours, direct in PAIRS:
        click.echo(
            f"{ours:>10}: {rates[ours]['median']:>7} tokens/s, {direct}: {rates[direct]['median']:>7}, "
            f"ratio {ratios[ours]}"
        )
    facts = {"machine": platform.platform(), "cpus": os.cpu_count(), "gpu": torch.cuda.is_available()}
    work = {"prompts": prompts, "n": n, "max_tokens": max_tokens, "rounds": rounds, "model": model or "tiny"}
    if output is not None:
        output.write_text(
            json.dumps({**facts, **work, "tokens_per_second": rates, "ratios": ratios}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
