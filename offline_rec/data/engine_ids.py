"""May logged token ids be used as they are? Only if they mean the same text to the model's tokenizer.

A policy's card says which tokenizer it sampled with. Where there is no card, a sample of its rows is
decoded and compared with their text: a wrong tokenizer gives ids outside the vocabulary, or other text,
almost at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data_tools.errors import DataError
from data_tools.store.sql_errors import sql_errors
from offline_rec.data.blocks import Blocks, open_parquet
from offline_rec.data.fingerprint import same_vocabulary
from offline_rec.data.rows import IDS

if TYPE_CHECKING:
    import duckdb

    from data_tools.dataset import Dataset

SAMPLES, SAMPLED_GROUPS = 64, 16
"""Rows that are decoded, and groups that they come from: each may have to be read from another place."""

LONGEST_STOP = 32
RETOKENISE = "or pass --retokenise to make ids from the text (logged log-probs are then absent)"


def check_engine_ids(
    ds: "Dataset",
    tokenizer: Any,
    key: str,
    *,
    where: str | None = None,
    seed: int = 0,
    con: "duckdb.DuckDBPyConnection | None" = None,
) -> list[str]:
    """Raise DataError unless the engine ids of the rows `where` belong to `tokenizer` of fingerprint `key`.

    Returns a note for each policy whose tokenizer is unknown and whose sampled rows all agree, or whose
    chat template is another one. `con`: a connection of `ds`, if there is one already.
    """
    condition = f"n_tokens IS NOT NULL AND ({where or 'true'})"
    query = f"SELECT policy, count(*) AS n FROM rollouts WHERE {condition} GROUP BY policy ORDER BY policy"
    with sql_errors():
        logged = ds.sql(query) if con is None else con.sql(query).to_arrow_table()
    cards = ds.policies()
    notes = []
    for policy, count in zip(*(column.to_pylist() for column in logged.columns), strict=True):
        card = cards.get(policy)
        known = None if card is None else card.tokenizer
        if known == key:
            continue
        if known is not None and same_vocabulary(known, key):
            notes.append(f"{_named(policy)} used another chat template; its ids are used as logged")
            continue
        if known is not None:
            raise DataError(
                f"{count} rows of {_named(policy)} hold ids of another tokenizer "
                f"({known[:8]}..., the model has {key[:8]}...)",
                f"use a model with the tokenizer that logged them, {RETOKENISE}",
            )
        notes.append(_check_sample(ds, tokenizer, policy, condition, seed))
    return notes


@dataclass(frozen=True)
class _Sample:
    """Sampled rows of one policy: their ids, and the text they should decode to."""

    names: list[str]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    texts: list[str | None]
    partial: list[bool]


def _check_sample(ds: "Dataset", tokenizer: Any, policy: str | None, condition: str, seed: int) -> str:
    sample = _draw(ds, policy, condition, seed)
    outside = [
        name
        for name, *ids in zip(sample.names, sample.prompt_ids, sample.response_ids, strict=True)
        if max(map(max, filter(None, ids)), default=0) >= len(tokenizer)
    ]
    differ = [
        name
        for name, ids, text, partial in zip(
            sample.names, sample.response_ids, sample.texts, sample.partial, strict=True
        )
        if name not in outside and text is not None and not agree(tokenizer, ids, text, partial)
    ]
    checked = len(sample.names)
    if outside or differ:
        named = ", ".join([*outside, *differ][:3])
        raise DataError(
            f"{_named(policy)} names no tokenizer, and its ids are not those of the model's: of {checked} "
            f"sampled rows {len(outside)} have ids outside the vocabulary and "
            f"{len(differ)} decode to another text ({named})",
            f"use a model with the tokenizer that logged them, {RETOKENISE}",
        )
    return (
        f"{_named(policy)} names no tokenizer; its ids are used: {checked} sampled rows decode to their text"
    )


def _draw(ds: "Dataset", policy: str | None, condition: str, seed: int) -> _Sample:
    """A sample that depends on the rows and the seed alone, not on their order in the dataset."""
    draw = f"md5(response_id || '{int(seed)}')"
    table = ds.sql(
        f"""WITH matching AS (FROM rollouts WHERE policy IS NOT DISTINCT FROM $policy AND {condition}),
        groups AS (SELECT group_id FROM matching GROUP BY group_id
            ORDER BY md5(group_id || '{int(seed)}'), group_id LIMIT {SAMPLED_GROUPS})
        SELECT response_id, file, file_row, response, response_messages IS NOT NULL AS partial
        FROM matching SEMI JOIN groups USING (group_id)
        ORDER BY row_number() OVER (PARTITION BY group_id ORDER BY {draw}), {draw} LIMIT {SAMPLES}""",
        {"policy": policy},
    )
    found = {name: table.column(name).to_pylist() for name in table.column_names}
    files = sorted(set(found["file"]))
    blocks = Blocks(lambda name: open_parquet(ds.rollout_path(name)), IDS, cache_bytes=0)
    codes = np.array([files.index(file) for file in found["file"]], np.int64)
    ids = blocks.gather(files, codes, np.array(found["file_row"], np.int64))
    prompt, response, mask = (ids[name].rows for name in IDS)
    return _Sample(
        found["response_id"],
        [prompt[i].tolist() for i in range(len(prompt))],
        [response[i].tolist() for i in range(len(response))],
        found["response"],
        [messages or not mask[i].all() for i, messages in enumerate(found["partial"])],
    )


def agree(tokenizer: Any, ids: Sequence[int], text: str, partial: bool) -> bool:
    """Whether ids decode to the text, up to special tokens, outer space and a character cut at the end.

    A `partial` text is one part of what was sampled: the engine parsed reasoning or tool calls out of it,
    or the ids hold several turns. A short tail may be missing from any text: engines cut off the stop
    string.
    """
    wanted = _bare(tokenizer, text)
    decoded = _bare(tokenizer, tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    if partial:
        return wanted in decoded
    tail = decoded[len(wanted) :]
    return decoded.startswith(wanted) and (not tail or 0 < len(tail) <= LONGEST_STOP * bool(wanted))


def _bare(tokenizer: Any, text: str) -> str:
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return text.strip().rstrip("\ufffd")


def _named(policy: str | None) -> str:
    return "rows without a policy" if policy is None else f"policy {policy!r}"
