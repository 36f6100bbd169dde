"""Does an engine draw from the weights that it should? Its log-probs against those of a plain forward pass.

An engine that was told to take new weights may answer that it has, and hold a mixture of old and new ones.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig

from data_tools.errors import RecError
from offline_rec.data.ragged import Ragged
from offline_rec.data.rows import Rows
from offline_rec.models.policy import Policy
from offline_rec.models.quiet import quiet
from offline_rec.sampling.sampler import Prompt, Sample, Sampler, SamplingParams

log = logging.getLogger(__name__)

TEXT = "Q: What is 17 plus 26? Think step by step.\nA: "
LONG = 192
"""Tokens of a prompt that fills blocks of an engine's cache, which must not be those of the old weights."""

SAMPLES = 4
NEW_TOKENS = 16
MOST_FLOAT32 = 1e-3
"""Largest difference of a log-prob in float32; two engines differ by 1e-4, two policies by more."""

MEAN_HALF = 0.1
"""Mean difference in half precision, in which single log-probs of two engines differ by up to 0.5 nat."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Differences between log-probs of an engine and of a forward pass, in nats over `tokens`."""

    largest: float
    mean: float
    tokens: int
    dtype: torch.dtype

    @property
    def good(self) -> bool:
        """Whether they are the rounding of the type and no more."""
        if self.dtype in (torch.float32, torch.float64):
            return self.largest <= MOST_FLOAT32
        return self.mean <= MEAN_HALF

    def demand(self, what: str) -> None:
        """Raise RecError unless they agree."""
        if not self.good:
            raise RecError(
                f"{what} does not draw from the weights that it should: log-probs of {self.tokens} tokens "
                f"differ from a forward pass by up to {self.largest:.2g} nats, {self.mean:.2g} in the mean",
                "start it with the directory that --model names, in the same precision",
            )


def verify(sampler: Sampler, policy: Policy) -> Agreement:
    """Sample a few responses, at temperature 1, and score them by a forward pass of `policy`."""
    groups = sampler.sample(_prompts(policy), SAMPLES, SamplingParams(max_tokens=NEW_TOKENS, seed=20250924))
    samples = [sample for group in groups for sample in group]
    with torch.inference_mode():
        scores = policy.logprobs(_rows(samples)).double().cpu().numpy()
    differences = np.concatenate(
        [
            np.abs(row[: len(s.logprobs)] - np.asarray(s.logprobs))
            for row, s in zip(scores, samples, strict=True)
        ]
    )
    dtype: torch.dtype = policy.model.dtype
    return Agreement(float(differences.max()), float(differences.mean()), len(differences), dtype)


def update(
    sampler: Sampler,
    directory: str | Path,
    *,
    reload: Callable[[], None],
    restart: Callable[[], None],
    policy: Policy | None,
    dtype: torch.dtype,
) -> None:
    """Bring an engine to the weights in `directory`: by `reload` where that may do, else by `restart`.

    A reload may also be refused, by an engine that has ended for one. Raises RecError if the engine disagrees
    with a forward pass even after a restart.
    """
    if policy is None:
        policy = Policy.load(directory, device="cpu", dtype=str(dtype).removeprefix("torch."))
    if has_own_head(directory):
        try:
            reload()
            found = verify(sampler, policy)
        except Exception as error:
            log.warning("%s: the engine takes no new weights (%s): restarting it", directory, error)
        else:
            if found.good:
                return
            log.warning(
                "%s: the engine has reloaded other weights (log-probs differ by %.2g nats): restarting it",
                *(directory, found.largest),
            )
    restart()
    verify(sampler, policy).demand("the engine")


def has_own_head(directory: str | Path) -> bool:
    """Whether the output head of a model is a tensor of its own in its files.

    One that is tied to the embedding keeps its old weights when vLLM reloads on a CPU.
    """
    path = Path(directory)
    with quiet():
        config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    names: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            names |= set(tensors.keys())
    return not config.tie_word_embeddings and any(name.endswith("lm_head.weight") for name in names)


def _prompts(policy: Policy) -> list[Prompt]:
    ids = policy.tokenizer(TEXT)["input_ids"]
    room = (policy.context or 1 << 20) - NEW_TOKENS
    longest = (ids * (LONG // len(ids) + 1))[: min(LONG, room)]
    return [Prompt("", ids=part) for part in (ids[: max(1, min(4, room))], ids[:room], longest)]


def _rows(samples: list[Sample]) -> Rows:
    responses = Ragged.from_lists([sample.response_ids for sample in samples], np.int64)
    return Rows(
        response_id=[f"sample {number}" for number in range(len(samples))],
        prompt_ids=Ragged.from_lists([sample.prompt_ids for sample in samples], np.int64),
        response_ids=responses,
        mask=Ragged.full(responses.lengths, 1, np.uint8),
        behavior=Ragged.full(responses.lengths, np.nan, np.float32),
        anchor=None,
        reference=None,
        temperature=np.ones(len(samples), np.float32),
    )
