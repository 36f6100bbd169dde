"""Several ranks make the same steps as one: same groups, same metrics, same weights to rounding."""

import threading

import pytest
import torch

from data_tools.errors import DataError
from offline_rec.models import sharing
from offline_rec.models.policy import TokenModel
from offline_rec.training.fit import fit
from tests.offline_rec.fitting import Killed, config, furthest, killer, lineage, records, weights, world
from tests.offline_rec.team import run_team


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return world(tmp_path_factory.mktemp("world"))


def numbers(record, path=""):
    """The numbers of a record by their path."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{path}{key}.")
        elif not isinstance(value, bool | str | list):
            yield path + key, value


def assert_same_run(one, other):
    assert furthest(weights(one), weights(other)) < 1e-5
    for a, b in zip(records(one), records(other), strict=True):
        assert dict(numbers(a)) == pytest.approx(dict(numbers(b)), rel=1e-3, abs=1e-5)
    trained = [[row[:3] for row in lineage(run)] for run in (one, other)]
    assert trained[0] == trained[1]


@pytest.mark.parametrize("algorithm", ["rec-oneside-nois", "grpo", "opmd-pairwise", "m2po"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_makes_the_same_run(folder, algorithm, ranks):
    one = folder / f"{algorithm}-one"
    if not one.exists():
        fit(config(folder, one.name, algorithm=algorithm, lr=3e-4, tokens_per_micro_batch=40))
    many = config(folder, f"{algorithm}-{ranks}", algorithm=algorithm, lr=3e-4, tokens_per_micro_batch=40)
    results = run_team(ranks, lambda engine: fit(many, engine=engine))
    assert_same_run(results[0].out, one)
    assert len({result.steps for result in results}) == 1
    assert {path.name.split("-")[1] for path in (results[0].out / "lineage").iterdir()} == {
        f"{rank}.parquet" for rank in range(ranks)
    }


def test_ranks_meet_in_every_pass_through_the_layers(folder, monkeypatch):
    """With weights that are spread over ranks, a layer runs only where it runs on all of them."""
    runs = {}
    forward = TokenModel.forward

    def counted(self, layout, *weigh):
        if torch.is_grad_enabled():
            runs.setdefault(threading.get_ident(), []).append(len(layout.sheets))
        return forward(self, layout, *weigh)

    fit(config(folder, "meeting-1", groups_per_step=5, lr=1e-4))
    monkeypatch.setattr(TokenModel, "forward", counted)
    # Without a launch to save, every length has a pass of its own, and ranks differ in these.
    monkeypatch.setattr(sharing, "CPU_LAUNCH", 0.0)
    many = config(folder, "meeting-2", groups_per_step=5, lr=1e-4)
    results = run_team(2, lambda engine: fit(many, engine=engine))
    assert_same_run(results[0].out, folder / "meeting-1")
    # The probe of a model that is loaded computes two layouts.
    one, other = (counts[2:] for counts in runs.values())
    assert one == other
    assert max(one) > 2


def test_a_rank_without_a_group_still_takes_part(folder):
    one = fit(config(folder, "lonely-1", groups_per_step=1, tokens_per_micro_batch=15))
    many = config(folder, "lonely-3", groups_per_step=1, tokens_per_micro_batch=15)
    results = run_team(3, lambda engine: fit(many, engine=engine))
    assert_same_run(results[0].out, one.out)


def test_a_run_goes_on_with_another_number_of_ranks(folder):
    whole = fit(config(folder, "whole"))
    changed = config(folder, "resized")
    with pytest.raises(Killed):
        run_team(2, lambda engine: fit(changed, engine=engine, progress=killer(3)))
    assert_same_run(fit(changed, resume=True).out, whole.out)


def test_a_refusal_on_rank_0_ends_every_rank(folder):
    with pytest.raises(DataError, match=r"no row is left|rank 0"):
        run_team(2, lambda engine: fit(config(folder, "refused", max_tokens=2), engine=engine))
    assert not (folder / "refused").exists()
