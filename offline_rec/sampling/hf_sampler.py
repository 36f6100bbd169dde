"""Sampling from a Hugging Face causal language model in this process, with nothing else installed.

Prompts of similar length are run together, padded on the left; the samples of a prompt share its forward pass
through the key-value cache; sequences that have ended leave the batch.
"""

import inspect
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_tools.errors import ConfigError, DataError
from offline_rec.models.loading import load_model
from offline_rec.sampling.prompts import PromptReader, Request
from offline_rec.sampling.sampler import Noise, Prompt, Sample, Sampler, SamplingParams
from offline_rec.sampling.vocabulary import Vocabulary

COMPACT_BELOW = 0.75
"""Share of sequences still running below which the ended ones are taken out of the cache, a copy of it."""


class HFSampler(Sampler):
    """Samples `model` with `tokenizer`; at most `max_sequences` run at a time.

    The result does not depend on `max_sequences` beyond the rounding of the model's scores. Raises DataError
    for a prompt without tokens, or one that leaves no room for `max_tokens` within the model's positions.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, max_sequences: int = 256, trust_remote_code: bool = False
    ) -> None:
        if max_sequences < 1:
            raise ConfigError(f"max_sequences must be at least 1, got {max_sequences}")
        self.model = model
        self.max_sequences = max_sequences
        self._trust = trust_remote_code
        self.vocabulary = Vocabulary.of(model, tokenizer)
        self.reader = PromptReader(self.vocabulary, self.vocabulary.context)
        takes = inspect.signature(type(model).forward).parameters
        self._takes_positions = "position_ids" in takes
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def stream(
        self,
        prompts: Sequence[str | Prompt],
        n: int,
        params: SamplingParams,
        *,
        skip: Container[int] = (),
    ) -> Iterator[tuple[int, list[Sample]]]:
        """The number of each prompt with its `n` samples, batch after batch, short prompts first."""
        found: dict[int, list[Sample]] = {}
        for batch in self._batches(self.reader.requests(prompts, n, params, skip)):
            for job, samples in zip(batch, self._run(batch, params), strict=True):
                drawn = found.setdefault(job.prompt, [])
                drawn += samples
                if len(drawn) == n:
                    yield job.prompt, found.pop(job.prompt)

    def update_weights(self, directory: str | Path) -> None:
        """Go on with the model of another directory."""
        device, dtype = self.model.device, self.model.dtype
        self.model = None  # two may not fit
        self.model = load_model(directory, device=device, dtype=dtype, trust_remote_code=self._trust)

    def _batches(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Jobs of similar prompt length, within `max_sequences`; the samples of a prompt stay in order."""
        batch: list[Request] = []
        size = 0
        for job in self._jobs(sorted(requests, key=lambda request: len(request.ids))):
            if batch and size + len(job.keys) > self.max_sequences:
                yield batch
                batch, size = [], 0
            batch.append(job)
            size += len(job.keys)
        if batch:
            yield batch

    def _jobs(self, requests: list[Request]) -> Iterator[Request]:
        """Requests of at most `max_sequences` samples each."""
        for request in requests:
            for first in range(0, len(request.keys), self.max_sequences):
                yield replace(request, keys=request.keys[first : first + self.max_sequences])

    @torch.inference_mode()
    def _run(self, batch: list[Request], params: SamplingParams) -> list[list[Sample]]:
        """The samples of each job of one batch."""
        was_training = self.model.training
        self.model.eval()
        try:
            return self._samples(batch, params)
        finally:
            self.model.train(was_training)

    def _samples(self, batch: list[Request], params: SamplingParams) -> list[list[Sample]]:
        keys = [key for job in batch for key in job.keys]
        noise = torch.from_numpy(Noise.uniforms(keys, params.max_tokens)).to(self.model.device)
        ids, logprobs, lengths = self._decode(batch, noise, params)
        responses = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
        scores = [row[:length] for row, length in zip(logprobs.tolist(), lengths.tolist(), strict=True)]
        texts = iter(self.vocabulary.texts(responses))
        drawn = zip(responses, scores, strict=True)
        return [
            [
                Sample(job.ids, response, score, self.vocabulary.finish_reason(response), next(texts))
                for _, (response, score) in zip(job.keys, drawn, strict=False)
            ]
            for job in batch
        ]

    def _decode(
        self, batch: list[Request], noise: Tensor, params: SamplingParams
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and log-probs [sequences, max_tokens] and lengths [sequences], for noise of that shape."""
        logits, cache, mask = self._prefill(batch)
        ids = torch.zeros_like(noise, dtype=torch.long)
        logprobs = torch.zeros_like(noise, dtype=torch.float32)
        lengths = torch.zeros(len(noise), dtype=torch.long, device=noise.device)
        stop = torch.tensor(sorted(self.vocabulary.stop_ids), device=noise.device)
        at = torch.arange(len(noise), device=noise.device)  # the sequence that each row of the batch holds
        for step in range(params.max_tokens):
            token, logprob = draw(logits, noise[at, step], params)
            # A row that has ended and is still in the batch writes behind its own end, which nobody reads.
            ids[at, step], logprobs[at, step] = token, logprob
            ended = lengths[at] > 0
            stops = torch.isin(token, stop) & ~ended
            lengths[at[stops]] = step + 1
            running = ~(ended | stops)
            alive = int(running.sum())
            if not alive or step + 1 == params.max_tokens:
                break
            if alive < COMPACT_BELOW * len(at):
                rows = running.nonzero()[:, 0]
                cache.reorder_cache(rows)
                at, mask, token = at[rows], mask[rows], token[rows]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits = self._forward(token[:, None], mask, cache)[0]
        return ids, logprobs, torch.where(lengths > 0, lengths, params.max_tokens)

    def _prefill(self, batch: list[Request]) -> tuple[Tensor, Any, Tensor]:
        """Next-token scores, cache and attention mask with a row for each sequence of the batch."""
        longest = max(len(job.ids) for job in batch)
        ids = np.zeros((len(batch), longest), np.int64)
        mask = np.zeros((len(batch), longest), np.int64)
        for row, job in enumerate(batch):
            ids[row, longest - len(job.ids) :] = job.ids
            mask[row, longest - len(job.ids) :] = 1
        device = self.model.device
        attention = torch.from_numpy(mask).to(device)
        logits, cache = self._forward(torch.from_numpy(ids).to(device), attention, None)
        counts = torch.tensor([len(job.keys) for job in batch], device=device)
        rows = torch.repeat_interleave(torch.arange(len(batch), device=device), counts)
        cache.reorder_cache(rows)
        return logits[rows], cache, attention[rows]

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Scores [rows, vocabulary] after the last column of `ids`, and the cache that now holds them."""
        inputs = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache, **self._only_last}
        if self._takes_positions:
            # They count real tokens only: left to itself, padding on the left would shift them.
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model(**inputs, use_cache=True)
        return out.logits[:, -1], out.past_key_values


def sampling_logprobs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Log-probs [rows, vocabulary] that tokens are drawn by; -inf where top-k or top-p leave a token out.

    The most likely token always stays; a token stays under top-p if those more likely hold less than `top_p`.
    """
    scores = logits.float()
    if params.temperature == 0:
        best = scores.argmax(-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(-1, best, 0.0)
    logprobs = torch.log_softmax(scores / params.temperature, -1)
    if 0 < params.top_k < logprobs.shape[-1]:
        kept = torch.topk(logprobs, params.top_k, dim=-1)
        logprobs = torch.full_like(logprobs, -torch.inf).scatter(-1, kept.indices, kept.values)
        logprobs = torch.log_softmax(logprobs, -1)
    if params.top_p < 1:
        ordered, at = torch.sort(logprobs, dim=-1, descending=True, stable=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        out = before >= params.top_p
        out[..., 0] = False
        logprobs = logprobs.masked_fill(torch.zeros_like(out).scatter(-1, at, out), -torch.inf)
        logprobs = torch.log_softmax(logprobs, -1)
    return logprobs


def draw(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """A token for each row by inverting its distribution function at `uniform`, and that token's log-prob."""
    # One of -inf is a token that the model rules out; the largest shows NaN and rows without any token.
    if not torch.isfinite(logits.amax(-1)).all():
        raise DataError(
            "the model gives scores that are not finite", "its weights are broken, or its type too narrow"
        )
    logprobs = sampling_logprobs(logits, params)
    # In float64 the sum over a large vocabulary keeps the resolution of the uniform number.
    below = logprobs.double().exp().cumsum(-1)
    # `right` finds the first token whose sum exceeds the target: never one of probability 0.
    token = torch.searchsorted(below, uniform[:, None] * below[:, -1:], right=True)
    return token[:, 0], logprobs.gather(-1, token)[:, 0]
