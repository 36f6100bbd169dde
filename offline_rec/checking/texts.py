"""Texts against the engine's ids: what ids decode to and texts encode to, with the first difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data_tools.checking import Findings, Rule, Sample, Tally
from offline_rec.checking.rules import (
    BOS_MISSING,
    BOS_TWICE,
    END_AFTER_CUT,
    END_MISSING,
    NOT_ENCODABLE,
    OUTSIDE,
    PROMPT_DIFFERS,
    RETOKENISED,
    TEXT_DIFFERS,
)
from offline_rec.data.encoding import UNUSABLE, Encoded, Encoder, TextRow
from offline_rec.data.engine_ids import agree

if TYPE_CHECKING:
    import pyarrow as pa

_TEXT = ("prompt", "tools", "response", "response_messages", "finish_reason", "flags")
_IDS = ("response_id", "prompt_ids", "response_ids", "loss_mask")
SHOWN_TOKENS = 3
SHOWN_CHARACTERS = 24


@dataclass(frozen=True)
class _Logged:
    """What a row logged of its ids."""

    name: str
    prompt_ids: list[int] | None
    response_ids: list[int] | None
    partial: bool


def compare_texts(sample: Sample, encoder: Encoder, vocabulary: int, findings: Findings) -> None:
    """Note where ids and texts of the sampled rows do not belong together under the encoder's tokenizer."""
    tally = Tally()
    for table in sample.chunks((*_TEXT, *_IDS)):
        rows = [TextRow(**row) for row in table.select(_TEXT).to_pylist()]
        for logged, row, made in zip(_logged(table), rows, encoder.encode(rows), strict=True):
            for rule, detail in _look(logged, row, made, encoder, vocabulary):
                tally.add(rule, [logged.name], detail)
    findings.take(tally, of=len(sample))


def _logged(table: "pa.Table") -> list[_Logged]:
    return [
        _Logged(
            row["response_id"],
            row["prompt_ids"],
            row["response_ids"],
            row["response_messages"] is not None or not np.all(row["loss_mask"] or 1),
        )
        for row in table.select([*_IDS, "response_messages"]).to_pylist()
    ]


def _look(
    logged: _Logged, row: TextRow, made: Encoded | str, encoder: Encoder, vocabulary: int
) -> list[tuple[Rule, str]]:
    """The rules that one row breaks, each with what was seen."""
    if logged.response_ids is None or logged.prompt_ids is None:
        return [(NOT_ENCODABLE, f"{made}: {UNUSABLE[made]}")] if isinstance(made, str) else []
    highest = max([*logged.prompt_ids, *logged.response_ids], default=0)
    if highest >= vocabulary:
        return [(OUTSIDE, f"the highest id is {highest}, the vocabulary has {vocabulary}")]
    found = _look_at_text(logged, row, encoder)
    if found or isinstance(made, str):
        return found
    if row.prompt is not None:
        found += _look_at_prompt(encoder.tokenizer, logged.prompt_ids, made.prompt_ids)
    if row.response is not None and not logged.partial:
        found += _look_at_response(logged.response_ids, made.response_ids, row, encoder)
    return found


def _look_at_text(logged: _Logged, row: TextRow, encoder: Encoder) -> list[tuple[Rule, str]]:
    if row.response is None or agree(
        encoder.tokenizer, logged.response_ids or [], row.response, logged.partial
    ):
        return []
    decoded = encoder.tokenizer.decode(logged.response_ids, clean_up_tokenization_spaces=False)
    at = _first(decoded, row.response)
    shown = (repr(text[at : at + SHOWN_CHARACTERS]) for text in (decoded, row.response))
    return [(TEXT_DIFFERS, "at character {}: the ids say {}, the text {}".format(at, *shown))]


def _look_at_prompt(tokenizer: Any, logged: list[int], made: list[int]) -> list[tuple[Rule, str]]:
    if logged == made:
        return []
    detail = first_difference(tokenizer, logged, made)
    bos = tokenizer.bos_token_id
    counts = [_leading(ids, bos) for ids in (logged, made)]
    if bos is not None and logged[counts[0] :] == made[counts[1] :]:
        if counts[0] > 1:
            return [(BOS_TWICE, detail)]
        if counts[0] < counts[1]:
            return [(BOS_MISSING, detail)]
    return [(PROMPT_DIFFERS, detail)]


def _look_at_response(
    logged: list[int], made: list[int], row: TextRow, encoder: Encoder
) -> list[tuple[Rule, str]]:
    ends = {encoder.end_of_text, encoder.end_of_turn}
    ended = logged[-1:] != [] and logged[-1] in ends
    found = []
    if row.finish_reason is not None and row.ended and not ended and ends != {None}:
        found.append((END_MISSING, f"finish reason {row.finish_reason!r}"))
    if row.finish_reason == "length" and ended:
        found.append((END_AFTER_CUT, first_difference(encoder.tokenizer, logged, made)))
    bare = [_without(ids, ends) for ids in (logged, made)]
    if bare[0] != bare[1]:
        found.append((RETOKENISED, first_difference(encoder.tokenizer, *bare)))
    return found


def _leading(ids: list[int], token: int | None) -> int:
    return next((i for i, value in enumerate(ids) if value != token), len(ids))


def _without(ids: list[int], ends: set[int | None]) -> list[int]:
    stop = len(ids)
    while stop and ids[stop - 1] in ends:
        stop -= 1
    return ids[:stop]


def first_difference(tokenizer: Any, logged: Sequence[int], made: Sequence[int]) -> str:
    """Where two lists of ids part, and the tokens from there on."""
    at = _first(logged, made)

    def shown(ids: Sequence[int]) -> str:
        part = list(ids[at : at + SHOWN_TOKENS])
        if not part:
            return "nothing more"
        tokens = " ".join(repr(token) for token in tokenizer.convert_ids_to_tokens(part))
        return f"{tokens} {part}"

    return f"at token {at}: the engine has {shown(logged)}, the text gives {shown(made)}"


def _first(one: Sequence[Any], other: Sequence[Any]) -> int:
    both = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in both if a != b), min(len(one), len(other)))
