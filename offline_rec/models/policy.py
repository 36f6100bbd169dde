"""A policy: a causal language model with its tokenizer, and the log-probs it gives to logged responses."""

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from data_tools.errors import DataError
from offline_rec.data.ragged import IntArray, Ragged
from offline_rec.data.rows import Rows
from offline_rec.models.adapters import Adapter, LoraSettings
from offline_rec.models.heads import body_of, find_rule
from offline_rec.models.loading import choose_device, choose_dtype, load_model, load_tokenizer
from offline_rec.models.logprobs import token_logprobs
from offline_rec.models.padding import Padded, pad_rows, unflatten
from offline_rec.models.quiet import quiet
from offline_rec.models.saving import save_directory, weights_fingerprint

log = logging.getLogger(__name__)


class TokenModel(nn.Module):
    """The language model as a module from padded tokens to the log-probs of the response tokens.

    An engine that wraps a module wraps this one: all that a step needs of the model happens in its forward.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.checkpointing = False
        self._takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
        without_noise(model)
        with quiet():
            self.rule = find_rule(model)
        if self.rule is None:
            log.warning(
                "%s: hidden states and output head do not give the model's own logits; whole logits are used,"
                " which takes more memory",
                type(model).__name__,
            )

    def forward(self, padded: Padded) -> Tensor:
        """Log-probs of `padded.targets`, [targets] in at least float32."""
        # Layers recompute activations in training mode only; without dropout nothing else depends on it.
        self.model.train(self.checkpointing and torch.is_grad_enabled())
        inputs: dict[str, Any] = {
            "input_ids": padded.ids,
            "attention_mask": padded.attention,
            "use_cache": False,
        }
        if self._takes_positions:
            inputs["position_ids"] = torch.arange(padded.ids.shape[1], device=padded.ids.device)[None]
        if self.rule is not None:
            states = body_of(self.model)(**inputs)[0].flatten(0, 1)[padded.positions]
            head = self.rule.head_of(self.model)
            return token_logprobs(states, padded.targets, head, temperature=padded.temperature)
        logits = self.model(**inputs).logits.flatten(0, 1)[padded.positions]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if padded.temperature is not None:
            logits = logits / padded.temperature[:, None]
        return torch.log_softmax(logits, -1).gather(1, padded.targets[:, None])[:, 0]


class Policy:
    """A model directory that was loaded; `module` is what computes log-probs, and what an engine may wrap.

    With an `adapter`, only that is trained.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        gradient_checkpointing: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        self.model = model
        self.adapter = adapter
        self.tokenizer = tokenizer
        self.token_model = TokenModel(model)
        self.module: nn.Module = self.token_model
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.token_model.checkpointing = True

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        gradient_checkpointing: bool = False,
        lora: LoraSettings | None = None,
        quantise: str | None = None,
        trust_remote_code: bool = False,
    ) -> "Policy":
        """Load a local Hugging Face directory, by default in bfloat16 on a GPU, else in float32 on the CPU.

        An adapter's directory is opened merged into its base. `lora` puts a new adapter on the model, whose
        weights `quantise` may round to 4bit or 8bit. Raises DataError if there is no such directory, or no
        tokenizer or complete weights in it.
        """
        place = choose_device(device)
        precision = choose_dtype(dtype, place)
        tokenizer = load_tokenizer(directory, trust_remote_code=trust_remote_code)
        model = load_model(
            directory,
            device=place,
            dtype=precision,
            quantise=quantise,
            trust_remote_code=trust_remote_code,
        )
        adapter = None if lora is None else Adapter(model, lora)
        return cls(model, tokenizer, gradient_checkpointing=gradient_checkpointing, adapter=adapter)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = self.model.device
        return device

    @property
    def vocabulary(self) -> int:
        """Token ids are below this number."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def context(self) -> int | None:
        """Longest sequence the model was made for, None if it names none."""
        context: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return context

    def logprobs(self, rows: Rows, index: NDArray[np.integer[Any]] | None = None) -> Tensor:
        """Log-prob of every response token at its row's ratio temperature, [rows, longest response].

        0 where padded; in at least float32, differentiable in the parameters. With `index` only those rows,
        in that order. Raises DataError for token ids outside the vocabulary and sequences beyond the
        context.
        """
        if index is not None:
            rows = rows.select(index)
        self.check(rows)
        lengths = rows.response_ids.lengths
        values = self.module(pad_rows(rows, self.device))
        return unflatten(values, lengths, int(lengths.max(initial=0)))

    def pad(self, ragged: Ragged, width: int | None = None) -> Tensor:
        """[rows, width] on the policy's device, 0 where padded: values of rows beside their `logprobs`."""
        width = int(ragged.lengths.max(initial=0)) if width is None else width
        return torch.from_numpy(ragged.pad(width)).to(self.device)

    def fingerprint(self, *, merged: bool = True) -> str:
        """The name of the weights as they are now; it keys the `logprobs` sidecars of a dataset.

        That of the base alone unless `merged`.
        """
        return weights_fingerprint(self.model, merged=merged)

    def save(
        self,
        directory: str | Path,
        *,
        facts: Mapping[str, Any] | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """Write a plain Hugging Face directory, `facts` in its card; `state` replaces the weights.

        An adapter is merged into what is written, not into the policy.
        """
        return save_directory(self.model, self.tokenizer, directory, facts=facts, state=state)

    def outside(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows hold token ids that the model does not have."""
        return _any_outside(rows.prompt_ids, self.vocabulary) | _any_outside(
            rows.response_ids, self.vocabulary
        )

    def too_long(self, lengths: IntArray) -> NDArray[np.bool_]:
        """Which of the lengths of prompt and response together exceed the context."""
        return lengths > (self.context or np.iinfo(np.int64).max)

    def check(self, rows: Rows) -> None:
        """Raise DataError, naming rows, unless the model can compute all of them."""
        outside, too_long = self.outside(rows), self.too_long(rows.lengths)
        if outside.any():
            raise DataError(
                f"{_named(rows, outside)} hold token ids outside the model's vocabulary of {self.vocabulary}",
                "they were logged with another tokenizer; use the model that they belong to, or --retokenise",
            )
        if too_long.any():
            longest = int(rows.lengths.max())
            raise DataError(
                f"{_named(rows, too_long)} have up to {longest} tokens, the context is {self.context}",
                f"leave them out with a filter: n_prompt_tokens + n_tokens <= {self.context}",
            )


def without_noise(model: nn.Module) -> None:
    """Turn off dropout and router jitter: the ratio of two noisy probabilities is not a ratio of policies.

    Only the modules change; the configuration, and so a saved model, keeps its values.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def _any_outside(ids: Ragged, vocabulary: int) -> NDArray[np.bool_]:
    wrong = (ids.values < 0) | (ids.values >= vocabulary)
    if not wrong.any():
        return np.zeros(len(ids), np.bool_)
    rows = np.searchsorted(ids.offsets, np.flatnonzero(wrong), side="right") - 1
    return np.isin(np.arange(len(ids)), rows)


def _named(rows: Rows, which: NDArray[np.bool_]) -> str:
    first = ", ".join(rows.response_id[i] for i in np.flatnonzero(which)[:5])
    return f"{int(which.sum())} rows ({first})"
