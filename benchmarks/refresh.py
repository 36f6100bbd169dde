"""`rec refresh` and the samplers against calling vLLM directly with the same settings: tokens a second.

    python benchmarks/refresh.py --rounds 5 --output benchmarks/results/refresh.json

`generate` is vLLM's own `LLM.generate`, all prompts in one call, with log-probs of the sampled tokens and a
seed for each request; `requests` sends the same requests to a vLLM server as fast as it takes them, and
throws the answers away. Beside each, on the same engine: the sampler alone, and a whole refresh into a new
dataset, which journals every prompt, loads the model to verify some responses, writes the log and collects
it, without a reward. The start of an engine, and what is checked then, is outside of the times of all sides.

Ways take turns, and the first round of each is not counted; the ratio is the median over rounds. In-process,
time is that of the processor, so that a busy machine disturbs it little; vLLM has one thread. Needs vLLM in
this environment.
"""

import asyncio
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx2
import torch

import data_tools
from offline_rec.demo.model import build_tokenizer
from offline_rec.sampling import refresh as refreshing
from offline_rec.sampling.choose import SamplerSettings, open_sampler
from offline_rec.sampling.sampled_rows import Task
from offline_rec.sampling.sampler import SamplingParams

DIRECTLY = {"in-process": "generate", "server": "requests"}


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


def by_refresh(
    sampler: Any, settings: SamplerSettings, model: str, prompts: list[str], n: int, params: SamplingParams
) -> int:
    """Tokens that a refresh from the running engine adds to a new dataset."""
    with tempfile.TemporaryDirectory() as folder:
        ds = data_tools.open(f"{folder}/dataset", create=True)
        refreshing.open_sampler = lambda *_: nullcontext(sampler)  # type: ignore[attr-defined]
        return refreshing.refresh(
            ds, model, prompts=Task(prompts, {}), n=n, params=params, sampler=settings, policy="policy"
        ).tokens


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
@click.option("--prompts", default=256, show_default=True)
@click.option("-n", "n", default=8, show_default=True)
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def main(
    model: str | None, prompts: int, n: int, max_tokens: int, rounds: int, output: Path | None, as_json: bool
) -> None:
    """Measure all ways by turns."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = model or str(small_model(Path(folder) / "model"))
        texts = [f"{i} + {i * 7} = ? Let me think about it." for i in range(prompts)]
        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=max_tokens)
        rates: dict[str, list[float]] = {}
        for where, settings, by_direct, clock in (
            ("in-process", SamplerSettings("vllm"), by_generate, time.process_time),
            ("server", SamplerSettings("server", launch=True), by_requests, time.perf_counter),
        ):
            with open_sampler(directory, settings) as sampler:
                work = (texts, n, params)
                ways = {
                    DIRECTLY[where]: partial(by_direct, sampler, *work),
                    where: partial(by_sampler, sampler, *work),
                    f"rec refresh, {where}": partial(by_refresh, sampler, settings, directory, *work),
                }
                rates |= measure(ways, rounds, clock)
    facts = {"machine": platform.platform(), "cpus": os.cpu_count(), "gpu": torch.cuda.is_available()}
    asked = {"prompts": prompts, "n": n, "max_tokens": max_tokens, "rounds": rounds, "model": model or "tiny"}
    found = facts | asked | figures(rates)
    if output is not None:
        output.write_text(json.dumps(found, indent=2) + "\n")
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))


def figures(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Rates of every way, and ratios to calling vLLM directly."""
    ratios = {}
    for name, where in itertools.product(rates, DIRECTLY):
        if name.endswith(where):
            pairs = zip(rates[name], rates[DIRECTLY[where]], strict=True)
            ratios[name] = round(statistics.median(ours / direct for ours, direct in pairs), 3)
    told = {
        name: {"median": round(statistics.median(r)), "rounds": [*map(round, r)]} for name, r in rates.items()
    }
    return {"tokens_per_second": told, "ratios": ratios}


def lines(found: dict[str, Any]) -> list[str]:
    """The figures for a reader."""
    ratios = found["ratios"]
    return [
        f"{name:>24}: {rate['median']:>7} tokens/s" + (f", ratio {ratios[name]}" if name in ratios else "")
        for name, rate in found["tokens_per_second"].items()
    ]


if __name__ == "__main__":
    main()
