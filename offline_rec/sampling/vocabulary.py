"""What a sampler knows of a model that an engine holds: its tokens, which of them end a response."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from data_tools.errors import DataError
from offline_rec.data.encoding import Encoder
from offline_rec.models.adapters import base_of, is_adapter
from offline_rec.models.loading import load_tokenizer
from offline_rec.models.quiet import quiet


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a model, its number of ids, those that end a response, and its context.

    `size` counts the rows of the embedding, which may be more than the tokenizer has tokens.
    """

    tokenizer: Any
    size: int
    stop_ids: frozenset[int]
    context: int | None

    @classmethod
    def load(cls, directory: str | Path) -> "Vocabulary":
        """That of a model directory, without its weights."""
        tokenizer = load_tokenizer(directory)
        path = Path(directory)
        if is_adapter(path):
            return replace(cls.load(base_of(path)), tokenizer=tokenizer)
        with quiet():
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
        generation = path / "generation_config.json"
        named = json.loads(generation.read_text(encoding="utf-8")) if generation.exists() else {}
        ends = named.get("eos_token_id", config.eos_token_id)
        context = getattr(config, "max_position_embeddings", None)
        return cls(tokenizer, int(config.vocab_size), stop_ids(ends, tokenizer), context)

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> "Vocabulary":
        """That of a model which is in memory."""
        named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        size = int(model.get_input_embeddings().weight.shape[0])
        return cls(tokenizer, size, stop_ids(named, tokenizer), context)

    @cached_property
    def encoder(self) -> Encoder:
        """Prompts to ids, as those of logged texts."""
        return Encoder(self.tokenizer)

    def texts(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """What responses say, without special tokens."""
        texts: list[str] = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        return texts

    def finish_reason(self, response_ids: Sequence[int]) -> str:
        """`stop` where the last token ends a response, else `length`."""
        return "stop" if response_ids[-1] in self.stop_ids else "length"

    def check(self, response_ids: Sequence[int], finish_reason: str | None) -> None:
        """Raise DataError for a response that an engine cannot have drawn from the model as it is here."""
        if not 0 <= min(response_ids) <= max(response_ids) < self.size:
            raise DataError(
                f"the engine gives token ids outside the model's vocabulary of {self.size}",
                "it serves another model",
            )
        if self.finish_reason(response_ids) != finish_reason:
            raise DataError(
                f"a response is said to end by {finish_reason!r}, but its last token is {response_ids[-1]}",
                f"the engine ends responses at other tokens than the model's {sorted(self.stop_ids)}",
            )


def stop_ids(named: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a response: those that the generation config names, and the tokenizer's; may be none."""
    ids = [*named] if isinstance(named, list | tuple) else [named]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)
