"""Models that vLLM's CPU kernels take, and which Python has vLLM."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
SHAPE = {"std": 0.15, "head_dim": 32, "alphabet": "abc"}
ARGUMENTS = ("--max-num-seqs", "64")


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter that servers are started with; REC_VLLM_PYTHON names one of another environment."""
    return os.environ.get("REC_VLLM_PYTHON", sys.executable)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two with a head of their own, two whose head is tied to the embedding; of seven tokens each."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    return {
        name + kind: tiny.save(folder / (name + kind), seed=seed, tied=bool(kind), **SHAPE)
        for name, seed in (("old", 2), ("new", 3))
        for kind in ("", "-tied")
    }


@pytest.fixture(autouse=True)
def _no_noise(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
