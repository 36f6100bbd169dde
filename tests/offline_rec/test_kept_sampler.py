"""A sampler that stays open: new weights in the same engine, and a new engine where nothing else helps."""

from contextlib import contextmanager

import pytest
import torch

from data_tools.errors import RecError
from offline_rec.models.policy import Policy
from offline_rec.sampling import kept as kept_module
from offline_rec.sampling.choose import SamplerSettings, open_sampler
from offline_rec.sampling.hf_sampler import HFSampler
from offline_rec.sampling.kept import KeptSampler
from offline_rec.sampling.verify import update, verify
from tests import tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny.save(folder / name, seed=seed, tied=False) for name, seed in (("old", 1), ("new", 2))}


@pytest.fixture
def told(monkeypatch):
    """What becomes of the engines of a kept sampler, which are in this process."""
    events = []

    @contextmanager
    def opening(model, settings):
        events.append(f"open {model.name}")
        with open_sampler(model, settings) as sampler:
            yield sampler
        events.append("close")

    def updating(sampler, directory):
        events.append(f"update {directory.name}")
        original(sampler, directory)

    original = HFSampler.update_weights
    monkeypatch.setattr(kept_module, "open_sampler", opening)
    monkeypatch.setattr(HFSampler, "update_weights", updating)
    return events


def test_weights_are_given_where_they_are_new_and_are_those_that_are_asked_for(models, told):
    kept = KeptSampler(SamplerSettings())
    for name in ("old", "old", "new"):
        with kept.holding(models[name]) as sampler:
            assert verify(sampler, Policy.load(models[name], device="cpu")).good
            other = next(directory for known, directory in models.items() if known != name)
            assert not verify(sampler, Policy.load(other, device="cpu")).good
    kept.close()
    kept.close()
    assert told == ["open old", "update new", "close"]


def test_a_sampler_that_failed_is_opened_anew_and_one_that_died_is_known(models, told, monkeypatch):
    kept = KeptSampler(SamplerSettings())
    with pytest.raises(RecError, match="no answer"), kept.holding(models["old"]):
        raise RecError("no answer")
    assert not kept.died
    monkeypatch.setattr(HFSampler, "alive", False)
    with pytest.raises(RecError, match="gone"), kept.holding(models["old"]):
        raise RecError("gone")
    assert kept.died
    with kept.holding(models["old"]):
        pass
    # It died while nobody asked it anything: with the same weights, too, it is started again.
    with kept.holding(models["old"]):
        pass
    kept.close()
    assert told == [*("open old", "close") * 2, "open old", "update old", "close"]


def test_an_engine_that_refuses_a_reload_is_restarted(models, caplog):
    with open_sampler(models["old"]) as sampler:
        restarted = []

        def refuse():
            raise RecError("HTTP 404")

        def restart():
            restarted.append(1)
            sampler.update_weights(models["new"])

        given = {"reload": refuse, "restart": restart, "policy": None, "dtype": torch.float32}
        update(sampler, models["new"], **given)
        assert restarted
        assert "takes no new weights (HTTP 404): restarting it" in caplog.text
