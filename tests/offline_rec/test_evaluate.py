"""Sampled evaluation: intervals over prompts, pairs, pass@k, and rows that are a log."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

from data_tools.errors import ConfigError, DataError
from offline_rec import rewards
from offline_rec.sampling.evaluate import bootstrap, compare, evaluate, pass_at_k, summarise
from offline_rec.sampling.sampled_rows import LOGGED, Task, sample_rows, write_jsonl
from offline_rec.sampling.sampler import Progress, Prompt, Sample, SamplingParams


class Scripted:
    """A sampler that says what it was told to, prompt by prompt."""

    def __init__(self, responses: dict[str, list[str]]) -> None:
        self.responses = responses

    def sample(
        self,
        prompts: Sequence[str | Prompt],
        n: int,
        params: SamplingParams,
        *,
        progress: Progress | None = None,
    ) -> list[list[Sample]]:
        texts = [self.responses[p if isinstance(p, str) else p.text][:n] for p in prompts]
        return [[Sample([1], [5, 6], [-0.5, -0.25], "stop", text) for text in group] for group in texts]


def judged(prompts: list[str], values: list[float | None], policy: str = "p") -> pa.Table:
    return pa.table(
        {
            "prompt": prompts,
            "reward": pa.array(values, pa.float64()),
            "policy": [policy] * len(prompts),
            "response_ids": [[1, 2]] * len(prompts),
            "finish_reason": ["stop", "length"] * (len(prompts) // 2) + ["stop"] * (len(prompts) % 2),
        }
    )


TASK = Task(["a", "b"], {"answers": ["1", "2"], "tier": ["gold", "iron"]})
SAYS = Scripted({"a": ["1", "1", "1", "0"], "b": ["2", "0", "0", "0"]})


def test_accuracy_reward_and_pass_at_k_of_two_prompts() -> None:
    found = evaluate(SAYS, TASK, rewards.get("exact"), n=4, pass_at=[1, 2, 4], policy="mine")
    summary = found.summary
    assert (summary.policy, summary.prompts, summary.samples, summary.unjudged) == ("mine", 2, 8, 0)
    assert summary.accuracy.value == summary.mean_reward.value == 0.5
    # b: of the 6 pairs of samples 3 hold the correct one; a: all.
    assert [summary.pass_at[k].value for k in (1, 2, 4)] == pytest.approx([0.5, 0.75, 1.0])
    assert (summary.accuracy.low, summary.accuracy.high) == (0.25, 0.75)
    assert orjson.loads(orjson.dumps(summary.to_dict(), option=orjson.OPT_NON_STR_KEYS))["samples"] == 8


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample() -> None:
    for n, c, k in itertools.product(range(1, 6), range(6), range(1, 6)):
        if c > n or k > n:
            continue
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(np.array([n]), np.array([c]), k)[0] == pytest.approx(expected)


def test_a_response_that_could_not_be_judged_counts_neither_way() -> None:
    summary = summarise(judged(["a", "a", "b", "b", "c"], [1.0, None, 0.0, 0.5, None]), pass_at=[2])
    assert (summary.prompts, summary.unjudged) == (2, 2)
    assert summary.accuracy.value == 0.5
    assert summary.mean_reward.value == pytest.approx((1.0 + 0.25) / 2)
    assert summary.pass_at[2].value == 0.0  # of b alone: a has one judged sample
    assert summary.cut_share == pytest.approx(0.4)
    with pytest.raises(DataError, match="none of the samples was judged"):
        summarise(judged(["a"], [None]))


def test_the_interval_covers_the_mean_of_a_binary_reward_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(400):
        hardness = rng.beta(2, 2, 120)  # samples of a prompt are alike
        values = rng.binomial(4, hardness) / 4
        interval = bootstrap(values, seed=trial, resamples=400)
        hits += interval.low <= 0.5 <= interval.high
    assert 0.92 <= hits / 400 <= 0.98


def test_the_interval_is_that_of_all_ways_to_draw_the_prompts_again() -> None:
    values = np.array([0.0, 0.0, 0.05, 0.1, 1.0])
    every = [np.mean(drawn) for drawn in itertools.product(values, repeat=len(values))]
    interval = bootstrap(values, resamples=200_000)
    low, high = np.quantile(every, [0.025, 0.975])
    assert interval.value == pytest.approx(np.mean(values))
    assert (interval.low, interval.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))
    # The normal approximation, for which these are too few, would go below 0.
    assert interval.value - 1.96 * np.std(values) / np.sqrt(5) < 0 <= interval.low


def test_samples_of_one_prompt_do_not_narrow_the_interval_as_new_prompts_would() -> None:
    rng = np.random.default_rng(1)
    prompts = [f"p{i}" for i in range(50)]
    truth = rng.integers(0, 2, 50).astype(float).tolist()
    once = summarise(judged(prompts, truth)).accuracy
    often = summarise(judged(prompts * 20, truth * 20)).accuracy
    assert often == once


def test_the_paired_difference_is_sharper_than_two_intervals() -> None:
    rng = np.random.default_rng(2)
    prompts = [f"p{i}" for i in range(200)]
    hard = rng.integers(0, 2, 200).astype(float)
    better = np.where(rng.random(200) < 0.1, 1.0, hard)
    first, second = (judged(prompts, values.tolist()) for values in (hard, better))
    gain = compare(first, second)
    assert gain.value == pytest.approx((better - hard).mean())
    assert gain.low > 0
    assert summarise(second).accuracy.low < summarise(first).accuracy.high
    backwards = compare(second, first)
    assert backwards.value == pytest.approx(-gain.value)


def test_a_comparison_uses_the_prompts_that_both_have() -> None:
    first, second = judged(["a", "b", "c"], [0.0, 1.0, None]), judged(["d", "b", "a"], [1.0, 1.0, 0.5])
    assert compare(first, second, measure="mean_reward").value == 0.25
    with pytest.raises(DataError, match="no judged prompt in common"):
        compare(first, judged(["x"], [1.0]))


def test_a_large_number_of_prompts_gives_the_same_interval_in_parts() -> None:
    values = np.random.default_rng(3).random(9000)
    interval = bootstrap(values)
    spread = 1.96 * values.std() / np.sqrt(len(values))
    assert interval.low == pytest.approx(values.mean() - spread, abs=spread / 10)
    assert interval.high == pytest.approx(values.mean() + spread, abs=spread / 10)


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="pass@k"):
        evaluate(SAYS, TASK, rewards.get("exact"), n=2, pass_at=[3])
    with pytest.raises(ConfigError, match="1 values for 2 prompts"):
        Task(["a", "b"], {"answers": ["1"]})
    with pytest.raises(ConfigError, match="column prompt"):
        Task(["a"], {"prompt": ["a"]})


def test_sampled_rows_are_a_log_in_the_columns_of_a_dataset(tmp_path: Any) -> None:
    params = SamplingParams(temperature=0.5, top_p=0.75, max_tokens=4)
    rows = sample_rows(SAYS, TASK, 2, params, reward=rewards.get("exact"), policy="mine", policy_version=3)
    assert rows.column_names[: len(LOGGED)] == list(LOGGED)
    assert rows["prompt"].to_pylist() == ["a", "a", "b", "b"]
    assert rows["reward"].to_pylist() == [1.0, 1.0, 1.0, 0.0]
    assert rows["tier"].to_pylist() == ["gold", "gold", "iron", "iron"]
    write_jsonl(rows, tmp_path / "log.jsonl")
    lines = [orjson.loads(line) for line in (tmp_path / "log.jsonl").read_bytes().splitlines()]
    assert len(lines) == 4
    assert lines[3].pop("sampled_at").endswith("Z")
    assert lines[3] == {
        "prompt": "b",
        "response": "0",
        "prompt_ids": [1],
        "response_ids": [5, 6],
        "behavior_logprobs": [-0.5, -0.25],
        "reward": 0.0,
        "policy": "mine",
        "policy_version": 3,
        "temperature": 0.5,
        "top_p": 0.75,
        "logprob_kind": "processed",
        "finish_reason": "stop",
        "answers": "2",
        "tier": "iron",
    }
