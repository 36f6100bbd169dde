"""A policy: a causal language model with its tokenizer, and the log-probs it gives to logged responses."""

import inspect
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from data_tools.errors import DataError
from offline_rec.data.passes import Sharing, plan_rows
from offline_rec.data.ragged import IntArray, Ragged
from offline_rec.data.rows import Rows
from offline_rec.models.adapters import Adapter, LoraSettings
from offline_rec.models.heads import body_of, find_rule
from offline_rec.models.loading import (
    check_kernels,
    choose_device,
    choose_dtype,
    load_model,
    load_tokenizer,
)
from offline_rec.models.logprobs import Weigh, token_logprobs, weighted_logprobs, weighted_sum
from offline_rec.models.padding import Layout, Sheet, lay_out, places, unflatten
from offline_rec.models.quiet import quiet
from offline_rec.models.saving import save_directory, weights_fingerprint
from offline_rec.models.sharing import carried, find_packing, find_sharing, new_past

log = logging.getLogger(__name__)

LOGITS_AT_ONCE = 1 << 22
"""Those of some tokens that are looked at whole: 16 MiB, of which sorting makes several."""


class TokenModel(nn.Module):
    """The language model as a module from the layout of rows to the log-probs of their response tokens.

    An engine that wraps a module wraps this one: all that a step needs of the model happens in its forward.
    `kernels`: of those of `FitConfig.kernels`, what to use.
    """

    def __init__(self, model: Any, kernels: Collection[str] = ()) -> None:
        super().__init__()
        self.model = model
        self.fused = "triton" in kernels
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
        self.sharing = find_sharing(model, self)
        if "flex" in kernels:
            self.sharing = replace(self.sharing, packs=find_packing(model, self))

    def forward(self, layout: Layout, weigh: Weigh | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probs of the response tokens, row after row, [targets] in at least float32.

        With `weigh`, what `weighted_logprobs` gives: log-probs without gradient, and their weighted sum.
        """
        # Layers recompute activations in training mode only; without dropout nothing else depends on it.
        self.model.train(self.checkpointing and torch.is_grad_enabled())
        return self._logprobs(self._predicting(layout)[layout.order], layout, weigh)

    @torch.no_grad()
    def logits(self, layout: Layout) -> Iterator[Tensor]:
        """Logits [n, vocabulary] of the response tokens, row after row, a few tokens at a time."""
        states = self._predicting(layout)[layout.order]
        head = None if self.rule is None else self.rule.head_of(self.model)
        for part in torch.split(
            states, max(LOGITS_AT_ONCE // self.model.config.get_text_config().vocab_size, 1)
        ):
            yield part if head is None else head.logits(part)

    def _predicting(self, layout: Layout) -> Tensor:
        """The states that predict response tokens, sheet after sheet; keys and values are gone by then."""
        states: list[Tensor] = []
        pasts: dict[int, Any] = {}
        for number, sheet in enumerate(layout.sheets):
            past = None
            if sheet.keeps:
                past = pasts[number] = new_past()
            elif sheet.parent is not None and sheet.follows is not None:
                past = carried(pasts[sheet.parent], sheet.follows)
            states.append(self._states(sheet, past)[sheet.predicts])
        return torch.cat(states)

    def _states(self, sheet: Sheet, past: Any) -> Tensor:
        """Hidden states of all tokens of a sheet, or logits where these are not head times states."""
        inputs: dict[str, Any] = {"input_ids": sheet.ids, "use_cache": past is not None}
        if past is not None:
            inputs["past_key_values"] = past
        if sheet.attention is not None:
            inputs["attention_mask"] = sheet.attention
        if self._takes_positions:
            inputs["position_ids"] = sheet.places
        states: Tensor = (
            self.model(**inputs).logits if self.rule is None else body_of(self.model)(**inputs)[0]
        )
        return states.flatten(0, 1)

    def _logprobs(
        self, states: Tensor, layout: Layout, weigh: Weigh | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if self.rule is not None:
            head = self.rule.head_of(self.model)
            how: dict[str, Any] = {"temperature": layout.temperature, "fused": self.fused}
            if weigh is not None:
                return weighted_logprobs(states, layout.targets, head, weigh, **how)
            return token_logprobs(states, layout.targets, head, **how)
        logits = states.to(torch.promote_types(states.dtype, torch.float32))
        if layout.temperature is not None:
            logits = logits / layout.temperature[:, None]
        logprobs = torch.log_softmax(logits, -1).gather(1, layout.targets[:, None])[:, 0]
        return logprobs if weigh is None else (logprobs.detach(), weighted_sum(logprobs, weigh))


class Policy:
    """A model directory that was loaded; `module` is what computes log-probs, and what an engine may wrap.

    Token ids are below `vocabulary`. With an `adapter`, only that is trained; `shapes` are those of what a
    checkpoint holds: the adapter's matrices, or all parameters.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        gradient_checkpointing: bool = False,
        adapter: Adapter | None = None,
        kernels: Collection[str] = (),
    ) -> None:
        self.model = model
        self.adapter = adapter
        self.tokenizer = tokenizer
        self.token_model = TokenModel(model, kernels)
        self.module: nn.Module = self.token_model
        # Asked now: an engine may shard the parameters, which then have no shape of their own.
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        fitted = dict(model.named_parameters()) if adapter is None else adapter.tensors()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in fitted.items()}
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.token_model.checkpointing = True
            if self.token_model.sharing.shares and not self.token_model.sharing.packs:
                log.warning(
                    "gradient checkpointing: each response is computed with its prompt, because layers that"
                    " recompute their activations take no keys and values"
                )

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
        kernels: Collection[str] = (),
        trust_remote_code: bool = False,
    ) -> "Policy":
        """Load a local Hugging Face directory, by default in bfloat16 on a GPU, else in float32 on the CPU.

        An adapter's directory is opened merged into its base. `lora` puts a new adapter on the model, whose
        weights `quantise` may round to 4bit or 8bit; `kernels` are those of `FitConfig`. Raises DataError if
        there is no such directory, or no tokenizer or complete weights in it, ConfigError for kernels that
        cannot run here.
        """
        place = choose_device(device)
        check_kernels(kernels, place)
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
        options: dict[str, Any] = {"gradient_checkpointing": gradient_checkpointing, "kernels": kernels}
        return cls(model, tokenizer, adapter=adapter, **options)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = self.model.device
        return device

    @property
    def context(self) -> int | None:
        """Longest sequence the model was made for, None if it names none."""
        context: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return context

    @property
    def sharing(self) -> Sharing:
        """How rows are computed; layers that recompute their activations take no keys and values."""
        found = self.token_model.sharing
        return replace(found, shares=found.shares and not self.token_model.checkpointing)

    def logprobs(
        self, rows: Rows, index: NDArray[np.integer[Any]] | None = None, *, passes: int = 0
    ) -> Tensor:
        """Log-prob of every response token at its row's ratio temperature, [rows, longest response].

        0 where padded; in at least float32, differentiable in the parameters. With `index` only those rows,
        in that order. The model's layers run at least `passes` times, so that ranks can meet in them. Raises
        DataError for token ids outside the vocabulary and sequences beyond the context.
        """
        if index is not None:
            rows = rows.select(index)
        self.check(rows)
        lengths = rows.response_ids.lengths
        values = self.module(lay_out(rows, self.device, self.sharing, passes=passes))
        return unflatten(values, lengths, int(lengths.max(initial=0)))

    def weighted_logprobs(self, rows: Rows, weigh: Weigh, *, passes: int = 0) -> tuple[Tensor, Tensor]:
        """The same log-probs without gradient, and the scalar sum(c * log-probs), to be differentiated once.

        c = weigh(positions, log-probs) of some of the tokens at a time, [n] each, held fixed: positions are
        those in the flattened [rows, longest response]. Cheaper than `logprobs` by the logits of its
        backward pass. Raises what `logprobs` raises.
        """
        self.check(rows)
        lengths = rows.response_ids.lengths
        width = int(lengths.max(initial=0))
        at = places(lengths, width, self.device)
        layout = lay_out(rows, self.device, self.sharing, passes=passes)
        values, total = self.module(layout, lambda tokens, logprobs: weigh(at[tokens], logprobs))
        return unflatten(values, lengths, width), total

    def passes(self, rows: Rows) -> int:
        """How often the model's layers run to compute these rows."""
        return len(plan_rows(rows, self.sharing))

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
        """Write a plain Hugging Face directory, `facts` in its card.

        An adapter is merged into what is written, not into the policy. `state` replaces the weights, under
        the names that they have in `module`.
        """
        state = None if state is None else self.without_wrapper(state)
        return save_directory(self.model, self.tokenizer, directory, facts=facts, state=state)

    def without_wrapper(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of `module` under the names that they have in `model`."""
        return {name.removeprefix("model."): tensor for name, tensor in state.items()}

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
