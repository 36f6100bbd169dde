"""Real tiny models on the same prompts: what is asked, sampled, compared, kept and collected."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import data_tools
from data_tools.errors import ConfigError, DataError
from offline_rec.rewards import get
from offline_rec.sampling.comparison import compare_models, find_candidates
from offline_rec.sampling.evaluate import summarise
from offline_rec.sampling.sampled_rows import Task
from offline_rec.sampling.sampler import Prompt, SamplingParams
from offline_rec.sampling.tasks import dataset_task, file_task
from tests import tiny

PARAMS = SamplingParams(max_tokens=6, seed=3)
TASK = Task([f"{n}+{n}=" for n in range(12)], {"answers": [str(2 * n) for n in range(12)]})
LOWER = "regex(pattern='[a-z]')"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory `base`, and the run directory `run` of another model."""
    folder = tmp_path_factory.mktemp("models")
    tiny.save(folder / "base", seed=0)
    tiny.save(folder / "run" / "model", seed=1)
    (folder / "run" / "config.yaml").write_text("algorithm: rec\n")
    return folder


def test_two_models_share_prompts_and_noise_and_their_difference_is_that_of_their_means(
    models: Path, tmp_path: Path
) -> None:
    ticks: list[tuple[str, int, int]] = []
    report = compare_models(
        [models / "base", models / "run"],
        TASK,
        get(LOWER),
        n=4,
        params=PARAMS,
        pass_at=[1, 4],
        out=tmp_path / "out",
        progress=lambda *tick: ticks.append(tick),
    )
    base, run = report.summaries
    assert (base.policy, run.policy, base.samples) == ("base", "run", 48)
    rewards = {
        name: np.array(report.rows.filter(report.rows["policy"].to_numpy() == name)["reward"])
        for name in ("base", "run")
    }
    assert 0 < rewards["base"].mean() < 1
    assert base.accuracy.value == pytest.approx(rewards["base"].mean())
    assert base.pass_at[4].value == pytest.approx((rewards["base"].reshape(12, 4).max(1)).mean())
    assert base.pass_at[1].value == pytest.approx(base.accuracy.value)
    accuracy, mean = report.differences
    assert (accuracy.first, accuracy.second, accuracy.measure) == ("base", "run", "accuracy")
    paired = (rewards["run"] - rewards["base"]).reshape(12, 4).mean(1)
    assert accuracy.interval.value == pytest.approx(paired.mean())
    assert accuracy.interval == mean.interval
    assert ticks[0] == ("base", 0, 48)
    assert ticks[-1] == ("run", 48, 48)
    # The same model against itself, with the same noise: no difference at all.
    same = compare_models([models / "base", models / "base"], TASK, get(LOWER), n=4, params=PARAMS)
    assert [summary.policy for summary in same.summaries] == ["base", "base-2"]
    assert {(d.interval.value, d.interval.low, d.interval.high) for d in same.differences} == {(0, 0, 0)}


def test_what_was_found_is_kept_in_parquet(models: Path, tmp_path: Path) -> None:
    report = compare_models(
        [models / "base", models / "run"],
        TASK,
        get(LOWER),
        n=2,
        params=PARAMS,
        pass_at=[2],
        out=tmp_path / "o",
    )
    samples = pq.read_table(tmp_path / "o" / "samples.parquet")
    assert samples.equals(report.rows)
    assert summarise(samples.slice(0, 24), pass_at=[2]) == report.summaries[0]
    summary = pq.read_table(tmp_path / "o" / "summary.parquet").to_pylist()
    assert [(row["policy"], row["compared_with"], row["measure"], row["k"]) for row in summary] == [
        ("base", None, "accuracy", None),
        ("base", None, "mean_reward", None),
        ("base", None, "pass_at", 2),
        ("run", None, "accuracy", None),
        ("run", None, "mean_reward", None),
        ("run", None, "pass_at", 2),
        ("run", "base", "accuracy", None),
        ("run", "base", "mean_reward", None),
    ]
    assert summary[0]["value"] == report.summaries[0].accuracy.value
    facts = json.loads((tmp_path / "o" / "eval.json").read_text())
    assert facts["asked"] | {"models": None} == {
        "models": None, "prompts": 12, "samples": 2, "reward": LOWER, "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "max_tokens": 6, "seed": 3, "engine": "hf",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="is there already"):
        compare_models([models / "base"], TASK, get(LOWER), params=PARAMS, out=tmp_path / "o")


def test_a_run_keeps_its_evaluations_beside_it_and_answers_sql(models: Path) -> None:
    for model in ("run", "run/model"):
        report = compare_models([models / "base", models / model], TASK, get(LOWER), params=PARAMS)
        assert len(report.folders) == 1
    assert [Path(p).name for p in report.folders] == ["2"]
    assert set(pq.read_table(Path(report.folders[0]) / "samples.parquet")["policy"].to_pylist()) == {"run"}
    opened: Any = data_tools.open(models / "run")
    found = opened.sql(
        "SELECT evaluation, policy, value FROM evaluations WHERE measure = 'accuracy' ORDER BY ALL"
    )
    assert [(row["evaluation"], row["policy"]) for row in found.to_pylist()] == [
        (1, "base"), (1, "run"), (1, "run"), (2, "base"), (2, "run"), (2, "run"),
    ]  # fmt: skip
    assert not list((models / "run" / "eval").glob(".*"))


def test_samples_become_rows_of_a_dataset_that_count_and_check_clean(models: Path, tmp_path: Path) -> None:
    ds = data_tools.open(tmp_path / "ds", create=True)
    report = compare_models(
        [models / "base", models / "run"], TASK, get(LOWER), n=3, params=PARAMS, log=ds, out=tmp_path / "o"
    )
    assert report.collected == 72
    rows = ds.sql(
        "SELECT policy, count(*) AS n, count(reward) AS judged, avg(reward) AS reward, "
        "count(behavior_logprob) AS usable, min(extra->>'answers') AS least "
        "FROM rollouts GROUP BY ALL ORDER BY ALL"
    ).to_pylist()
    assert [(row["policy"], row["n"], row["judged"], row["usable"]) for row in rows] == [
        ("base", 36, 36, 36), ("run", 36, 36, 36),
    ]  # fmt: skip
    assert rows[0]["reward"] == pytest.approx(report.summaries[0].mean_reward.value)
    assert rows[0]["least"] == "0"
    cards = ds.policies()
    assert cards["run"].model == str(models / "run" / "model")
    assert cards["run"].sampling["max_tokens"] == 6
    from offline_rec.checking import check

    assert not [f for f in check(ds, str(models / "base")).findings if f.severity == "error"]
    # Sampled again at another time, the same draws are other rows.
    again = compare_models([models / "base"], TASK, get(LOWER), n=3, params=PARAMS, log=ds)
    assert again.collected == 36


def test_a_model_is_a_directory_or_a_run_under_a_name_of_its_own(models: Path, tmp_path: Path) -> None:
    found = find_candidates([models / "run", models / "base", models / "run" / "model"])
    assert [one.name for one in found] == ["run", "base", "run-2"]
    assert [one.model.name for one in found] == ["model", "base", "model"]
    assert [one.run is not None for one in found] == [True, False, True]
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(DataError, match="has no model yet"):
        find_candidates([tmp_path])
    with pytest.raises(DataError, match="does not exist"):
        find_candidates([tmp_path / "none"])


def test_a_reward_that_judges_nothing_says_why(models: Path) -> None:
    task = Task(["q"], {"answers": ["yes"]})
    with pytest.raises(
        DataError, match="none of the samples was judged: no number or expression in the answer"
    ):
        compare_models([models / "base"], task, get("math"), params=PARAMS)


def test_rewards_see_what_a_dataset_says_of_a_sample(models: Path) -> None:
    sql = "n_tokens + 10 * (finish_reason = 'length')::INT + 100 * (extra->>'answers')::INT + length(prompt)"
    rows = compare_models([models / "base"], TASK, get(sql), params=PARAMS).rows.to_pylist()
    for row in rows:
        cut = row["finish_reason"] == "length"
        expected = len(row["response_ids"]) + 10 * cut + 100 * int(row["answers"]) + len(row["prompt"])
        assert row["reward"] == expected


def test_a_dataset_is_asked_for_its_held_out_prompts_with_what_their_rows_share(tmp_path: Path) -> None:
    ds = data_tools.open(tmp_path / "ds", create=True, holdout=0.5)
    log = tmp_path / "log.jsonl"
    records = [
        {"prompt": f"{n}?", "response": str(i), "answers": str(n), "id": f"{n}-{i}"}
        for n in range(40)
        for i in range(2)
    ]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    ds.collect([str(log)])
    task = dataset_task(ds)
    held = {
        row["prompt"] for row in ds.sql("SELECT prompt FROM rollouts WHERE split = 'holdout'").to_pylist()
    }
    texts = [p.text for p in task.prompts if isinstance(p, Prompt)]
    assert 0 < len(held) < 40
    assert sorted(texts) == sorted(held)
    assert {name: list(values) for name, values in task.columns.items()} == {
        "answers": [t[:-1] for t in texts]
    }
    assert len(dataset_task(ds, "true").prompts) == 40
    assert "id" in dataset_task(ds, "response = '0'").columns
    with pytest.raises(DataError, match="has no prompt where reward > 5"):
        dataset_task(ds, "reward > 5")
    with pytest.raises(ConfigError):
        dataset_task(ds, "no_such_column = 1")


def test_columns_of_a_file_that_samples_have_themselves_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"question": "a", "answer": 1, "response": "x", "reward": 1}\n{"question": "b", "tier": "gold"}\n'
    )
    task = file_task(str(path))
    assert dict(task.columns) == {"answer": [1, None], "tier": [None, "gold"]}


def test_a_reward_that_lacks_a_column_is_told_before_anything_is_sampled(models: Path) -> None:
    started: list[str] = []
    with pytest.raises(ConfigError, match="column 'gold'"):
        compare_models(
            [models / "base"],
            TASK,
            get("exact", column="gold"),
            params=PARAMS,
            progress=lambda name, *_: started.append(name),
        )
    assert started == []
