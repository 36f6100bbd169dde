"""A tiny transformer, made and trained on the spot until it is half good at adding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data_tools.errors import DataError
from offline_rec.demo.task import ALPHABET, ANSWER_TOKENS, PROMPT_TOKENS, Problems
from offline_rec.models.quiet import quiet

END = "<eos>"
PAD = "<pad>"
BEGIN = "<bos>"
UNKNOWN = "<unk>"


@dataclass(frozen=True)
class Pretraining:
    """How the base policy is made: supervised steps until it answers `target` of the problems right."""

    seed: int
    target: float = 0.45
    check_every: int = 1
    max_steps: int = 2000
    batch: int = 128
    lr: float = 2e-3
    warmup: int = 50


def build_tokenizer() -> Any:
    """One token a character, and one to begin with."""
    with quiet():
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, UNKNOWN, BEGIN, END, *ALPHABET])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, vocabulary[BEGIN])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END
    )


def build_model(tokenizer: Any, *, seed: int, positions: int = 32, hidden: int = 64, layers: int = 2) -> Any:
    """A Llama of two layers and 0.1M parameters unless told, its weights drawn from `seed`."""
    with quiet():
        from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        # Wider than usual: at this size the customary 0.02 costs hundreds of steps.
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def pretrain(
    model: Any,
    tokenizer: Any,
    pool: Problems,
    development: Problems,
    *,
    recipe: Pretraining,
    progress: Callable[[float, float], None] | None = None,
) -> float:
    """Train on problems of the pool until the accuracy on `development` reaches the target; return it.

    `progress` is told accuracy and target in per cent. Raises DataError if `max_steps` do not suffice.
    """
    rng = np.random.default_rng(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step in range(1, recipe.max_steps + 1):
        drawn = rng.integers(0, len(pool), recipe.batch)
        batch = encode(tokenizer, Problems(pool.first[drawn], pool.second[drawn]))
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(1.0, step / recipe.warmup)
        logits, targets = _answers(model, batch)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=tokenizer.pad_token_id)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % recipe.check_every == 0:
            accuracy = expected_accuracy(model, tokenizer, development)
            if progress is not None:
                progress(round(100 * min(accuracy, recipe.target)), round(100 * recipe.target))
            if accuracy >= recipe.target:
                model.eval()
                return accuracy
    raise DataError(
        f"pre-training reached an accuracy of {accuracy:.2f} in {step} steps, not {recipe.target}",
        "try another seed",
    )


@torch.no_grad()
def expected_accuracy(model: Any, tokenizer: Any, problems: Problems) -> float:
    """Mean probability of the right answer and its end: what sampling at temperature 1 would find."""
    logits, targets = _answers(model, encode(tokenizer, problems))
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    right = (logprobs * (targets != tokenizer.pad_token_id)).sum(1)
    return float(right.exp().mean())


def encode(tokenizer: Any, problems: Problems) -> Tensor:
    """Token ids [problems, prompt and answer] with the end token, padded on the right."""
    texts = [p + a + END for p, a in zip(problems.prompts(), problems.answers(), strict=True)]
    ids: Tensor = tokenizer(
        texts, padding="max_length", max_length=PROMPT_TOKENS + ANSWER_TOKENS, return_tensors="pt"
    )["input_ids"]
    return ids


def _answers(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [problems, answer, vocabulary] of the answer tokens, and these tokens."""
    # Padding stands on the right, where a causal model does not see it.
    logits = model(input_ids=ids, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1]
    return logits, ids[:, PROMPT_TOKENS:]
