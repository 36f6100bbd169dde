"""Real processes that meet over gloo: many jobs in one launch, so that imports are paid once.

`python -m tests.offline_rec.ranks FILE` runs on every rank. FILE is a JSON list of jobs: a fit, or the story
of an engine with a small network.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from offline_rec.config import FitConfig
from offline_rec.training.engine import Engine, OptimizerSettings
from offline_rec.training.engines import zero
from offline_rec.training.engines.choose import choose_engine
from offline_rec.training.engines.launch import launch
from offline_rec.training.engines.plain import TorchEngine
from offline_rec.training.fit import fit

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "zero-0": {"engine": "deepspeed", "zero_stage": 0},
    "zero-1": {"zero_stage": 1},
    "zero-2": {"zero_stage": 2},
    "zero-3": {"zero_stage": 3},
    "zero-1-offload": {"zero_stage": 1, "offload": True},
    "zero-2-offload": {"zero_stage": 2, "offload": True},
    "zero-3-offload": {"zero_stage": 3, "offload": True},
}
"""Fields of a configuration that choose each engine of several processes."""

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def run_jobs(jobs: list[dict[str, Any]], count: int, folder: Path) -> None:
    """Run jobs, one after the other, on all of `count` processes."""
    file = folder / f"jobs-{count}.json"
    file.write_text(json.dumps(jobs))
    assert launch([sys.executable, "-m", "tests.offline_rec.ranks", str(file)], count) == 0


def fit_job(config: FitConfig, *, resume: bool = False) -> dict[str, Any]:
    return {"kind": "fit", "config": config.model_dump(mode="json"), "resume": resume}


def story_job(engine: str, dtype: str, out: Path, start: Path | None = None) -> dict[str, Any]:
    return {
        "kind": "story",
        "engine": engine,
        "dtype": dtype,
        "out": str(out),
        "start": start and str(start),
    }


def story(
    engine: Engine, dtype: torch.dtype, out: Path, start: Path | None = None
) -> dict[str, torch.Tensor]:
    """Steps of an engine, with all that may befall one; from `start` on, what another story saved.

    No size of the network is divisible by two, so that shares of ranks differ. Returns weights and norms.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    if start is not None:
        model.load_state_dict(load_file(start / "weights.safetensors"))
    module = engine.prepare(model, OptimizerSettings(weight_decay=0.1, max_grad_norm=0.5))
    if start is not None:
        engine.load(start)

    def backward(scale: float = 1.0) -> None:
        own = X[engine.rank :: engine.world_size].to(dtype)
        for micro in own.chunk(2):
            engine.backward(module(micro).float().square().sum() * scale / len(X))

    norms = []
    for number in range(3):
        backward()
        norms.append(engine.step(0.05))
        backward(100.0)
        engine.zero()
        backward(float("nan") if engine.rank == engine.world_size - 1 and number == 1 else 3.0)
        norms.append(engine.step(0.05))
    out.mkdir(parents=True, exist_ok=True)
    engine.save(out)
    gathered = engine.weights()
    held = dict(model.state_dict()) if gathered is None else gathered
    if engine.rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, out / "weights.safetensors")
        save_file({"norms": torch.tensor(norms)}, out / "norms.safetensors")
    engine.barrier()
    return {**held, "norms": torch.tensor(norms)}


def alone(dtype: torch.dtype, out: Path, start: Path | None = None) -> None:
    """The story of the plain engine."""
    story(TorchEngine("cpu"), dtype, out, start)


def main(file: str) -> None:
    zero.PERSISTENT_ELEMENTS = 0  # the models are so small that stage 3 would keep them whole
    from offline_rec.training.engines.ddp import DdpEngine

    first = DdpEngine("cpu")  # makes the process group that all engines use
    for job in json.loads(Path(file).read_text()):
        if job["kind"] == "fit":
            config = FitConfig(**job["config"])
            fit(config, resume=job["resume"], engine=choose_engine(config))
        else:
            config = FitConfig(dataset="", model="", out="", device="cpu", **ENGINES[job["engine"]])
            start = job["start"] and Path(job["start"])
            story(choose_engine(config), getattr(torch, job["dtype"]), Path(job["out"]), start)
    first.close()


if __name__ == "__main__":
    main(sys.argv[1])
