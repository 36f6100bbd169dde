"""One chunk of a log from loose columns to rows of a dataset: types, rules, identity, reward."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from data_tools.collecting.columns import LOOSE
from data_tools.collecting.fastpath import ARROW, Typed, plain, typed
from data_tools.collecting.identity import Identified, Scope, identify
from data_tools.collecting.order_groups import groups_by_order
from data_tools.collecting.reasons import Notes, Refused, Reject
from data_tools.collecting.rules import judge
from data_tools.logs.jsontext import dump
from data_tools.readers.base import Chunk

if TYPE_CHECKING:
    from data_tools.collecting.intake import Intake
    from data_tools.rewards.verdicts import RewardRule


_OF_LOGGED_REWARDS = (
    "several_rewards", "reward_at_token", "reward_of_score", "several_scores", "scores_differ",
)  # fmt: skip
"""Notes that say nothing where a rule of the user's gives the reward."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user says about all rows of a collect."""

    policy: str | None = None
    policy_version: int | None = None
    reward: "RewardRule | None" = None
    group_size: int | None = None
    """How many consecutive responses are a group where the log names none; None: equal prompts are one."""

    logprob_kind: str | None = None
    """What the logged log-probs are, whatever the log says: raw or processed."""

    temperature: float | None = None
    """What the responses were sampled at, whatever the log says."""

    intake: "Intake | None" = None
    """What must not be stored."""

    tolerant: bool = False
    """Read every value by itself, as if no column were clean; to test the two ways against each other."""


@dataclass(slots=True)
class Processed:
    """A chunk's rows and rejects: together they are all rows of the chunk and all it could not read."""

    rows: Identified
    rejects: list[Reject]
    notes: Notes = field(default_factory=Notes)
    input_rows: int = 0
    """Records of the log behind the chunk."""


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Look for garbage less often: parsed records hold no cycles and die with their chunk.

    One chunk of nested records is several 100 000 objects; searching those would double the time.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(2_000_000, *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)


def process(chunk: Chunk, scope: Scope, settings: Settings) -> Processed:
    """Turn a chunk into rows of the schema ROLLOUTS and rejects."""
    loose = typed(chunk, tolerant=settings.tolerant)
    _fill(loose, settings)
    if settings.group_size is not None:
        logged = loose.columns.get("group_id")
        keys = groups_by_order(chunk, settings.group_size, logged, scope.fingerprint.hex())
        loose.columns["group_id"] = keys
    if settings.reward is not None:
        _set_reward_aside(loose, chunk, settings.reward)
    if settings.intake is not None:
        settings.intake.clean(loose, chunk)
    rows = identify(
        judge(loose), scope, contents=chunk.content, source_rows=chunk.source_row, extra=loose.extra
    )
    unread, rejects = chunk.rejects, [_reject(chunk, row, rows.refused[row]) for row in sorted(rows.refused)]
    if settings.intake is not None:
        unread = [settings.intake.reject(reject) for reject in unread]
        rejects = [settings.intake.reject(reject, counted=True) for reject in rejects]
    notes = _located(rows.notes, chunk.source_row)
    for code, count in chunk.notes.items():
        if code not in _OF_LOGGED_REWARDS or settings.reward is None:
            notes.add(code, (), count, chunk.details.get(code, ""))
    if settings.reward is not None and rows.table.num_rows:
        notes.merge(_rewarded(rows, settings.reward))
    return Processed(rows, unread + rejects, notes, chunk.input_rows)


def _fill(loose: Typed, settings: Settings) -> None:
    """Name the policy and its version where the log does not, and how it was sampled where the user knows."""
    for column, value in (("policy", settings.policy), ("policy_version", settings.policy_version)):
        if value is not None:
            logged = loose.columns.get(column, pa.nulls(loose.rows, ARROW[LOOSE[column]]))
            loose.columns[column] = logged.fill_null(value)
    for column, known in (("logprob_kind", settings.logprob_kind), ("temperature", settings.temperature)):
        if known is not None:
            loose.columns[column] = pa.repeat(pa.scalar(known, ARROW[LOOSE[column]]), loose.rows)


def _set_reward_aside(loose: Typed, chunk: Chunk, rule: "RewardRule") -> None:
    """Keep the log's own reward in `extra`, where a rule finds it by its name; it refuses no row any more."""
    name = chunk.names.get("reward", "reward")
    for row, value in enumerate(plain(chunk.columns.get("reward", ()))):
        if value is not None:
            loose.extra[row].setdefault(name, value)
    loose.refused = {row: why for row, why in loose.refused.items() if why.reason != "bad_reward"}
    if not rule.reads_reward:
        loose.notes.drop("reward_from_text")
        loose.notes.drop("reward_unreadable")


def _located(notes: Notes, source_rows: Sequence[int | None]) -> Notes:
    """Notes by rows of a chunk or table as notes by rows of the log."""
    made = Notes()
    for code, count in notes.counts.items():
        rows = [source_rows[row] for row in notes.rows[code]]
        made.add(code, rows, count, notes.details.get(code, ""))
    return made


def _reject(chunk: Chunk, row: int, why: Refused) -> Reject:
    values = {name: _shown(column, row) for name, column in chunk.columns.items()}
    try:
        raw = dump({name: value for name, value in values.items() if value not in (None, {})})
    except Refused:
        raw = ""
    return why.at(chunk.source_row[row], raw)


def _shown(column: Sequence[object] | pa.Array, row: int) -> object:
    return plain(column[row : row + 1])[0]


def _rewarded(rows: Identified, rule: "RewardRule") -> Notes:
    verdicts = rule(rows.table)
    place = rows.table.schema.get_field_index("reward")
    rows.table = rows.table.set_column(place, rows.table.schema.field("reward"), verdicts.rewards)
    return _located(verdicts.notes, rows.table.column("source_row").to_pylist())
