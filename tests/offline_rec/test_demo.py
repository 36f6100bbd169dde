"""The demo: its task, its model, and the whole story in small."""

import json
import shlex
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from click.testing import CliRunner

import data_tools
from cli.main import rec
from data_tools.errors import ConfigError, DataError
from offline_rec.demo import telling
from offline_rec.demo.contest import CONTENDERS
from offline_rec.demo.forecast import Forecast, held_out
from offline_rec.demo.model import (
    Pretraining,
    build_model,
    build_tokenizer,
    encode,
    expected_accuracy,
    pretrain,
)
from offline_rec.demo.story import Size, run
from offline_rec.demo.task import Problems, split
from offline_rec.evidence.reports import Judged
from offline_rec.evidence.verdict import Verdict
from offline_rec.models.loading import load_tokenizer
from offline_rec.models.policy import Policy
from offline_rec.sampling.evaluate import Interval
from offline_rec.sampling.hf_sampler import HFSampler
from offline_rec.sampling.sampler import SamplingParams
from tests.offline_rec.test_estimators import diagnostics
from tests.offline_rec.test_evaluate import judged

SMALL = Size(
    log_prompts=60,
    responses=4,
    evaluation_prompts=20,
    evaluation_samples=2,
    held_out_samples=2,
    development_prompts=100,
    target=0.03,
    steps=2,
    workers=1,
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def problems(*pairs: tuple[int, int]) -> Problems:
    first, second = torch.tensor(pairs).T.numpy()
    return Problems(first, second)


def test_numbers_are_written_from_their_last_digit() -> None:
    asked = problems((123, 456), (999, 101))
    assert asked.prompts() == ["321+654=", "999+101="]
    assert asked.answers() == ["975", "0011"]


def test_a_problem_is_as_hard_as_it_has_carries() -> None:
    assert problems((123, 456), (125, 125), (155, 155), (999, 101)).tiers() == [
        "bronze",
        "silver",
        "gold",
        "gold",
    ]


def test_the_parts_of_the_task_share_no_problem_and_make_up_all() -> None:
    parts = split(7, evaluation=10, log=20, development=5)
    pairs = [
        set(zip(part.first.tolist(), part.second.tolist(), strict=True))
        for part in (parts.evaluation, parts.log, parts.development, parts.pool)
    ]
    assert [len(part) for part in pairs[:3]] == [10, 20, 5]
    assert len(set().union(*pairs)) == sum(map(len, pairs)) == 900 * 900
    assert split(7, evaluation=10, log=20, development=5).log.prompts() == parts.log.prompts()
    assert split(8, evaluation=10, log=20, development=5).log.prompts() != parts.log.prompts()


def test_a_saved_tokenizer_gives_the_ids_that_the_model_was_trained_on(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    ids = encode(tokenizer, problems((123, 456), (999, 101)))
    assert tokenizer.batch_decode(ids) == ["<bos>321+654=975<eos><pad>", "<bos>999+101=0011<eos>"]
    build_model(tokenizer, seed=0).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("321+654=")["input_ids"] == ids[0, :9].tolist()


def test_expected_accuracy_is_the_probability_of_sampling_the_answer() -> None:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=3)
    asked = problems((100, 100), (999, 999))
    with torch.no_grad():
        model.lm_head.weight *= 0
    # Every token is as likely as any other; the answers are 002 and 8991, and the end.
    expected = expected_accuracy(model, tokenizer, asked)
    assert expected == pytest.approx((len(tokenizer) ** -4 + len(tokenizer) ** -5) / 2)


def test_sampling_asks_the_model_as_pretraining_did() -> None:
    tokenizer = build_tokenizer()
    asked = problems((123, 456))
    sampler = HFSampler(build_model(tokenizer, seed=3), tokenizer)
    ((sample,),) = sampler.sample(asked.prompts(), 1, SamplingParams(max_tokens=5))
    assert sample.prompt_ids == encode(tokenizer, asked)[0, :9].tolist()


def test_pretraining_that_does_not_get_there_says_so() -> None:
    tokenizer = build_tokenizer()
    parts = split(0, evaluation=1, log=1, development=50)
    seen: list[float] = []
    with pytest.raises(DataError, match=r"in 2 steps, not 0\.9"):
        pretrain(
            build_model(tokenizer, seed=0),
            tokenizer,
            parts.pool,
            parts.development,
            recipe=Pretraining(seed=0, target=0.9, max_steps=2, check_every=1),
            progress=lambda done, total: seen.append(total),
        )
    assert seen == [90, 90]


def test_the_whole_story_in_small(tmp_path: Path) -> None:
    said: list[str] = []
    phases: set[str] = set()
    out = tmp_path / "demo"
    results = run(out, seed=1, size=SMALL, say=said.append, tick=lambda phase, done, total: phases.add(phase))
    assert json.loads((out / "results.json").read_text()) == results
    assert set(results["algorithms"]) == {contender.name for contender in CONTENDERS}
    for row in (results["base"], *results["algorithms"].values()):
        assert 0 <= row["low"] <= row["accuracy"] <= row["high"] <= 1
    phases_told = {"pretrain", "sample", "collect", "look", "fit", "ope", "evaluate", "report", "total"}
    assert set(results["seconds"]) == phases_told
    assert all(Path(path).exists() for path in results["paths"].values())
    assert {"pretrain", "fit", "evaluate"} <= phases
    text = "\n".join(said)
    assert "240 read, 240 kept, 0 duplicate, 0 rejected" in text
    assert "rec-oneside-nois + red_weight(1)" in text

    ds = data_tools.open(str(out / "dataset"))
    asked = set(ds.sql("SELECT DISTINCT prompt FROM rollouts")["prompt"].to_pylist())
    samples = pq.read_table(out / "base-samples.parquet")
    assert len(asked) == 60
    assert samples.num_rows == 40
    assert asked.isdisjoint(samples["prompt"].to_pylist())
    # The log's log-probs are those of the saved base policy.
    start = json.loads((out / "runs/rec-oneside-nois/metrics.jsonl").read_text().splitlines()[1])
    assert start["step"] == 1
    assert start["kl_k3"] == pytest.approx(0, abs=1e-8)
    weights = [Policy.load(out / folder).fingerprint() for folder in ("base", "runs/reinforce/model")]
    assert weights[0] != weights[1]

    # What the log foretells stands beside samples on the same prompts; so few of them tell nothing.
    for name, row in results["algorithms"].items():
        assert row["ope"]["verdict"] == "not identifiable", name
        assert row["ope"]["agrees"] is None
        assert 0 <= row["ope"]["sampled"]["value"] <= 1
    heldout = held_out(ds)
    assert 0 < len(heldout) < 20
    assert asked.issuperset(heldout)
    kept = json.loads((out / "runs" / "raft" / "ope.json").read_text())
    assert kept["policies"][0]["value"]["value"] == results["algorithms"]["raft"]["ope"]["value"]

    # The pages are about this log and the best of these runs, whose exam is kept in it.
    pages = [(out / page).read_text() for page in ("dataset.html", "run.html")]
    assert "<dd>240</dd>" in pages[0]
    assert "No evaluation is kept" not in pages[1]

    # What the demo shows is what it ran.
    shown = [line.removeprefix("$ rec ") for line in said if line.startswith("$ rec fit")]
    assert len(shown) == len(CONTENDERS)
    for line in shown:
        printed = CliRunner().invoke(rec, [*shlex.split(line), "--print-config"])
        assert printed.exit_code == 0, printed.output
        config = yaml.safe_load(printed.output)
        ran = yaml.safe_load((Path(config["out"]) / "config.yaml").read_text())
        assert config == ran | {"tokens_per_micro_batch": None}  # settled when it runs

    with pytest.raises(ConfigError, match="exists already"):
        run(out)


def test_results_compare_each_policy_with_the_base() -> None:
    samples = {"base": judged(["a", "b"], [0.0, 1.0]), "better": judged(["a", "b"], [1.0, 1.0])}
    foretold = {"better": forecast("better", low=0.7, sampled=0.75)}
    found = telling.results(samples, foretold, seed=3, seconds={"total": 1.25}, paths={"base": "x"})
    assert found["base"] == {"accuracy": 0.5, "low": 0.0, "high": 1.0}
    assert found["algorithms"]["better"]["gain"] == {"value": 0.5, "low": 0.0, "high": 1.0}
    lines = list(telling.conclusion(found))
    assert lines[1].split() == ["policy", "accuracy", "95", "%", "interval", "against", "base"]
    assert lines[3].startswith("better  1.000     1.000 to 1.000  +50.0 points")
    assert lines[7].split()[:6] == ["better", "0.800", "0.700", "to", "0.900", "0.750"]
    assert lines[7].endswith("better")


def forecast(word: Any, *, low: float, sampled: float) -> Forecast:
    """An estimate of 0.8, from `low` to 0.9, and samples that say `sampled` give or take 0.02."""
    value = Interval(0.8, low, 0.9)
    said = Judged(
        policy="run",
        model="run/model",
        weights="w",
        trained_rows=0,
        value=value,
        gain=Interval(0.3, 0.2, 0.4),
        verdict=Verdict(word, "as it is"),
        estimates=[],
        tempered_power=1.0,
        diagnostics=diagnostics(),
    )
    return Forecast(said, Interval(sampled, sampled - 0.02, sampled + 0.02))


def test_a_forecast_agrees_where_its_interval_meets_that_of_the_samples() -> None:
    assert forecast("better", low=0.7, sampled=0.69).agrees
    assert forecast("better", low=0.7, sampled=0.67).agrees is False
    assert forecast("worse", low=0.7, sampled=0.93).agrees is False
    assert forecast("not identifiable", low=0.7, sampled=0.1).agrees is None
