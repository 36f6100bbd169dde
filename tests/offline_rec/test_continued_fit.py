"""A fit that continues another one's checkpoint: weights, optimizer, count of updates and learning rate."""

import pytest
import torch

from data_tools.errors import ConfigError
from offline_rec.models.policy import Policy
from offline_rec.training import checkpoint
from offline_rec.training.fit import fit
from tests.offline_rec.fitting import Killed, config, furthest, killer, lineage, records, weights, world

WHOLE_BATCH = {"groups_per_step": 1000, "eval_every": None, "schedule": "linear", "schedule_steps": 4}
"""Every update sees all groups, so that only the order of a sum differs from run to run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def first(folder):
    return fit(config(folder, "first", steps=2, **WHOLE_BATCH))


def second(folder, out, **changes):
    start = str(folder / "first" / "checkpoints" / "step-2")
    return config(folder, out, steps=2, continue_from=start, **WHOLE_BATCH | changes)


def test_two_fits_in_a_row_are_one(folder, first):
    whole = fit(config(folder, "whole", steps=4, **WHOLE_BATCH))
    done = fit(second(folder, "second"))
    assert furthest(weights(done.out), weights(whole.out)) < 1e-6
    assert [record["step"] for record in records(done.out)] == [3, 4]
    assert [r["lr"] for r in [*records(first.out), *records(done.out)]] == [
        r["lr"] for r in records(whole.out)
    ]
    assert {row[0] for row in lineage(done.out)} == {3, 4}
    assert (done.steps, done.model_step) == (4, 4)
    # With the weights alone, the moments of the optimizer would begin at 0.
    fresh = fit(config(folder, "fresh", model=str(first.model), steps=2, **WHOLE_BATCH))
    assert furthest(weights(fresh.out), weights(whole.out)) > 1e-4


@pytest.mark.parametrize("step", [3, 4])
def test_a_continued_fit_that_crashed_goes_on_to_the_same_end(folder, first, step):
    whole = fit(second(folder, f"uncrashed-{step}", save_every=1))
    with pytest.raises(Killed):
        fit(second(folder, f"crashed-{step}", save_every=1), progress=killer(step))
    done = fit(second(folder, f"crashed-{step}", save_every=1), resume=True)
    assert furthest(weights(done.out), weights(whole.out)) == 0
    assert records(done.out) == records(whole.out)
    assert lineage(done.out) == lineage(whole.out)


def test_adapters_are_continued_on_their_base(folder):
    pytest.importorskip("peft")
    settings = WHOLE_BATCH | {"lora_rank": 2, "lora_alpha": 2.0}
    fit(config(folder, "lora-first", steps=2, **settings))
    start = str(folder / "lora-first" / "checkpoints" / "step-2")
    whole = fit(config(folder, "lora-whole", steps=4, **settings))
    done = fit(config(folder, "lora-second", steps=2, continue_from=start, **settings))
    assert furthest(weights(done.out), weights(whole.out)) < 1e-5
    before, after = (Policy.load(run / "model") for run in (folder / "lora-first", done.out))
    assert before.fingerprint() != after.fingerprint()
    assert checkpoint.verify(done.out / "checkpoints" / "step-4") is None


def test_a_run_that_drifts_at_once_gives_back_what_it_continued(folder, first):
    done = fit(second(folder, "drifted", max_kl=1e-9))
    assert done.stopped
    assert done.model_step == 2
    ours, theirs = (Policy.load(model).model.state_dict() for model in (done.model, first.model))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_is_no_checkpoint_is_refused(folder):
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        fit(config(folder, "none", continue_from=str(folder / "m")))
    assert not (folder / "none").exists()


def test_rows_without_any_advantage_are_trained_on_where_asked(tmp_path):
    flat = world(tmp_path, columns={"reward": 1.0})
    done = fit(config(flat, "flat", steps=1, no_signal="train", eval_every=None))
    assert done.steps == 1
