from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from offline_rec.data.fingerprint import fingerprint, same_vocabulary
from tests import tiny
from tests.offline_rec.test_encoding import chatml, with_bos


def test_fingerprint_survives_saving_and_moving(tmp_path: Path) -> None:
    for number, tokenizer in enumerate([tiny.tokenizer(), chatml(), with_bos()]):
        first = fingerprint(tokenizer)
        for name in ("a", "b/c"):
            path = tmp_path / str(number) / name
            tokenizer.save_pretrained(path)
            (path / "config.json").write_text('{"model_type": "llama"}')
            tokenizer = AutoTokenizer.from_pretrained(path)
            assert fingerprint(tokenizer) == first
        assert len(first) == 32


def test_whatever_changes_ids_changes_the_fingerprint() -> None:
    def changed(**attributes: Any) -> str:
        tokenizer = tiny.tokenizer()
        for name, value in attributes.items():
            setattr(tokenizer, name, value)
        return fingerprint(tokenizer)

    def added() -> str:
        tokenizer = tiny.tokenizer()
        tokenizer.add_tokens(["ab"])
        return fingerprint(tokenizer)

    same = changed()
    assert same == fingerprint(tiny.tokenizer())
    assert changed(pad_token="<eos>") == same
    others = [
        changed(chat_template="{{ messages }}"),
        changed(eos_token="<unk>"),
        added(),
        fingerprint(tiny.tokenizer("abc")),
        fingerprint(chatml()),
        fingerprint(with_bos()),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_a_chat_template_does_not_change_what_ids_mean() -> None:
    other = tiny.tokenizer()
    other.chat_template = "{{ messages }}"
    assert same_vocabulary(fingerprint(tiny.tokenizer()), fingerprint(other))
    assert not same_vocabulary(fingerprint(tiny.tokenizer()), fingerprint(chatml()))


def test_merges_that_the_vocabulary_hides_change_the_fingerprint() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "<unk>": 5}

    def with_merges(merges: list[tuple[str, str]]) -> Any:
        core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
        return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")

    one, two = with_merges([("a", "b"), ("b", "c")]), with_merges([("b", "c"), ("a", "b")])
    assert fingerprint(one) != fingerprint(two)
