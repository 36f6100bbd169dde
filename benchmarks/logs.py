"""Logs made for measuring: rows in the dataset's own columns, and calls of a chat server."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

TOKENS = 200
VOCABULARY = 32_000

ROW = (
    '{{"group_id":"g{group}","prompt":"Prompt number {group}: what comes next?","prompt_ids":[{prompt}],'
    '"response_ids":[{ids}],"behavior_logprobs":[{logprobs}],"reward":{reward},'
    '"policy":"bench","policy_version":{version},"temperature":1.0,"logprob_kind":"processed","finish_reason":"stop"}}\n'
)

COLUMNS = {
    **dict.fromkeys(["group_id", "prompt", "policy", "logprob_kind", "finish_reason"], "VARCHAR"),
    **dict.fromkeys(["prompt_ids", "response_ids"], "INTEGER[]"),
    "behavior_logprobs": "FLOAT[]",
    "reward": "DOUBLE",
    "policy_version": "BIGINT",
    "temperature": "FLOAT",
}
"""The fields of ROW as DuckDB types."""


def write_rows(path: Path, rows: int, *, seed: int) -> None:
    """JSONL in the dataset's own columns: groups of eight, 200 tokens a response, ids and log-probs."""
    numbers, choose = np.random.default_rng(seed), random.Random(seed)
    ids = [str(token) for token in range(VOCABULARY)]
    logprobs = [f"{x:.5f}" for x in -numbers.exponential(0.5, VOCABULARY)]
    with path.open("w", encoding="utf-8", buffering=1 << 20) as file:
        for row in range(rows):
            group = row // 8
            file.write(
                ROW.format(
                    group=group,
                    prompt=",".join(ids[(group * 31 + i) % VOCABULARY] for i in range(20)),
                    ids=",".join(choose.choices(ids, k=TOKENS)),
                    logprobs=",".join(choose.choices(logprobs, k=TOKENS)),
                    reward=choose.randrange(2),
                    version=row * 8 // rows,
                )
            )


def write_calls(path: Path, calls: int, *, seed: int) -> None:
    """Request-response pairs of an OpenAI-compatible chat server, with the log-prob of each of 200 tokens."""
    with path.open("w", encoding="utf-8", buffering=1 << 20) as file:
        file.writelines(json.dumps(call) + "\n" for call in _calls(calls, random.Random(seed)))


def _calls(count: int, choose: random.Random) -> Iterator[dict[str, object]]:
    words = [" " + "".join(choose.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(4096)]
    for number in range(count):
        said = choose.choices(words, k=TOKENS)
        entries = [
            {
                "token": word,
                "logprob": -round(choose.expovariate(2), 6),
                "bytes": list(word.encode()),
                "top_logprobs": [],
            }
            for word in said
        ]
        message = {"role": "assistant", "content": "".join(said), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": {"content": entries}, "finish_reason": "stop"}
        yield {
            "request": {
                "model": "bench",
                "messages": [{"role": "user", "content": f"Prompt number {number // 8}"}],
                "temperature": 1.0,
                "logprobs": True,
            },
            "response": {
                "id": f"chatcmpl-{number}",
                "object": "chat.completion",
                "created": 1764000000 + number,
                "model": "bench",
                "choices": [choice],
                "usage": {"prompt_tokens": 12, "completion_tokens": TOKENS, "total_tokens": TOKENS + 12},
            },
            "reward": choose.randrange(2),
        }
