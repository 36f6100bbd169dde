"""A policy judged on the prompts of its task that nothing was trained on, sampled at temperature 1."""

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from offline_rec import rewards
from offline_rec.models.policy import Policy
from offline_rec.sampling.hf_sampler import HFSampler
from offline_rec.sampling.sampled_rows import Task as Asked
from offline_rec.sampling.sampled_rows import sample_rows
from offline_rec.sampling.sampler import SamplingParams

if TYPE_CHECKING:
    from benchmarks.paper.world import World

MAX_SEQUENCES = 2048


def judge(world: "World", model: Path, samples: int) -> dict[str, float]:
    """Mean reward, share of right responses, mean length; all policies share the noise of their samples."""
    policy = Policy.load(model, device="cpu")
    task = world.task
    rows = sample_rows(
        HFSampler(policy.model, policy.tokenizer, max_sequences=MAX_SEQUENCES),
        Asked(world.evaluation, {}),
        samples,
        SamplingParams(max_tokens=task.max_tokens, seed=10_000 + world.seed),
        reward=rewards.get(task.reward),
    )
    reward = rows["reward"]
    return {
        "reward": round(pc.mean(reward).as_py(), 5),
        "right": round(pc.mean(pc.greater_equal(reward, task.success).cast("float64")).as_py(), 5),
        "tokens": round(pc.mean(pc.list_value_length(rows["response_ids"])).as_py(), 3),
    }
