"""Engines of several processes train as one process does, and go on from each other's checkpoints.

Everything here happens in two launches, of two and of four processes.
"""

import copy
import itertools
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import data_tools
from data_tools.errors import ConfigError
from offline_rec.config import FitConfig
from offline_rec.data.passes import plan
from offline_rec.models.policy import Policy
from offline_rec.training.engine import OptimizerSettings
from offline_rec.training.engines import ddp, plain, zero
from offline_rec.training.engines.choose import choose_engine
from offline_rec.training.engines.ddp import DdpEngine, buckets
from offline_rec.training.fit import fit
from offline_rec.training.metrics import read_metrics
from tests import tiny
from tests.offline_rec import logged
from tests.offline_rec.fitting import assert_same_run, config, world
from tests.offline_rec.ranks import ENGINES, alone, fit_job, run_jobs, story_job

# Axes of the matrix of fits: a name, and the fields of the configuration that make it.
FITTED_PART = {"full": {}, "lora": {"lora_rank": 2, "lr": 1e-2}}
PROMPTS = {"plain": {"dataset": "ds"}, "shared": {"dataset": "long"}}
MICRO_BATCHES = {"whole": None, "pieces": {"plain": 40, "shared": 300}}
"""All of a rank's rows at once, or at most so many tokens."""

LONG = "0+" * 100
"""Before each prompt of the dataset "long", whose prompts are so long that sharing them pays."""

FITTED = ("ddp", "zero-0", "zero-1", "zero-2", "zero-3")
BASIS = {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "save_every": 3, "eval_every": 3}
SHORT = BASIS | {"steps": 4, "save_every": 4, "eval_every": 4}
HALF, WHOLE = 3, 6
GOES_ON = {"ddp": "zero-3", "zero-1": "ddp", "zero-3": "zero-2", "torch": "zero-3"}
"""Which engine of two processes is resumed by which engine of four."""

HARD = {
    "tied-recomputed": {"model": "tied", "gradient_checkpointing": True},
    "whole-step": {"algorithm": "opmd-pairwise"},
    "few-groups": {"groups_per_step": 1},
}
"""A head that is the embedding, layers that run twice, passes without gradient, a rank without a group."""

HARD_FOR = ("ddp", "zero-3")

BUCKETED = [(n, torch.float32) for n in (3, 1, 2, 9, 1)] + [(1, torch.float64)] * 2

DTYPES = ("float32", "bfloat16")
STORIES = [
    (engine, dtype)
    for engine, dtype in itertools.product(ENGINES, DTYPES)
    if (engine, dtype) != ("zero-0", "bfloat16")  # refused, see below
]


def cells():
    """Name and fields of every combination of the axes."""
    for part, prompts, pieces in itertools.product(FITTED_PART, PROMPTS, MICRO_BATCHES):
        budgets = MICRO_BATCHES[pieces]
        tokens = {"tokens_per_micro_batch": budgets[prompts] if budgets else 1 << 14}
        yield f"{part}-{prompts}-{pieces}", FITTED_PART[part] | PROMPTS[prompts] | tokens


def cell(folder, name, engine, fields):
    placed = {"dataset": str(folder / fields["dataset"])}
    return config(folder, f"{name}-{engine}", **SHORT | fields | placed | ENGINES.get(engine, {}))


def hard(folder, model="m", **fields):
    return SHORT | {"model": str(folder / model), "tokens_per_micro_batch": 40} | fields


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = world(tmp_path_factory.mktemp("world"))
    logged.dataset(folder / "long", logged.rows(12, before=LONG), batches=2)
    return folder


@pytest.fixture(scope="module")
def two(folder):
    """What two processes do: the matrix, halves of runs, and the story of every engine."""
    jobs = [fit_job(cell(folder, name, engine, fields)) for name, fields in cells() for engine in FITTED]
    tiny.save(folder / "tied", tied=True)
    jobs += [
        fit_job(config(folder, f"{name}-{engine}", **hard(folder, **fields), **ENGINES[engine]))
        for name, fields in HARD.items()
        for engine in HARD_FOR
    ]
    halves = [engine for engine in GOES_ON if engine != "torch"]
    jobs += [
        fit_job(config(folder, f"half-{engine}", **BASIS | ENGINES[engine], steps=HALF)) for engine in halves
    ]
    for engine, dtype in STORIES:
        alone_too = folder / f"alone-{dtype}"
        if not alone_too.exists():
            alone(getattr(torch, dtype), alone_too)
        jobs.append(story_job(engine, dtype, folder / f"{engine}-{dtype}"))
        jobs.append(story_job(engine, dtype, folder / f"{engine}-{dtype}-on", alone_too))
    run_jobs(jobs, 2, folder)
    return folder


@pytest.fixture(scope="module")
def four(two):
    """What four processes do: go on with halves of runs."""
    fit(config(two, "half-torch", **BASIS, steps=HALF))
    jobs = []
    for first, second in GOES_ON.items():
        shutil.copytree(two / f"half-{first}", two / f"{first}-{second}")
        resumed = config(two, f"{first}-{second}", **BASIS | ENGINES[second], steps=WHOLE)
        jobs.append(fit_job(resumed, resume=True))
    run_jobs(jobs, 4, two)
    return two


@pytest.fixture(scope="module")
def whole(folder):
    """The run that nothing interrupted, in one process."""
    return fit(config(folder, "whole", **BASIS, steps=WHOLE)).out


@pytest.mark.parametrize("engine", FITTED)
@pytest.mark.parametrize(("name", "fields"), cells())
def test_two_processes_train_as_one(two, engine, name, fields):
    one = two / f"{name}-torch"
    if not one.exists():
        fit(cell(two, name, "torch", fields))
    assert_same_run(two / f"{name}-{engine}", one)
    norms = [record["grad_norm"] for record in read_metrics(one) if record["step"]]
    # Neither clipping nor the split into micro-batches would be tested otherwise.
    assert "lora" in name or max(norms) > BASIS["max_grad_norm"]


def test_long_prompts_are_shared_and_short_ones_are_not(two):
    """Or the matrix would not have that axis."""
    policy = Policy.load(two / "m", device="cpu")
    for name, shared in (("ds", False), ("long", True)):
        ids = data_tools.open(str(two / name)).sql("SELECT prompt_ids, response_ids FROM rollouts LIMIT 4")
        lengths = [np.array(list(map(len, column.to_pylist()))) for column in ids.columns]
        passes = plan(*lengths, np.zeros(4, np.int64), policy.sharing)
        assert any(one.parent is not None for one in passes) == shared


@pytest.mark.parametrize("engine", HARD_FOR)
@pytest.mark.parametrize("name", HARD)
def test_what_is_hard_to_shard_trains_as_in_one_process(two, engine, name):
    one = two / f"{name}-torch"
    if not one.exists():
        fit(config(two, one.name, **hard(two, **HARD[name])))
    assert_same_run(two / f"{name}-{engine}", one)


@pytest.mark.parametrize(("engine", "dtype"), STORIES)
def test_norms_skips_and_moments_are_those_of_the_plain_engine(two, engine, dtype):
    ours, theirs = two / f"{engine}-{dtype}", two / f"alone-{dtype}"
    assert_same_story(ours, theirs, dtype)
    saved, expected = (load_file(story / "optimizer.safetensors") for story in (ours, theirs))
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=tolerance(dtype))


@pytest.mark.parametrize(("engine", "dtype"), STORIES)
def test_an_engine_goes_on_with_what_the_plain_one_saved(two, engine, dtype):
    expected = two / f"alone-{dtype}-on"
    if not expected.exists():
        alone(getattr(torch, dtype), expected, two / f"alone-{dtype}")
    assert_same_story(two / f"{engine}-{dtype}-on", expected, dtype)


def tolerance(dtype):
    # Sums of two halves in another order differ by a unit of the last place of bfloat16.
    return 1e-6 if dtype == "float32" else 2e-2


def assert_same_story(ours, theirs, dtype):
    norms = [load_file(story / "norms.safetensors")["norms"] for story in (ours, theirs)]
    assert (
        norms[0].isfinite().tolist() == norms[1].isfinite().tolist() == [True, True, True, False, True, True]
    )
    finite = norms[1].isfinite()
    torch.testing.assert_close(norms[0][finite], norms[1][finite], rtol=1e-5 + tolerance(dtype), atol=0)
    weights = [load_file(story / "weights.safetensors") for story in (ours, theirs)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=0, atol=tolerance(dtype))


@pytest.mark.parametrize("engine", [engine for engine in GOES_ON if engine != "torch"])
def test_one_process_goes_on_with_the_run_of_two(two, whole, engine):
    out = shutil.copytree(two / f"half-{engine}", two / f"{engine}-torch")
    assert_same_run(fit(config(two, out.name, **BASIS, steps=WHOLE), resume=True).out, whole)


@pytest.mark.parametrize("engine", GOES_ON)
def test_four_processes_with_another_engine_go_on_with_the_run_of_two(four, whole, engine):
    assert_same_run(four / f"{engine}-{GOES_ON[engine]}", whole)


def test_a_parameter_that_nothing_uses_is_left_alone():
    # In this process, as the only rank: weight decay would move what has a gradient of 0.
    engine = DdpEngine("cpu")
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        before = copy.deepcopy(model.state_dict())
        engine.prepare(model, OptimizerSettings(weight_decay=0.5))
        engine.backward(model[0](torch.ones(2)).sum())
        engine.step(0.1)
        assert not torch.equal(model[0].weight, before["0.weight"])
        assert torch.equal(model[1].weight, before["1.weight"])
        arrays = engine.gather(np.zeros((0, 7), np.bool_))
        assert (len(arrays), arrays[0].shape, arrays[0].dtype) == (1, (0, 7), np.bool_)
    finally:
        dist.destroy_process_group()


def test_gradients_are_summed_in_buckets_of_one_dtype():
    tensors = [torch.zeros(n, dtype=dtype) for n, dtype in BUCKETED]
    assert [[t.numel() for t in bucket] for bucket in buckets(tensors, 4)] == [[3, 1], [2], [9], [1], [1, 1]]


def test_stage_0_in_bfloat16_is_refused(monkeypatch):
    monkeypatch.setattr(zero, "_load", lambda device: None)
    engine = zero.ZeroEngine("cpu", stage=0)
    try:
        with pytest.raises(ConfigError, match=r"sums gradients of torch.bfloat16.*\n.*engine=ddp"):
            engine.prepare(nn.Linear(2, 2).bfloat16(), OptimizerSettings())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("size", "fields", "expected"),
    [
        (1, {}, ("torch",)),
        (2, {}, ("ddp",)),
        (1, {"engine": "ddp"}, ("ddp",)),
        (1, {"zero_stage": 0}, ("zero", 0, False)),
        (2, {"zero_stage": 3}, ("zero", 3, False)),
        (2, {"engine": "deepspeed"}, ("zero", 2, False)),
        (2, {"offload": True}, ("zero", 2, True)),
    ],
)
def test_the_engine_follows_from_the_configuration_and_the_processes(monkeypatch, size, fields, expected):
    for name, value in (("RANK", 0), ("WORLD_SIZE", size), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(plain, "TorchEngine", lambda device: ("torch",))
    monkeypatch.setattr(ddp, "DdpEngine", lambda device: ("ddp",))
    monkeypatch.setattr(zero, "ZeroEngine", lambda device, stage, offload: ("zero", stage, offload))
    assert choose_engine(FitConfig(dataset="", model="", out="", **fields)) == expected
