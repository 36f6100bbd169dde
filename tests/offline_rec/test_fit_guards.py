"""What ends a run early: drift, with the best checkpoint kept, and numbers that are not finite."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data_tools.errors import DataError
from offline_rec.models.policy import Policy
from offline_rec.training.fit import fit
from offline_rec.training.heldout import summarise
from tests.offline_rec.fitting import config, furthest, lineage, records, weights, world


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return world(tmp_path_factory.mktemp("world"))


def at(run, step):
    return load_file(run / "checkpoints" / f"step-{step}" / "model" / "model.safetensors")


def test_drift_stops_the_run_and_keeps_the_best_checkpoint(folder):
    done = fit(config(folder, "drift", algorithm="raft", steps=200, lr=1e-3, max_kl=1.0, keep_checkpoints=1))
    assert done.steps < 200
    assert "exceeds max_kl 1" in done.stopped
    made = records(done.out)
    scores = {r["step"]: r["heldout"]["reward_weighted_logprob"] for r in made[1:] if r["step"] % 2 == 0}
    best = max((step for step in scores if step < done.steps), key=scores.get)
    assert done.best_step == done.model_step == best
    assert furthest(weights(done.out), at(done.out, best)) == 0
    assert made[-1]["stopped"] == done.stopped
    assert {path.name for path in (done.out / "checkpoints").iterdir()} <= {
        f"step-{best}",
        f"step-{(done.steps - 1) // 2 * 2}",
    }


def test_without_held_out_rows_the_last_checkpoint_before_the_drift_is_kept(folder):
    done = fit(
        config(folder, "blind", algorithm="reinforce", steps=200, lr=1e-3, min_ess=0.2, eval_every=None)
    )
    assert "below min_ess 0.2" in done.stopped
    assert done.best_step is None
    assert done.model_step == (done.steps - 1) // 2 * 2


def test_a_drift_before_the_first_checkpoint_leaves_the_start(folder):
    done = fit(config(folder, "early", lr=1e-2, max_kl=0.001, save_every=100))
    assert (done.model_step, done.steps < 6) == (0, True)
    assert furthest(weights(done.out), load_file(folder / "m" / "model.safetensors")) == 0


def test_a_run_without_drift_ends_with_its_last_weights(folder):
    done = fit(config(folder, "calm", lr=1e-5, max_kl=1.0, min_ess=0.1))
    assert (done.stopped, done.model_step) == (None, 6)


@pytest.fixture
def broken(monkeypatch):
    """Makes the log-probs of one response infinite from a step on: `broken(name)`."""
    original = Policy.weighted_logprobs

    def break_row(name, times=10**9):
        left = [times]

        def weighted_logprobs(self, rows, weigh, **options):
            values, total = original(self, rows, weigh, **options)
            if name in rows.response_id and left[0]:
                left[0] -= 1
                values[rows.response_id.index(name)] = float("-inf")
                total = total * float("inf")
            return values, total

        monkeypatch.setattr(Policy, "weighted_logprobs", weighted_logprobs)

    return break_row


def trained_row(folder):
    """A response of the train split."""
    if not (folder / "probe").exists():
        fit(config(folder, "probe", steps=1))
    return lineage(folder / "probe")[0][1]


def test_an_update_that_is_not_finite_is_skipped_and_its_row_named(folder, broken):
    name = trained_row(folder)
    broken(name, times=1)
    done = fit(config(folder, "skipped", tokens_per_micro_batch=10_000))
    skipped = [record for record in records(done.out) if record.get("skipped")]
    assert done.skipped == len(skipped) == 1
    assert skipped[0]["bad_rows"] == [name]
    assert skipped[0]["loss"] is None
    assert all(torch.isfinite(tensor).all() for tensor in weights(done.out).values())


def test_a_few_such_updates_in_a_row_stop_the_run(folder, broken):
    name = trained_row(folder)
    broken(name)
    with pytest.raises(DataError, match=rf"not finite 2 times in a row; rows of the last one: {name}"):
        fit(config(folder, "stopped", groups_per_step=12, max_skipped=2))


def test_a_run_of_nothing_but_such_updates_fails(folder, broken):
    broken(trained_row(folder))
    settings = {"steps": 2, "groups_per_step": 12, "max_skipped": 3}
    with pytest.raises(DataError, match="not finite at any of 2 steps: the policy is as it was"):
        fit(config(folder, "nothing", **settings))
    with pytest.raises(DataError, match="not finite at any of 2 steps"):
        fit(config(folder, "nothing", **settings), resume=True)


def facts(**columns):
    return {name: np.array(values, float) for name, values in columns.items()}


def test_held_out_measurements_by_hand():
    found = summarise(
        facts(
            reward=[1, 0, 0.5],
            tokens=[2, 2, 4],
            logprob=[-2, -6, -4],
            known=[2, 2, 4],
            k3=[0.2, 0.4, 0.2],
            log_ratio=[0.6931471805599453, 0, 0],
        ),
        logged=True,
    )
    assert found["logprob"] == pytest.approx(-12 / 8)
    # Weights 1, 0, 0.5 on -1, -3, -1 a token.
    assert found["reward_weighted_logprob"] == pytest.approx(-1)
    assert found["kl"] == pytest.approx(0.1)
    assert found["ess"] == pytest.approx(16 / (3 * 6))
    assert found["value"] == pytest.approx((2 * 1 + 0.5) / 4)
    assert found["value_logged"] == pytest.approx(0.5)


def test_held_out_rows_without_rewards_or_logprobs_measure_what_they_can():
    nan = float("nan")
    found = summarise(
        facts(reward=[nan, 1], tokens=[1, 1], logprob=[-1, -2], known=[1, 0], k3=[0, 0], log_ratio=[0, 0]),
        logged=True,
    )
    assert found["value_logged"] == 1
    assert "value" not in found
    assert found["ess"] == 1
    assert summarise(facts(reward=[], tokens=[], logprob=[], known=[], k3=[], log_ratio=[]), logged=True) == {
        "rows": 0,
        "tokens": 0,
    }
