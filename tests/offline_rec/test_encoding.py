import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from offline_rec.data.encoding import Encoded, Encoder, TextRow
from tests import tiny

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def row(prompt: Any, response: Any = None, **columns: Any) -> TextRow:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    for name in ("tools", "response_messages"):
        columns[name] = json.dumps(columns[name]) if columns.get(name) is not None else None
    return TextRow(text, columns.pop("tools"), response, columns.pop("response_messages"), **columns)


def ended(prompt: Any, response: Any = None, **columns: Any) -> TextRow:
    return row(prompt, response, **{"finish_reason": "stop"} | columns)


def chatml(**special: str) -> Any:
    """A byte-level tokenizer with two turn tokens, one of them its end-of-sequence token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokens = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        vocab_size=300,
        show_progress=False,
    )
    core.train_from_iterator(["the cat sat on the mat"] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=core, **{"eos_token": "<|im_end|>"} | special)
    fast.add_special_tokens({"additional_special_tokens": tokens})
    fast.chat_template = CHATML
    return fast


def with_bos() -> Any:
    """Adds its beginning token to every text, and a space before it, as Llama 2 does."""
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    tokens = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(special_tokens=tokens, vocab_size=80, show_progress=False)
    core.train_from_iterator(["hello world, yes and no [U] hi [A]"] * 3, trainer)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def encode(tokenizer: Any, text: TextRow) -> Encoded:
    (done,) = Encoder(tokenizer).encode([text])
    assert isinstance(done, Encoded), done
    return done


def produced(tokenizer: Any, done: Encoded) -> str:
    text: str = tokenizer.decode([i for i, m in zip(done.response_ids, done.loss_mask, strict=True) if m])
    return text


USER = [{"role": "user", "content": "hi"}]


def test_a_plain_prompt_and_its_response_are_encoded_apart() -> None:
    tokenizer = tiny.tokenizer()
    done = encode(tokenizer, ended("1+1=", "2"))
    assert tokenizer.decode(done.prompt_ids) == "1+1="
    assert tokenizer.convert_ids_to_tokens(done.response_ids) == ["2", "<eos>"]
    assert done.loss_mask == [1, 1]


@pytest.mark.parametrize(
    ("reason", "flags", "end"),
    [
        ("stop", (), True),
        ("STOP", (), True),
        ("tool_calls", (), True),
        ("length", (), False),
        ("abort", (), False),
        ("filtered", (), False),
        (None, (), True),
        (None, ("truncated",), False),
    ],
)
def test_the_end_token_follows_only_what_the_policy_ended(
    reason: str, flags: tuple[str, ...], end: bool
) -> None:
    tokenizer = tiny.tokenizer()
    done = encode(tokenizer, row("1+1=", "2", finish_reason=reason, flags=flags))
    assert (done.response_ids[-1] == tokenizer.eos_token_id) is end


def test_an_end_token_in_the_text_is_not_doubled() -> None:
    done = encode(tiny.tokenizer(), ended("1+1=", "2<eos>"))
    assert done.response_ids == encode(tiny.tokenizer(), ended("1+1=", "2")).response_ids


def test_a_chat_goes_through_the_template_with_its_tools() -> None:
    tokenizer = chatml()
    tokenizer.chat_template = "{{ tools | tojson if tools }}" + CHATML
    done = encode(tokenizer, ended(USER, "yes", tools=[{"name": "add"}]))
    assert tokenizer.decode(done.prompt_ids) == (
        '[{"name": "add"}]<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
    )
    assert tokenizer.decode(done.response_ids) == "yes<|im_end|>"


def test_the_end_of_a_turn_is_the_templates_own_where_the_eos_token_differs() -> None:
    tokenizer = chatml(eos_token="<|endoftext|>")
    assert tokenizer.decode(encode(tokenizer, ended(USER, "yes")).response_ids) == "yes<|im_end|>"
    assert tokenizer.decode(encode(tokenizer, ended("hi", "yes")).response_ids) == "yes<|endoftext|>"


@pytest.mark.parametrize("prompt", ["[U] hi [A]", "<s>[U] hi [A]", "<s><s>[U] hi [A]"])
def test_a_plain_prompt_begins_with_exactly_one_bos(prompt: str) -> None:
    done = encode(with_bos(), ended(prompt, "yo"))
    assert done.prompt_ids[0] == 1
    assert done.prompt_ids.count(1) == 1


def test_a_template_alone_decides_about_the_bos_of_a_chat() -> None:
    tokenizer = with_bos()
    for start, count in (("", 0), ("<s>", 1), ("<s><s>", 1)):
        tokenizer.chat_template = start + "{% for m in messages %}[U] {{ m.content }} [A]{% endfor %}"
        assert encode(tokenizer, ended(USER, "yo")).prompt_ids.count(1) == count


def test_a_response_does_not_get_the_space_that_begins_a_text() -> None:
    tokenizer = with_bos()
    done = encode(tokenizer, row("[U] hi [A]", "yes", finish_reason="length"))
    assert tokenizer.decode(done.prompt_ids[1:] + done.response_ids) == "[U] hi [A]yes"
    assert tokenizer("yes", add_special_tokens=False)["input_ids"] != done.response_ids


def test_an_empty_prompt_begins_with_bos_or_is_unusable() -> None:
    assert encode(tiny.tokenizer(), ended("", "2")).prompt_ids == [2]
    assert Encoder(chatml()).encode([ended("", "2")]) == ["empty_prompt"]


TOOL_TURNS = [
    {"role": "assistant", "content": "let me add", "tool_calls": [{"function": {"arguments": '{"a": 1}'}}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two"},
]


def test_only_the_turns_of_the_policy_carry_the_mask() -> None:
    tokenizer = chatml()
    done = encode(tokenizer, ended(USER, "two", response_messages=TOOL_TURNS))
    assert tokenizer.decode(done.response_ids) == (
        'let me add<call>{"a": 1}<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n'
        "<|im_start|>assistant\ntwo<|im_end|>"
    )
    assert produced(tokenizer, done) == 'let me add<call>{"a": 1}<|im_end|>two<|im_end|>'


def test_a_cut_trajectory_has_no_end_token_in_its_last_turn() -> None:
    tokenizer = chatml()
    done = encode(tokenizer, row(USER, "two", response_messages=TOOL_TURNS, finish_reason="length"))
    assert tokenizer.decode(done.response_ids).endswith("assistant\ntwo")


def test_a_trajectory_that_ends_with_a_tool_result_ends_with_mask_zero() -> None:
    tokenizer = chatml()
    done = encode(tokenizer, ended(USER, "", response_messages=TOOL_TURNS[:2]))
    assert produced(tokenizer, done) == 'let me add<call>{"a": 1}<|im_end|>'
    assert tokenizer.decode(done.response_ids).endswith("tool\n2<|im_end|>\n")


def test_several_turns_in_a_template_without_end_tokens() -> None:
    tokenizer = tiny.tokenizer()
    turns = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    done = encode(tokenizer, ended(USER, "c", response_messages=turns))
    assert tokenizer.decode(done.prompt_ids) == "<user>hi</><assistant>"
    assert tokenizer.decode(done.response_ids) == "a</><user>b</><assistant>c<eos>"
    assert produced(tokenizer, done) == "ac<eos>"


def test_content_parts_of_text_are_joined() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    assert encode(chatml(), ended(parts, "yes")) == encode(chatml(), ended(USER, "yes"))


def test_a_prefilled_answer_is_continued() -> None:
    tokenizer = chatml()
    done = encode(tokenizer, ended([*USER, {"role": "assistant", "content": "well, "}], "yes"))
    assert tokenizer.decode(done.prompt_ids).endswith("<|im_start|>assistant\nwell, ")


def test_rows_that_cannot_be_encoded_say_why_and_leave_the_others_alone() -> None:
    tokenizer = chatml()
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    rows = [
        ended(image, "a"),
        ended(USER, "yes"),
        ended(USER),
        ended("hi", "a", response_messages=TOOL_TURNS),
    ]
    done = Encoder(tokenizer).encode(rows)
    assert done == ["multimodal", encode(tokenizer, ended(USER, "yes")), "no_text", "plain_prompt"]


def test_templates_that_refuse_or_rewrite_are_told_apart() -> None:
    tokenizer = chatml()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    assert Encoder(tokenizer).encode([ended(USER, "a")]) == ["template_error"]
    tokenizer.chat_template = "{{ messages | length }}" + CHATML
    turns = ended(USER, "two", response_messages=TOOL_TURNS)
    assert Encoder(tokenizer).encode([turns]) == ["template_rewrites"]
    tokenizer.chat_template = None
    assert Encoder(tokenizer).encode([ended(USER, "a")]) == ["no_chat_template"]
