"""The name of a tokenizer and its chat template: two that give the same ids for every text share it."""

import hashlib
import json
from typing import Any

PROBES = (
    "The quick brown fox can't jump 3.14159 or 1,234,567 dogs.",
    "  two leading spaces,\ttabs\n\nnew lines  and trailing ones \n",
    "def f(x):\n    return x**2 != 0  # naïve Ångström ﬁ İ",
    "漢字かな交じり文 한국어 العربية हिन्दी 🙂👩‍👩‍👧 e\u0301 \u00a0\u200b",
    "<|im_start|>user\n<s>[INST] </s><bos><eos> <think></think> <tool_call>",
    "",
)
SAMPLED_TOKENS = 512


def fingerprint(tokenizer: Any) -> str:
    """16 hex digits over vocabulary, special tokens and ids of probe texts, then 16 over the chat template.

    The same after a save and a reload, from whatever path. Which token pads does not count.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    added = sorted(
        (int(i), token.content, token.special) for i, token in tokenizer.added_tokens_decoder.items()
    )
    facts = {
        "vocabulary": vocabulary,
        "added": added,
        "bos": tokenizer.bos_token,
        "eos": tokenizer.eos_token,
        "probes": [_encode(tokenizer, text) for text in (*PROBES, _sampled_text(tokenizer, vocabulary))],
    }
    return _digest(facts) + _digest(tokenizer.chat_template)


def same_vocabulary(one: str, other: str) -> bool:
    """Whether ids mean the same text under two fingerprints, whatever the chat templates."""
    return one[:16] == other[:16]


def _digest(facts: Any) -> str:
    text = json.dumps(facts, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _sampled_text(tokenizer: Any, vocabulary: list[tuple[str, int]]) -> str:
    """Text of tokens from all over the vocabulary: its ids depend on merges, which a vocabulary hides."""
    stride = max(len(vocabulary) // SAMPLED_TOKENS, 1)
    return "".join(tokenizer.decode([i]) for _, i in vocabulary[::stride])


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return ids
