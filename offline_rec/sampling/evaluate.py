"""What a policy is worth, by sampling it: accuracy, mean reward and pass@k, with intervals.

The samples of one prompt are alike, so prompts are what is drawn again in the bootstrap. Every statistic is a
mean over prompts of a number for each prompt, whose samples count equally.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_tools.errors import ConfigError, DataError
from offline_rec.rewards import Reward
from offline_rec.sampling.sampled_rows import REASON, Task, sample_rows
from offline_rec.sampling.sampler import Progress, Sampler, SamplingParams

RESAMPLES = 2000
CORRECT = 1.0
"""Reward from which on a response counts as correct."""

Measure = Literal["accuracy", "mean_reward"]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """What the samples of one policy say; `to_dict` is plain JSON.

    `accuracy`: share of judged samples with a reward of at least `CORRECT`. `pass_at[k]`: chance that one of
    k samples is correct. `unjudged` samples, with a null reward, are left out of all of these.
    """

    policy: str | None
    prompts: int
    samples: int
    unjudged: int
    accuracy: Interval
    mean_reward: Interval
    pass_at: dict[int, Interval]
    mean_tokens: float
    cut_share: float

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts of numbers and text."""
        return asdict(self)


@dataclass(frozen=True)
class Evaluation:
    """The samples as a table (`sampled_rows`), and what they say."""

    rows: pa.Table
    summary: Summary


def evaluate(
    sampler: Sampler,
    task: Task,
    reward: Reward,
    *,
    n: int = 1,
    params: SamplingParams | None = None,
    pass_at: Sequence[int] = (),
    policy: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Sample `n` responses to each prompt of the task, judge them, and summarise.

    Policies that are sampled with one seed share their noise, which sharpens `compare`. Raises ConfigError if
    a k of `pass_at` exceeds `n`.
    """
    if any(not 1 <= k <= n for k in pass_at):
        raise ConfigError(f"pass@k needs k from 1 to the samples a prompt, {n}; got {list(pass_at)}")
    rows = sample_rows(
        sampler, task, n, params or SamplingParams(), reward=reward, policy=policy, progress=progress
    )
    return Evaluation(rows, summarise(rows, pass_at=pass_at))


def summarise(rows: pa.Table, *, pass_at: Sequence[int] = (), seed: int = 0) -> Summary:
    """Statistics of the rows of one policy; DataError if none of them was judged."""
    counts = _by_prompt(rows)
    if not len(counts.keys):
        told = rows[REASON].drop_null().to_pylist() if REASON in rows.column_names else []
        why = f": {told[0]}" if told else ""
        raise DataError(
            f"none of the samples was judged{why}", f"look at the column {REASON}, and at the reward"
        )
    names = rows["policy"].unique().to_pylist()
    enough = {k: counts.judged >= k for k in pass_at}
    return Summary(
        policy=names[0] if len(names) == 1 else None,
        prompts=len(counts.keys),
        samples=rows.num_rows,
        unjudged=rows["reward"].null_count,
        accuracy=bootstrap(counts.correct / counts.judged, seed=seed),
        mean_reward=bootstrap(counts.reward / counts.judged, seed=seed),
        pass_at={
            k: bootstrap(pass_at_k(counts.judged[rich], counts.correct[rich], k), seed=seed)
            for k, rich in enough.items()
            if rich.any()
        },
        mean_tokens=float(pc.mean(pc.list_value_length(rows["response_ids"])).as_py()),
        cut_share=float(pc.mean(pc.equal(rows["finish_reason"], "length").cast("float64")).as_py()),
    )


def compare(first: pa.Table, second: pa.Table, *, measure: Measure = "accuracy", seed: int = 0) -> Interval:
    """How much better the second policy is than the first on the prompts that both have judged samples of.

    Paired by the text of the prompt: what makes a prompt hard for both does not widen the interval.
    """
    values = [
        dict(zip(counts.keys, getattr(counts, _SUMS[measure]) / counts.judged, strict=True))
        for counts in (_by_prompt(first), _by_prompt(second))
    ]
    shared = [key for key in values[0] if key in values[1]]
    if not shared:
        raise DataError(
            "the two policies have no judged prompt in common", "evaluate them on the same prompts"
        )
    return bootstrap(np.array([values[1][key] - values[0][key] for key in shared]), seed=seed)


def bootstrap(values: NDArray[np.float64], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The mean of `values`, one for each cluster, and its percentile bootstrap interval."""
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    at_a_time = max(1, 4_000_000 // len(values))  # memory does not grow with the number of prompts
    for start in range(0, resamples, at_a_time):
        part = means[start : start + at_a_time]
        part[:] = values[rng.integers(0, len(values), (len(part), len(values)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))


def pass_at_k(samples: NDArray[np.int64], correct: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    """Unbiased chance that k samples hold a correct one: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374)."""
    return np.array(
        [
            1 - math.comb(int(n) - int(c), k) / math.comb(int(n), k)
            for n, c in zip(samples, correct, strict=True)
        ]
    )


_SUMS: dict[Measure, str] = {"accuracy": "correct", "mean_reward": "reward"}


@dataclass(frozen=True)
class _Counts:
    """For each prompt with judged samples: how many, how many of them are correct, and their reward."""

    keys: list[str]
    judged: NDArray[np.int64]
    correct: NDArray[np.int64]
    reward: NDArray[np.float64]


def _by_prompt(rows: pa.Table) -> _Counts:
    judged = rows.filter(pc.is_valid(rows["reward"]))
    prompts = judged["prompt"].combine_chunks().dictionary_encode()
    codes = prompts.indices.to_numpy()
    rewards = judged["reward"].to_numpy()

    def total(values: NDArray[np.float64] | None = None) -> NDArray[Any]:
        return np.bincount(codes, values, len(prompts.dictionary))

    return _Counts(
        keys=prompts.dictionary.to_pylist(),
        judged=total(),
        correct=total((rewards >= CORRECT).astype(float)).astype(np.int64),
        reward=total(rewards),
    )
