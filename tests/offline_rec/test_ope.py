"""`ope` on datasets and real models: the rows it takes, the ratios it computes, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data_tools
from data_tools.dataset import Dataset
from data_tools.errors import ConfigError, DataError
from offline_rec.data.rows import Rows, RowStore
from offline_rec.evidence import logged as evidence
from offline_rec.evidence.estimators import ESTIMATORS, Episodes, Table
from offline_rec.evidence.ope import ope
from offline_rec.evidence.reports import Judged, OpeReport
from offline_rec.models import score as scoring
from offline_rec.training.fit import fit
from tests import tiny
from tests.offline_rec import logged
from tests.offline_rec.fitting import config, world

QUICK: dict[str, Any] = {"resamples": 200}


def only(report: OpeReport) -> Judged:
    [judged] = report.policies
    return judged


def values(judged: Judged) -> dict[str, float]:
    return {estimate.name: estimate.value.value for estimate in judged.estimates}


def holdout(ds: Dataset) -> set[str]:
    return set(ds.sql("SELECT response_id FROM rollouts WHERE split = 'holdout'")["response_id"].to_pylist())


@pytest.fixture(scope="module")
def place(tmp_path_factory: Any) -> Path:
    """The model `m`, a log of its own samples `ds`, and the run `run` of a fit to it; not to be changed."""
    folder = world(tmp_path_factory.mktemp("ope"), groups=60, holdout=0.5)
    fit(config(folder, steps=3, eval_every=None))
    return folder


@pytest.fixture
def ds(place: Path) -> Dataset:
    return data_tools.open(str(place / "ds"))


def test_the_policy_that_sampled_earns_what_the_log_says(place: Path, ds: Dataset) -> None:
    report = ope(ds, [place / "m"], **QUICK)
    query = (
        "SELECT avg(r) FROM (SELECT avg(reward) AS r FROM rollouts WHERE split = 'holdout' GROUP BY prompt)"
    )
    mean = ds.sql(query).column(0)[0].as_py()
    assert report.rows == report.episodes == len(holdout(ds)) > 80
    assert report.left_out == {}
    judged = only(report)
    assert list(values(judged).values()) == pytest.approx([mean] * len(ESTIMATORS), abs=1e-5)
    assert judged.verdict.word == "no difference"
    assert judged.diagnostics.ess == pytest.approx(report.episodes)
    assert report.logged.low <= mean <= report.logged.high


def test_estimates_are_those_of_a_plain_forward_pass(tmp_path: Path) -> None:
    """Log-ratios at each row's temperature, masked tokens left out, from Hugging Face's own logits."""
    other = tiny.model(len(logged.tokenizer()), seed=1)
    rows = logged.rows(30, logprob_kind="processed", temperature=0.7)
    for i, row in enumerate(rows):
        if i % 3 == 0:
            row |= {"loss_mask": [0] + [1] * (len(row["response_ids"]) - 1)}
    ds = logged.dataset(tmp_path / "ds", rows, holdout=0.5, batches=3)
    report = ope(ds, [tiny.save(tmp_path / "other", seed=1)], **QUICK)

    other.lm_head.weight.data /= 0.7  # what a temperature of 0.7 does
    kept = [row for row in rows if row["response_id"] in holdout(ds)]
    prompts = {prompt: i for i, prompt in enumerate(sorted({row["prompt"] for row in kept}))}
    ratios = []
    for row in kept:
        new = np.array(logged.logprobs(other, row["prompt_ids"], row["response_ids"]))
        ratio = new - np.float32(row["behavior_logprobs"])
        ratios.append(ratio[np.array(row.get("loss_mask", np.ones(len(ratio)))) == 1])
    expected = Episodes(
        np.array([ratio.sum() for ratio in ratios]),
        np.array([np.minimum(ratio, 0).sum() for ratio in ratios]),
        np.array([row["reward"] for row in kept]),
        np.array([prompts[row["prompt"]] for row in kept]),
    )
    table = Table.of(expected)
    judged = only(report)
    found = values(judged)
    for name, value in table.estimates(table.values.mean(0)).items():
        assert found[name] == pytest.approx(float(value), rel=1e-3, abs=1e-5), name
    tokens = np.concatenate(ratios)
    assert judged.diagnostics.tokens == len(tokens)
    assert judged.diagnostics.kl == pytest.approx(-tokens.mean(), rel=1e-3)
    assert judged.diagnostics.kl_k3 == pytest.approx((np.exp(tokens) - 1 - tokens).mean(), rel=1e-3)


def test_a_second_call_computes_nothing_and_reads_in_parts(
    place: Path, ds: Dataset, monkeypatch: Any
) -> None:
    model = tiny.save(place / "second", seed=2)
    first = ope(ds, [model], **QUICK)

    def never(*_: Any) -> None:
        raise AssertionError("a forward pass")

    monkeypatch.setattr(scoring, "row_logprobs", never)
    monkeypatch.setattr(evidence, "READ_TOKENS", 16)
    read: list[int] = []

    class Watched(RowStore):
        def take(self, *where: Any, **options: Any) -> Rows:
            rows = super().take(*where, **options)
            read.append(int(rows.response_ids.lengths.sum()))
            return rows

    monkeypatch.setattr(evidence, "RowStore", Watched)
    assert ope(ds, [model], **QUICK).facts() == first.facts()
    assert max(read) < 32
    assert len(read) > 10
    assert ope(ds, [model], seed=1, **QUICK).facts() != first.facts()


def test_rows_that_cannot_be_judged_on_are_counted_by_reason(tmp_path: Path) -> None:
    rows = logged.rows(40)
    spoiled: list[dict[str, Any]] = [
        {"reward": None},
        {"reward": float("nan")},
        {"temperature": 0.0},
        {"behavior_logprobs": None, "behavior_logprob": None},
        {"response_ids": [], "behavior_logprobs": [], "behavior_logprob": 0.0},
        {"response_ids": [7] * 600, "behavior_logprobs": [-1.0] * 600, "behavior_logprob": -600.0},
    ]
    for row, change in zip(rows, spoiled, strict=False):
        row.update(change)
    ds = logged.dataset(tmp_path / "ds", rows)
    report = ope(ds, [tiny.save(tmp_path / "m")], split="all", **QUICK)
    assert report.left_out == {
        "no_reward": 2,
        "greedy": 1,
        "no_logprobs": 1,
        "no_tokens": 1,
        "not_scored": 1,
    }
    assert report.rows == 160
    assert report.episodes == 154
    told = "\n".join(report.lines())
    assert "left out: 2 rows, because they have no finite reward" in told


def test_the_turns_of_a_trajectory_are_one_episode(tmp_path: Path) -> None:
    """One reward, at its last turn; a trajectory with a turn that cannot be used is left out whole."""
    rows = logged.rows(30, group=2)
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        first |= {"trajectory_id": f"t{first['group_id']}", "turn": 0, "reward": None}
        second |= {"trajectory_id": f"t{first['group_id']}", "turn": 1, "prompt": first["prompt"] + "!"}
        second["reward"] = float(len(second["response"]))
    rows[5] |= {"behavior_logprob": None, "behavior_logprobs": None}
    ds = logged.dataset(tmp_path / "ds", rows)
    report = ope(ds, [tiny.save(tmp_path / "m"), tiny.save(tmp_path / "other", seed=1)], split="all", **QUICK)
    assert report.left_out == {"no_logprobs": 1, "incomplete_trajectory": 1}
    assert report.episodes == report.prompts == 29
    kept = [row["reward"] for i, row in enumerate(rows) if i % 2 and i != 5]
    assert report.logged.value == pytest.approx(np.mean(kept))
    other = tiny.model(len(logged.tokenizer()), seed=1)
    sums = [
        sum(logged.logprobs(other, row["prompt_ids"], row["response_ids"])) - row["behavior_logprob"]
        for i, row in enumerate(rows)
        if i not in (4, 5)
    ]
    weight = np.exp(np.add.reduceat(sums, range(0, 58, 2)))
    assert values(report.policies[1])["snis"] == pytest.approx((weight * kept).sum() / weight.sum(), rel=1e-3)
    # Half a trajectory is none.
    with pytest.raises(DataError, match="some turn of their trajectory is not among the rows"):
        ope(ds, [tmp_path / "m"], split="all", where="turn = 1", **QUICK)


def test_a_run_is_judged_on_what_it_never_saw_and_keeps_the_report(place: Path, ds: Dataset) -> None:
    run = place / "run"
    twin = shutil.copytree(run / "model", place / "twin")
    report = ope(ds, [run, twin, place / "m"], **QUICK)
    assert [judged.trained_rows for judged in report.policies] == [0, 0, 0]
    assert report.notes == [
        f"{each} is no run: what it was trained on is unknown" for each in (twin, place / "m")
    ]
    kept = json.loads((run / "ope.json").read_text())
    assert kept["policies"] == report.facts()["policies"][:1]
    assert [(pair["first"], pair["second"]) for pair in kept["comparisons"]] == [
        (str(run), str(twin)),
        (str(run), str(place / "m")),
    ]
    # Pairs see the same prompts drawn: the interval of the difference of equal policies is 0.
    same, other, _ = report.comparisons
    assert report.policies[0].value.high - report.policies[0].value.low > 0.1
    assert (same.difference.low, same.difference.high) == (0, 0)
    difference = report.policies[2].value.value - report.policies[0].value.value
    assert other.difference.value == pytest.approx(difference)


@pytest.mark.parametrize("split", ["train", "all"])
def test_rows_that_a_run_was_trained_on_are_refused_unless_forced(
    place: Path, ds: Dataset, split: Any
) -> None:
    run = place / "run"
    with pytest.raises(ConfigError, match=r"run was trained on the prompts of \d+ of these") as refused:
        ope(ds, [place / "m", run], split=split, **QUICK)
    assert "--force" in refused.value.hint
    report = ope(ds, [run], split=split, force=True, **QUICK)
    trained = only(report).trained_rows
    query = f"SELECT count(*) FROM rollouts WHERE ('{split}' = 'all' OR split = '{split}')"
    assert 0 < trained <= ds.sql(query).column(0)[0].as_py() == report.rows
    assert any(line.startswith(f"warning: {run} was trained on") for line in report.lines())


def test_what_was_trained_on_is_found_wherever_it_lies(place: Path, tmp_path: Path) -> None:
    """The same prompts under other ids in another dataset; a checkpoint; a run begun with the run's model."""
    rows = [row | {"response_id": f"x{row['response_id']}"} for row in logged.rows(60)]
    other = logged.dataset(tmp_path / "other", rows)
    checkpoint = next((place / "run" / "checkpoints").glob("step-*")) / "model"
    fit(
        config(
            place,
            str(tmp_path / "next"),
            model=str(place / "run" / "model"),
            split="holdout",
            steps=1,
            eval_every=None,
            groups_per_step=1,
        )
    )
    for policy in (place / "run", place / "run" / "model", checkpoint, tmp_path / "next"):
        with pytest.raises(ConfigError, match="was trained on the prompts"):
            ope(other, [policy], split="all", **QUICK)
    new = logged.dataset(tmp_path / "new", logged.rows(10, seed=7, before="no: "), holdout=0.0)
    assert ope(new, [place / "run"], split="all", **QUICK).notes == []


def test_a_run_whose_dataset_is_gone_is_held_against_ids(tmp_path: Path) -> None:
    folder = world(tmp_path, groups=12)
    fit(config(folder, steps=2, eval_every=None))
    shutil.move(folder / "ds", folder / "moved")
    moved = data_tools.open(str(folder / "moved"))
    with pytest.raises(ConfigError, match="was trained on the prompts"):
        ope(moved, [folder / "run"], split="train", **QUICK)
    report = ope(moved, [folder / "run"], **QUICK)
    assert "is not there: rows are compared by their ids alone" in report.notes[0]


def test_what_is_worth_knowing_about_the_rows_is_said(tmp_path: Path) -> None:
    rows = logged.rows(30, logprob_kind="unknown")
    rows[0]["top_p"] = 0.9
    ds = logged.dataset(tmp_path / "ds", rows)
    notes = ope(ds, [tiny.save(tmp_path / "m")], split="all", **QUICK).notes
    assert any("120 rows have log-probs of unknown kind, read as raw" in note for note in notes)
    assert any("1 rows were sampled with top-p or top-k" in note for note in notes)


def test_a_condition_narrows_the_rows_and_a_wrong_one_is_named(place: Path, ds: Dataset) -> None:
    report = ope(ds, [place / "m"], where="policy_version = 1", **QUICK)
    assert 0 < report.rows < len(holdout(ds))
    for where in ("nothing = 1", "true) OR (true", "policy_version ="):
        with pytest.raises(ConfigError, match="where"):
            ope(ds, [place / "m"], where=where, **QUICK)
    with pytest.raises(DataError, match="no row is in the holdout split where policy = 'nobody'"):
        ope(ds, [place / "m"], where="policy = 'nobody'", **QUICK)


def test_what_is_no_policy_is_named(place: Path, ds: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        ope(ds, [tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="named twice"):
        ope(ds, [place / "m", place / "m"])
    with pytest.raises(ConfigError, match="no policy is named"):
        ope(ds, [])
    (tmp_path / "begun").mkdir()
    shutil.copy(place / "run" / "snapshot.json", tmp_path / "begun")
    with pytest.raises(DataError, match="has no model yet"):
        ope(ds, [tmp_path / "begun"])


def test_a_log_without_logprobs_says_what_is_missing(tmp_path: Path) -> None:
    rows = logged.rows(8, behavior_logprobs=None, behavior_logprob=None)
    ds = logged.dataset(tmp_path / "ds", rows)
    with pytest.raises(
        DataError, match="none of the 32 rows can be judged on: 32 because they have no usable"
    ):
        ope(ds, [tiny.save(tmp_path / "m")], split="all")
