"""A real, tiny causal language model and tokenizer, built on the spot in a fraction of a second."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(alphabet: str = "".join(chr(c) for c in range(32, 127)) + "\n") -> PreTrainedTokenizerFast:
    """One token a character; `<bos>`, `<eos>`, `<pad>`, `<unk>` first."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<unk>", "<bos>", "<eos>", *alphabet])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    core.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model(
    vocab_size: int, *, seed: int = 0, std: float = 0.2, tied: bool = False, head_dim: int = 8
) -> LlamaForCausalLM:
    """Two layers of width 32; a large `std` makes differences between token sequences visible."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        initializer_range=std,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def save(
    directory: Path,
    *,
    seed: int = 0,
    std: float = 0.2,
    tied: bool = False,
    head_dim: int = 8,
    alphabet: str | None = None,
) -> Path:
    """A model directory as `rec fit --model` takes it."""
    fast = tokenizer() if alphabet is None else tokenizer(alphabet)
    model(len(fast), seed=seed, std=std, tied=tied, head_dim=head_dim).save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory
