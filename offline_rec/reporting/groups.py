"""Groups to look through: a seeded choice of different kinds, with what is known about their responses."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_tools.errors import DataError
from data_tools.shaping import Shaping, Split, compile
from data_tools.shaping.expressions import parse_expression
from data_tools.store.views import literal
from offline_rec.data.rows import Rows, RowStore
from offline_rec.reporting import tokens as tokens_
from offline_rec.reporting.blocks import Fact, Group, Groups, Response, Token
from offline_rec.reporting.plain_text import name, number, plural, shortened, signed

if TYPE_CHECKING:
    import duckdb

    from data_tools.store.dataset import StoredDataset

Row = dict[str, Any]

RESPONSES = 8
"""Responses of a group that are shown at most: the best and the worst."""

PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 2000, 1500
PAGE_TOKENS, MOST_TOKENS, FEWEST_TOKENS = 20_000, 400, 48
"""Tokens on a page, and of one response at most and, if there are many, at least."""

KINDS = {
    "mixed": "middling rewards",
    "hard": "low rewards",
    "easy": "high rewards",
    "equal": "rewards all equal",
    "single": "one response",
    "unjudged": "no reward",
}
"""Kinds of groups, in the order in which they are chosen."""

CHOICE = """WITH span AS (SELECT approx_quantile(reward, 0.05) AS low, approx_quantile(reward, 0.95) AS high
    FROM rollouts),
kinds AS (
    SELECT group_id, n, n_rewarded, reward_mean,
        CASE WHEN n_rewarded = 0 THEN 'unjudged' WHEN n = 1 THEN 'single' WHEN zero_variance THEN 'equal'
            WHEN reward_mean < low + (high - low) / 3 THEN 'hard'
            WHEN reward_mean > high - (high - low) / 3 THEN 'easy'
            ELSE 'mixed' END AS kind
    FROM groups, span WHERE {condition}),
ranked AS (
    SELECT *, row_number() OVER (PARTITION BY kind ORDER BY md5($seed || group_id), group_id) AS place
    FROM kinds QUALIFY place <= $count)
SELECT group_id, kind FROM ranked ORDER BY place, list_position($kinds, kind) LIMIT $count"""

COLUMNS = """response_id, group_id, prompt, response, response_messages, reward, policy, policy_version,
    finish_reason, n_tokens, behavior_logprob, file, file_row, trajectory_id, turn"""


@dataclass(frozen=True)
class Shaped:
    """Advantage and weight of a row; a row that shaping leaves out has none."""

    advantage: float
    weight: float


@dataclass(frozen=True)
class TokenView:
    """What tokens are coloured by: the scores under `score` against those under `start`, or against logged
    log-probs; without scores the log-probs themselves. `models` are folders whose tokenizer may decode them.
    """

    score: str | None = None
    start: str | None = None
    models: Sequence[str | Path] = ()


def choose(
    con: "duckdb.DuckDBPyConnection", *, count: int, seed: int, condition: str = "true"
) -> dict[str, str]:
    """At most `count` groups of all kinds by turns, with their kinds; the same for the same seed."""
    values = {"seed": str(seed), "count": count, "kinds": list(KINDS)}
    return dict(con.execute(CHOICE.format(condition=condition), values).fetchall())


def in_list(column: str, ids: Sequence[str]) -> str:
    """The condition that a column is one of some texts."""
    return f"{column} IN ({', '.join(map(literal, ids))})" if ids else "false"


def rows_where(con: "duckdb.DuckDBPyConnection", condition: str) -> list[Row]:
    """The rows where a condition holds, by group, best reward first."""
    result = con.sql(
        f"SELECT {COLUMNS} FROM rollouts WHERE {condition} "
        "ORDER BY group_id, reward DESC NULLS LAST, trajectory_id, turn, response_id"
    )
    return [dict(zip(result.columns, row, strict=True)) for row in result.fetchall()]


def shaped(
    con: "duckdb.DuckDBPyConnection", shaping: Shaping, groups: Sequence[str], *, split: Split = "all"
) -> dict[str, Shaped]:
    """Advantage and weight of the rows of some groups.

    The whole population is shaped unless nothing in the shaping looks beyond a group.
    """
    if _local(shaping):
        where = in_list("group_id", groups)
        where = where if shaping.where is None else f"({shaping.where}) AND {where}"
        shaping = shaping.model_copy(update={"where": where})
    statement = compile(shaping, split=split)
    query = (
        f"SELECT response_id, advantage, weight FROM ({statement}) "
        f"SEMI JOIN (SELECT response_id FROM rollouts WHERE {in_list('group_id', groups)}) "
        "USING (response_id)"
    )
    return {row: Shaped(advantage, weight) for row, advantage, weight in con.sql(query).fetchall()}


def _local(shaping: Shaping) -> bool:
    """Whether a row's advantage and weight depend on its group alone."""
    plain = (
        shaping.group_by.strip() == "group_id"
        and shaping.baseline.strip() in ("mean", "loo", "none", "logavgexp")
        and shaping.scale.strip() in ("none", "std")
        and shaping.drop.strip() in ("none", "zero-variance", "balance")
    )
    texts = {name: getattr(shaping, name) for name in ("where", "advantage", "weight", "keep")}
    return plain and not any(
        parse_expression(field, text).windowed for field, text in texts.items() if text is not None
    )


def browser(
    ds: "StoredDataset",
    rows: Sequence[Row],
    kinds: Mapping[str, str],
    shaping: Mapping[str, Shaped],
    view: TokenView,
) -> Groups:
    """The groups of some rows, in the order of `kinds`, with their tokens."""
    listed = {group: list(members) for group, members in groupby(rows, lambda row: str(row["group_id"]))}
    kept = {group: _ends(members) for group, members in listed.items()}
    shown = [row for members in kept.values() for row in members]
    coloured, key = colour(ds, shown, view)
    # The kinds side by side: what a reader compares stands together.
    order = sorted((group for group in kinds if group in listed), key=lambda g: list(KINDS).index(kinds[g]))
    groups = []
    for number_, group in enumerate(order):
        members = listed[group]
        responses = [response(row, coloured, shaping.get(row["response_id"])) for row in kept[group]]
        prompt, _ = shortened(prompt_text(members[0]["prompt"]), PROMPT_CHARACTERS)
        groups.append(
            Group(
                title_of(members[0]["prompt"]),
                f"{KINDS[kinds[group]]} · {_summary(members)}",
                prompt,
                toned(responses, kept[group]),
                len(members) - len(kept[group]),
                open=number_ < 2,
            )
        )
    return Groups(groups, key, both=key == tokens_.RATIO_KEY)


def _ends(members: list[Row]) -> list[Row]:
    half = RESPONSES // 2
    return members if len(members) <= RESPONSES else [*members[:half], *members[-half:]]


def _summary(members: Sequence[Row]) -> str:
    rewards = [row["reward"] for row in members if row["reward"] is not None]
    mean = f", mean reward {number(sum(rewards) / len(rewards))}" if rewards else ""
    return f"{plural(len(members), 'response')}{mean}"


def toned(
    responses: Sequence[Response], rows: Sequence[Row], *, middle: float | None = None
) -> list[Response]:
    """Responses marked as better or worse than the mean reward of those shown, or than `middle`."""
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    if middle is None:
        middle = sum(rewards) / len(rewards) if rewards else 0.0
    marked = []
    for one, row in zip(responses, rows, strict=True):
        reward = row["reward"]
        even = reward is None or math.isclose(reward, middle, abs_tol=1e-12)
        marked.append(replace(one, tone="" if even else "high" if reward > middle else "low"))
    return marked


def response(
    row: Row, coloured: Mapping[str, "Coloured"], shaping: Shaped | None, *, prompted: bool = False
) -> Response:
    """A response with what is known about it; `prompted` if its prompt is not shown elsewhere."""
    text, left_out = shortened(row["response"] or "", RESPONSE_CHARACTERS)
    tokens = coloured.get(row["response_id"], NOTHING)
    prompt = shortened(prompt_text(row["prompt"]), PROMPT_CHARACTERS // 4)[0] if prompted else ""
    return Response(
        list(_facts(row, tokens, shaping)),
        text or "(empty)",
        left_out,
        tokens.tokens,
        tokens.left_out,
        words=tokens.words,
        prompt=prompt,
    )


def _facts(row: Row, tokens: "Coloured", shaping: Shaped | None) -> Iterator[Fact]:
    yield Fact("reward", number(row["reward"]))
    if shaping is not None:
        yield Fact("advantage", signed(shaping.advantage))
        yield Fact("weight", number(shaping.weight))
    if tokens.change is not None:
        yield Fact("log-ratio", signed(tokens.change))
    if row["policy"] is not None or row["policy_version"] is not None:
        version = "" if row["policy_version"] is None else f" v{row['policy_version']}"
        yield Fact("by", name(row["policy"], 32) + version)
    if row["turn"] is not None:
        yield Fact("turn", number(row["turn"]))
    if row["finish_reason"] not in (None, "stop"):
        yield Fact("end", name(row["finish_reason"], 24))


def prompt_text(prompt: str | None) -> str:
    """A prompt to read: chat messages under their roles, a plain string as it is."""
    text = prompt or ""
    if not text.startswith("["):
        return text
    try:
        messages = json.loads(text)
        return "\n\n".join(f"{message['role']}: {_content(message.get('content'))}" for message in messages)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return text


def title_of(prompt: str | None) -> str:
    """The beginning of what the user said last, or of the prompt."""
    text = prompt_text(prompt)
    said = text.rsplit("\n\nuser: ", 1)[-1].removeprefix("user: ") if text != prompt else text
    return name(" ".join(said[:200].split()) or "(no prompt)", 80)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else json.dumps(part)
            for part in content
        )
    return "" if content is None else json.dumps(content)


@dataclass(frozen=True)
class Coloured:
    """Tokens of a response; `change` is the sum of their log-ratios, `words` whether they have texts."""

    tokens: Sequence[Token] = ()
    left_out: int = 0
    words: bool = True
    change: float | None = None


NOTHING = Coloured()


def colour(ds: "StoredDataset", rows: Sequence[Row], view: TokenView) -> tuple[dict[str, Coloured], str]:
    """The tokens of each row by its id, and what their colours mean; only the rows' own blocks are read."""
    read = _read(ds, rows, view)
    if read is None:
        return {}, ""
    limit = min(MOST_TOKENS, max(FEWEST_TOKENS, PAGE_TOKENS // max(len(rows), 1)))
    decoder = tokens_.decoder_of(ds, view.models)
    found = {row["response_id"]: _coloured(read, i, row, decoder, limit) for i, row in enumerate(rows)}
    with_ratio = read.anchor is not None and any(one.change is not None for one in found.values())
    any_tokens = any(one.tokens for one in found.values())
    key = tokens_.RATIO_KEY if with_ratio else tokens_.SURPRISE_KEY
    return found, key if any_tokens else ""


def _read(ds: "StoredDataset", rows: Sequence[Row], view: TokenView) -> Rows | None:
    made = ds.storage.entries("tokens")
    tokens_key = made[0] if len(made) == 1 else None
    retokenised = view.score is not None and view.score.endswith("-retokenised")
    store = RowStore(
        ds,
        tokens_key=tokens_key,
        anchor_key=view.score,
        reference_key=view.start,
        retokenise=retokenised,
        cache_bytes=0,
    )
    try:
        return store.take(
            [row["file"] for row in rows], np.array([row["file_row"] for row in rows], np.int64), strict=False
        )
    except DataError:  # log-probs of other ids than these: the texts are shown without tokens
        return None


def _coloured(read: Rows, i: int, row: Row, decoder: tokens_.Decoder | None, limit: int) -> Coloured:
    ids, logged, mask = read.response_ids[i].tolist(), read.behavior[i], read.mask[i] != 0
    if not ids:
        return NOTHING
    before = logged if read.reference is None else read.reference[i]
    ratio = None if read.anchor is None else read.anchor[i].astype(np.float64) - before
    if ratio is not None and not np.isfinite(ratio).any():
        ratio = None
    if ratio is None and not np.isfinite(logged).any():
        return NOTHING
    words = None if decoder is None else tokens_.texts(decoder, ids, row["response"] or "")
    shown = range(min(len(ids), limit))
    named = words if words is not None else [f"token {one}" for one in ids]
    tokens = [
        Token(named[j], "not the policy's own", "")
        if not mask[j]
        else tokens_.surprise_token(named[j], float(logged[j]))
        if ratio is None
        else tokens_.ratio_token(named[j], float(ratio[j]), float(logged[j]))
        for j in shown
    ]
    whole = ratio is not None and bool(np.isfinite(ratio[mask]).all())
    change = float(ratio[mask].sum()) if whole and ratio is not None else None
    return Coloured(tokens, len(ids) - len(tokens), words is not None, change)
