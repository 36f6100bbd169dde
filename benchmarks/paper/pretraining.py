"""The base policy: taught right responses until it gives them about half of the time."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from data_tools.errors import DataError
from offline_rec import rewards
from offline_rec.demo.model import END, build_model, build_tokenizer
from offline_rec.sampling.hf_sampler import HFSampler
from offline_rec.sampling.sampled_rows import Task as Asked
from offline_rec.sampling.sampled_rows import sample_rows
from offline_rec.sampling.sampler import SamplingParams

if TYPE_CHECKING:
    from benchmarks.paper.world import World

FREE = 16
"""Positions beyond the longest response."""


def pretrain(world: "World", pool: list[str], development: list[str]) -> tuple[Any, Any, int]:
    """A model whose sampled responses are right as often as the task's target; its tokenizer; and the steps.

    Raises DataError if it does not get there.
    """
    task, size = world.task, world.size
    tokenizer = build_tokenizer()
    model = build_model(
        tokenizer,
        seed=world.seed,
        positions=task.prompt_tokens + task.max_tokens + FREE,
        hidden=task.hidden,
        layers=task.layers,
    )
    rng = np.random.default_rng([world.seed, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, betas=(0.9, 0.98), weight_decay=0.0)
    right, near = 0.0, False
    for step in range(1, size.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = size.lr * min(1.0, step / size.warmup)
        model.train()
        asked = [pool[i] for i in rng.integers(0, len(pool), size.batch)]
        loss = _loss(model, tokenizer, asked, [task.teach(prompt, rng) for prompt in asked])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # Far from the target a look every now and then will do.
        if step % (size.check_every if near else 5 * size.check_every) == 0:
            right = _right(world, model, tokenizer, development)
            near = right > task.target / 4
            if right >= task.target:
                return model.eval(), tokenizer, step
    raise DataError(f"{task.name}: {right:.2f} right after {size.max_steps} steps", "try another seed")


def _loss(model: Any, tokenizer: Any, prompts: list[str], responses: list[str]) -> torch.Tensor:
    """Mean negative log-prob of the tokens of the responses and their ends; prompts are of one length."""
    texts = [prompt + response + END for prompt, response in zip(prompts, responses, strict=True)]
    ids = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    start = 1 + len(prompts[0])
    logits = model(input_ids=ids, use_cache=False).logits[:, start - 1 : -1]
    return cross_entropy(logits.flatten(0, 1), ids[:, start:].flatten(), ignore_index=tokenizer.pad_token_id)


def _right(world: "World", model: Any, tokenizer: Any, prompts: list[str]) -> float:
    """The share of right responses to prompts, one sample each."""
    task = world.task
    rows = sample_rows(
        HFSampler(model, tokenizer, max_sequences=1024),
        Asked(prompts, {}),
        1,
        SamplingParams(max_tokens=task.max_tokens, seed=world.seed),
        reward=rewards.get(task.reward),
    )
    return float(np.mean(rows["reward"].to_numpy() >= task.success))
