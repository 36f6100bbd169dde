"""The plain torch engine: sums gradients, clips once, skips what is not finite, saves and loads exactly."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from data_tools.errors import DataError
from offline_rec.training.engine import OptimizerSettings
from offline_rec.training.engines.plain import TorchEngine
from offline_rec.training.engines.state import OPTIMIZER_FILE

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def net(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def prepared(model, **settings):
    engine = TorchEngine("cpu")
    engine.prepare(model, OptimizerSettings(**settings))
    return engine


def weights(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def train(engine, model, steps, pieces=1, lr=0.05):
    for _ in range(steps):
        for part in X.to(next(model.parameters()).dtype).chunk(pieces):
            engine.backward(model(part).square().sum() / len(X))
        engine.step(lr)


def test_losses_of_micro_batches_add_up_to_one_update():
    whole, split = net(), net()
    train(prepared(whole), whole, 3)
    train(prepared(split), split, 3, pieces=3)
    torch.testing.assert_close(weights(whole), weights(split), rtol=0, atol=1e-6)


def test_step_equals_torch_adamw_with_clipping():
    ours, theirs = net(), net()
    engine = prepared(ours, betas=(0.8, 0.9), weight_decay=0.0, max_grad_norm=0.1)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.05, betas=(0.8, 0.9), weight_decay=0.0)
    for _ in range(3):
        engine.backward(ours(X).square().mean())
        theirs(X).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        assert engine.step(0.05) == pytest.approx(float(expected), rel=1e-6)
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(weights(ours), weights(theirs))


def test_only_matrices_decay():
    model = net()
    before = copy.deepcopy(model.state_dict())
    engine = prepared(model, weight_decay=0.5)
    engine.backward(0 * model(X).sum())
    engine.step(0.1)
    after = model.state_dict()
    torch.testing.assert_close(after["0.weight"], before["0.weight"] * 0.95)
    torch.testing.assert_close(after["0.bias"], before["0.bias"])


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_forgotten():
    model = net()
    engine = prepared(model)
    before = weights(model)
    engine.backward(model(X).sum() * float("nan"))
    assert np.isnan(engine.step(0.1))
    assert torch.equal(weights(model), before)
    engine.backward(model(X).square().sum())
    assert np.isfinite(engine.step(0.1))


def test_small_steps_add_up_in_bfloat16():
    model = net(torch.bfloat16)
    before = weights(model)
    engine = prepared(model)
    train(engine, model, 40, lr=1e-4)
    assert (weights(model) - before).abs().max() > 2e-3
    assert model[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_engine_goes_on_bitwise(tmp_path, dtype):
    model = net(dtype)
    engine = prepared(model)
    train(engine, model, 3)
    engine.save(tmp_path)
    twin = net(dtype)
    twin.load_state_dict(model.state_dict())
    loaded = prepared(twin)
    loaded.load(tmp_path)
    train(engine, model, 3)
    train(loaded, twin, 3)
    assert torch.equal(weights(model), weights(twin))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".safetensors"]


def test_the_state_of_another_model_is_refused(tmp_path):
    model = net()
    engine = prepared(model)
    train(engine, model, 1)
    engine.save(tmp_path)
    with pytest.raises(DataError, match=r"0\.weight is \(4, 3\), not \(5, 3\)"):
        prepared(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))).load(tmp_path)
    with pytest.raises(DataError, match="another model"):
        prepared(nn.Sequential(nn.Linear(3, 4))).load(tmp_path)


def test_one_process_gathers_itself():
    engine = TorchEngine("cpu")
    assert (engine.rank, engine.world_size) == (0, 1)
    assert engine.all_reduce_sum(torch.ones(2)).tolist() == [1, 1]
    assert [array.tolist() for array in engine.gather(np.arange(3))] == [[0, 1, 2]]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file of a full disk")
def test_a_full_disk_is_named_with_the_file(tmp_path):
    (tmp_path / OPTIMIZER_FILE).symlink_to("/dev/full")
    model = net()
    engine = prepared(model)
    train(engine, model, 1)
    with pytest.raises(DataError, match=r"could not write .*optimizer\.safetensors: No space left on device"):
        engine.save(tmp_path)


def test_the_saved_state_is_what_safetensors_reads(tmp_path):
    model = net(torch.bfloat16)
    engine = prepared(model)
    engine.save(tmp_path)
    assert {name.split("/")[0] for name in load_file(tmp_path / OPTIMIZER_FILE)} == {"weight"}
    train(engine, model, 2)
    engine.save(tmp_path)
    saved = load_file(tmp_path / OPTIMIZER_FILE)
    for name, parameter in model.named_parameters():
        assert torch.equal(saved[f"weight/{name}"].to(torch.bfloat16), parameter)
        assert saved[f"step/{name}"] == 2
        assert saved[f"exp_avg_sq/{name}"].shape == parameter.shape
        assert saved[f"exp_avg_sq/{name}"].min() > 0
