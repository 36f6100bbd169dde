"""A small dataset, committed as `collect` does: groups of answers to sums, with log-probs of a tiny model."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import data_tools
from data_tools.dataset import Dataset
from tests import tiny
from tests.offline_rec.datasets import rollouts

GROUP = 4
SALT = "salt"


@cache
def tokenizer() -> Any:
    return tiny.tokenizer()


def ids(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def logprobs(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    """Log-probs of the response tokens by one plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)].tolist()


def rows(
    n_groups: int,
    *,
    seed: int = 0,
    model: Any = None,
    group: int = GROUP,
    before: str = "",
    **columns: Any,
) -> list[dict[str, Any]]:
    """`group` answers to each of `n_groups` sums, the right one first; lengths differ from row to row.

    Every prompt begins with the text `before`.
    """
    policy = tiny.model(len(tokenizer()), seed=0) if model is None else model
    made = []
    rng = np.random.default_rng(seed)
    for g in range(n_groups):
        a, b = rng.integers(0, 50, 2)
        prompt = f"{before}{a}+{b}="
        for k in range(group):
            answer = str(a + b) if k == 0 else str(rng.integers(0, 10 ** (1 + k)))
            response = [*ids(answer), 3]
            logged = logprobs(policy, ids(prompt), response)
            made.append(
                {
                    "response_id": f"r{g}-{k}",
                    "group_id": f"g{g}",
                    "prompt": prompt,
                    "response": answer,
                    "prompt_ids": ids(prompt),
                    "response_ids": response,
                    "behavior_logprobs": logged,
                    "behavior_logprob": float(np.sum(np.float32(logged), dtype=np.float64)),
                    "reward": float(answer == str(a + b)),
                    "policy": "tiny",
                    "policy_version": g % 3,
                    "temperature": 1.0,
                    "finish_reason": "stop",
                }
                | columns
            )
    return made


def dataset(path: Path, made: list[dict[str, Any]], *, holdout: float = 0.2, batches: int = 1) -> Dataset:
    """Commit rows in as many batches; the salt is fixed, so that the split is the same in every run."""
    data_tools.open(str(path), create=True, holdout=holdout)
    info = json.loads((path / "rec.json").read_text())
    (path / "rec.json").write_text(json.dumps(info | {"salt": SALT}))
    ds = data_tools.open(str(path))
    for part in np.array_split(np.arange(len(made)), batches):
        with ds.writer() as writer:
            writer.rollouts(rollouts([made[i] for i in part]))
            writer.commit()
    return ds
