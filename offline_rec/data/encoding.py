"""Token ids of a response that was logged as text: what the engine would have seen and sampled.

Prompt and response are encoded apart, since that is how an engine gets them: the prompt's ids are fixed
before the first token is sampled. A chat goes through the tokenizer's template, which is then alone
responsible for the beginning-of-sequence token; a plain prompt gets the one that the tokenizer itself adds,
never two.

The end token is part of the response where the policy ended it: `finish_reason` is one of `ENDED`, or
unknown while nothing says that the response was cut. It is absent where the response was cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from jinja2 import TemplateError

from data_tools.collecting.prompts import Message, is_text, parse_prompt, text_of

ENDED = frozenset({"stop", "eos", "eos_token", "end_turn", "tool_calls", "tool_use", "function_call"})
PROBE_TEXT = "rec-probe"

UNUSABLE = {
    "no_text": "the row has no response text",
    "empty_prompt": "the prompt has no tokens, and the tokenizer no token to begin with",
    "no_chat_template": "the prompt is a chat, but the tokenizer has no chat template",
    "template_error": "the chat template refuses the messages",
    "template_rewrites": "the chat template renders earlier turns differently once later ones follow",
    "multimodal": "a message holds parts that are no text",
    "plain_prompt": "the response is a list of messages, but the prompt is plain text",
}
"""Why a row has no ids: code -> meaning."""


@dataclass(frozen=True)
class TextRow:
    """The columns of a rollout that its ids are made from."""

    prompt: str | None
    tools: str | None
    response: str | None
    response_messages: str | None
    finish_reason: str | None
    flags: Sequence[str] = ()

    @property
    def ended(self) -> bool:
        """Whether the policy ended the response itself; where no reason is given, unless flagged as cut."""
        if self.finish_reason is None:
            return "truncated" not in self.flags
        return self.finish_reason.lower() in ENDED


@dataclass(frozen=True)
class Encoded:
    """Ids of prompt and response, and 1 on the response tokens that the policy produced."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]


class Unusable(Exception):
    """A row that cannot be encoded; `reason` is a key of UNUSABLE."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class _Rendered:
    """A row as text: the prompt, then pieces of response, each with its mask, then perhaps the end token."""

    prompt: str
    pieces: list[tuple[str, int]]
    chat: bool
    ended: bool


class Encoder:
    """Turns text rows into ids with one tokenizer; what depends on the tokenizer alone is found out once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.lead = self._find_lead()
        self.suffix = self._find_suffix()
        self.end_of_text: int | None = tokenizer.eos_token_id
        self.end_of_turn = self._find_end_of_turn()
        first = tokenizer("a", verbose=False)["input_ids"][:1]
        self.adds_bos = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]

    def encode(self, rows: Sequence[TextRow]) -> list[Encoded | str]:
        """The ids of each row, or the reason (a key of UNUSABLE) why there are none."""
        rendered = [self._try_render(row) for row in rows]
        good = [row for row in rendered if isinstance(row, _Rendered)]
        prompts = iter(self._ids([row.prompt for row in good]))
        pieces = iter(self._continuations([text for row in good for text, _ in row.pieces]))
        done: list[Encoded | str] = []
        for row in rendered:
            if isinstance(row, str):
                done.append(row)
                continue
            prompt = next(prompts)
            done.append(self._assemble(row, prompt, [next(pieces) for _ in row.pieces]))
        return done

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return ids

    def _continuations(self, texts: list[str]) -> list[list[int]]:
        """Ids of texts that follow others: without the space that some tokenizers put before a text."""
        if not self.lead:
            return self._ids(texts)
        before = self._ids([self.lead])[0]
        return [ids[len(before) :] for ids in self._ids([self.lead + text for text in texts])]

    def _assemble(self, row: _Rendered, prompt: list[int], pieces: list[list[int]]) -> Encoded | str:
        prompt = self._with_one_bos(prompt, row.chat)
        if not prompt:
            return "empty_prompt"
        end = self.end_of_turn if row.chat else self.end_of_text
        response: list[int] = []
        mask: list[int] = []
        for (_, produced), ids in zip(row.pieces, pieces, strict=True):
            # Template text behind a turn of the policy begins with the end token that the policy sampled.
            ended_turn = not produced and bool(mask) and mask[-1] == 1 and ids[:1] == [end]
            response += ids
            mask += [1, *[0] * (len(ids) - 1)] if ended_turn else [produced] * len(ids)
        if row.ended and end is not None and response[-1:] != [end]:
            response.append(end)
            mask.append(1)
        return Encoded(prompt, response, mask)

    def _with_one_bos(self, prompt: list[int], chat: bool) -> list[int]:
        bos = self.tokenizer.bos_token_id
        if bos is None:
            return prompt
        if not prompt or (self.adds_bos and not chat):
            prompt = [bos, *prompt]
        while prompt[:2] == [bos, bos]:
            prompt = prompt[1:]
        return prompt

    def _try_render(self, row: TextRow) -> _Rendered | str:
        try:
            return self._render_row(row)
        except Unusable as error:
            return error.reason

    def _render_row(self, row: TextRow) -> _Rendered:
        prompt = parse_prompt(row.prompt or "")
        answer = _messages(row.response_messages)
        if row.response is None and not answer:
            raise Unusable("no_text")
        if isinstance(prompt, str):
            if answer:
                raise Unusable("plain_prompt")
            return _Rendered(prompt, [(row.response or "", 1)], False, row.ended)
        tools = orjson.loads(row.tools) if row.tools else None
        asked = [_plain(message) for message in prompt]
        if not answer:
            start = self._render(asked, tools, opened=True, prefilled=asked[-1]["role"] == "assistant")
            return _Rendered(start, [(row.response or "", 1)], True, row.ended)
        return self._render_turns(asked, [_plain(message) for message in answer], tools, row.ended)

    def _render_turns(
        self, asked: list[Message], answer: list[Message], tools: Any, ended: bool
    ) -> _Rendered:
        """Several turns: what the policy said, and between it what the template and others said."""
        first_is_ours = answer[0]["role"] == "assistant"
        prompt = seen = self._render(asked, tools, opened=first_is_ours)
        pieces: list[tuple[str, int]] = []
        for i, message in enumerate(answer):
            if message["role"] != "assistant":
                continue
            before = asked + answer[:i]
            opened = self._render(before, tools, opened=True)
            turn = _behind(opened, self._render([*before, message], tools)).removesuffix(self.suffix)
            pieces += [(_behind(seen, opened), 0), (turn, 1)]
            seen = opened + turn
        if answer[-1]["role"] != "assistant":
            pieces.append((_behind(seen, self._render(asked + answer, tools)), 0))
            ended = False
        return _Rendered(prompt, [piece for piece in pieces if piece[0]], True, ended)

    def _render(
        self, messages: list[Message], tools: Any, *, opened: bool = False, prefilled: bool = False
    ) -> str:
        """The messages as text, `opened` for the policy's turn; `prefilled`: the last message begins it."""
        if self.tokenizer.chat_template is None:
            raise Unusable("no_chat_template")
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=opened and not prefilled,
                continue_final_message=prefilled,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise Unusable("template_error") from error
        return text

    def _find_lead(self) -> str:
        """A text to put before a continuation so that it gets no space of its own; "" where none is added."""

        def spaced(ids: list[int]) -> bool:
            return bool(ids) and str(self.tokenizer.convert_ids_to_tokens(ids)[0]).startswith(("▁", "Ġ"))

        if not spaced(self._ids(["a"])[0]):
            return ""
        for lead in filter(None, (self.tokenizer.eos_token, "\n")):
            before, both = self._ids([lead, lead + "a"])
            if both[: len(before)] == before and not spaced(both[len(before) :]):
                return str(lead)
        return ""

    def _find_suffix(self) -> str:
        """What the template puts behind the words of an assistant."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE_TEXT}]
        try:
            return self._render(turns, None).rpartition(PROBE_TEXT)[2]
        except Unusable:
            return ""

    def _find_end_of_turn(self) -> int | None:
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        in_suffix = (i for i in self._ids([self.suffix])[0] if i in special)
        return next(in_suffix, self.end_of_text)


def _messages(text: str | None) -> list[Message]:
    if text is None:
        return []
    value = orjson.loads(text)
    messages = value if isinstance(value, list) else [value]
    return [{"role": "assistant", **message} for message in messages]


def _plain(message: Message) -> Message:
    """A message as templates expect it: text content, tool arguments as values."""
    if not is_text(message.get("content")):
        raise Unusable("multimodal")
    kept = {key: value for key, value in message.items() if value is not None}
    kept["content"] = text_of(message.get("content")) or ""
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
    return kept


def _call(call: Any) -> Any:
    """A tool call with its arguments parsed: templates write them as JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _behind(start: str, whole: str) -> str:
    if not whole.startswith(start):
        raise Unusable("template_rewrites")
    return whole[len(start) :]
