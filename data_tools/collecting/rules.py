"""The rules of truth, once for all formats: which log-probs, ids, masks and rewards can be trusted.

Works on whole columns. A missing value stays missing; whatever is left out or changed is flagged on its row
and counted; a row that cannot be used is refused with its reason. reasons.py lists the codes.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.collecting.columns import LOOSE
from data_tools.collecting.fastpath import ARROW, Typed
from data_tools.collecting.ragged import Bools, Ragged
from data_tools.collecting.reasons import Notes, Refused
from data_tools.schema import ROLLOUTS

FLOOR = -9999.0
"""Engines write this (or less) for "no log-prob for this token"."""

ROUNDING = 1e-3
"""Half-precision engines round a log-prob of 0 to a little above it; more than this is no rounding."""

_ABOVE_FLOOR = float(np.nextafter(FLOOR, 0))
_INT32_MAX = 2**31 - 1
_FINISH = {
    "eos": "stop",
    "eos_token": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "max_length": "length",
    "max_output_tokens": "length",
    "tool_call": "tool_calls",
    "tool_use": "tool_calls",
    "content_filter": "filtered",
    "cancelled": "abort",
    "aborted": "abort",
}
_KINDS = {"raw": "raw", "raw_logprobs": "raw", "processed": "processed", "processed_logprobs": "processed"}


@dataclass(slots=True)
class Judged:
    """Rows after the rules, refused ones included: columns of the schema ROLLOUTS without ids and lineage.

    `keys` holds the log's own response_id, group_id and run of each row. `refused` maps a row to its reason.
    """

    rows: dict[str, pa.Array]
    keys: dict[str, pa.Array]
    refused: dict[int, Refused]
    notes: Notes


@dataclass(slots=True)
class _Rows:
    """The columns while they are judged."""

    columns: dict[str, pa.Array]
    count: int
    flags: dict[str, Bools] = field(default_factory=dict)
    refused: dict[int, Refused] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)

    def column(self, name: str) -> pa.Array:
        """A loose column; nulls where the log lacks it."""
        array = self.columns.get(name)
        return pa.nulls(self.count, ARROW[LOOSE[name]]) if array is None else array

    def present(self, name: str) -> Bools:
        """Rows that have a value."""
        return _bools(pc.is_valid(self.column(name)))

    def ragged(self, name: str) -> Ragged:
        """A list column."""
        return Ragged.of(self.columns.get(name), self.count)

    def flag(self, name: str, rows: Bools) -> None:
        """Flag some rows."""
        if rows.any():
            self.flags[name] = self.flags.get(name, np.zeros(self.count, bool)) | rows

    def note(self, code: str, rows: Bools) -> None:
        """Count something about some rows that is not a flag."""
        if rows.any():
            self.notes.add(code, np.flatnonzero(rows).tolist())

    def refuse(self, reason: str, rows: Bools, detail: str = "") -> None:
        """Refuse some rows; the first reason stays."""
        for row in np.flatnonzero(rows).tolist():
            self.refused.setdefault(row, Refused(reason, detail))


def judge(typed: Typed) -> Judged:
    """Apply every rule to the typed rows of one log."""
    rows = _Rows(typed.columns, typed.rows, refused=dict(typed.refused), notes=typed.notes)
    for key in ("response_id", "group_id", "run", "trajectory_id", "policy"):
        _drop_empty_text(rows, key)
    prompt_ids = _prompt_ids(rows)
    response_ids = _response_ids(rows)
    mask = _mask(rows, prompt_ids, response_ids)
    logprobs = _logprobs(rows, response_ids, mask)
    _refuse_incomplete(rows, prompt_ids, response_ids)
    kinds = _logprob_kind(rows)
    finish = _finish_reason(rows)
    sums = _behavior_logprob(rows, response_ids, logprobs, mask, kinds)
    columns = {name: rows.column(name) for name in ROLLOUTS.names if name in LOOSE}
    columns |= {
        "prompt_ids": prompt_ids.arrow(pa.int32()),
        "response_ids": response_ids.arrow(pa.int32()),
        "behavior_logprobs": logprobs.arrow(pa.float32()),
        "loss_mask": mask.arrow(pa.uint8()),
        "logprob_kind": kinds,
        "finish_reason": finish,
        "n_prompt_tokens": _counts(prompt_ids),
        "n_tokens": _counts(response_ids),
        "behavior_logprob": sums,
        "flags": _flag_lists(rows),
    }
    keys = {name: rows.column(name) for name in ("response_id", "group_id", "run")}
    return Judged(columns, keys, rows.refused, rows.notes)


def _drop_empty_text(rows: _Rows, name: str) -> None:
    """An empty key is no key: it must not join all rows that lack one."""
    if name in rows.columns:
        array = rows.columns[name]
        rows.columns[name] = pc.if_else(pc.equal(array, ""), pa.scalar(None, array.type), array)


def _prompt_ids(rows: _Rows) -> Ragged:
    ids = rows.ragged("prompt_ids")
    bad = ids.any(_no_id(ids))
    rows.flag("bad_prompt_ids", bad)
    ids = ids.only(~bad & ~_client_made(rows) & (ids.lengths > 0))
    if len(ids.items):
        items = np.append(
            ids.items, [-1, -2]
        )  # so that an empty row at the end still has two items to compare
        twice = (ids.lengths > 1) & (items[ids.bounds[:-1]] == items[ids.bounds[:-1] + 1])
        rows.flag("repeated_first_token", twice)
    return ids


def _response_ids(rows: _Rows) -> Ragged:
    ids = rows.ragged("response_ids")
    bad = ids.any(_no_id(ids))
    client = _client_made(rows)
    rows.flag("bad_ids", bad)
    rows.flag("retokenised", client & ids.present)
    no_text = ~rows.present("response") & ~rows.present("response_messages")
    rows.refuse("bad_ids", bad & no_text, "an item is no integer from 0 to 2147483647")
    return ids.only(~bad & ~client)


def _no_id(ids: Ragged) -> Bools:
    return ids.outside(0, _INT32_MAX)


def _client_made(rows: _Rows) -> Bools:
    source = rows.columns.get("ids_source")
    if source is None:
        return np.zeros(rows.count, bool)
    return ~_bools(pc.fill_null(pc.is_in(pc.utf8_lower(source), pa.array(["engine", None])), True))


def _logprobs(rows: _Rows, ids: Ragged, mask: Ragged) -> Ragged:
    """One value per response id, null where the engine gave none; nothing is padded or paired by guess."""
    given = rows.ragged("behavior_logprobs")
    dropped = rows.flags.get("retokenised", np.zeros(rows.count, bool)) | _client_made(rows)
    dropped = dropped | rows.flags.get("bad_ids", np.zeros(rows.count, bool))
    given = given.only(~dropped & ((given.lengths > 0) | (ids.present & (ids.lengths == 0))))
    both = given.present & ids.present
    surplus = both & (given.lengths > ids.lengths)
    cut = surplus & _tail_is_surplus(rows, given, ids, surplus)
    rows.flag("logprob_tail_cut", cut)
    wrong = both & (given.lengths != ids.lengths) & ~cut
    rows.flag("logprob_length", wrong)
    last = np.where(cut, ids.lengths, given.lengths)
    given = given.only(~wrong).cut(np.zeros(rows.count, np.int64), np.where(wrong, 0, last))
    rows.flag("logprobs_without_ids", given.present & ~ids.present)
    return _values_of_logprobs(rows, given, mask)


def _values_of_logprobs(rows: _Rows, given: Ragged, mask: Ragged) -> Ragged:
    values = given.items
    fine = ~given.outside(_ABOVE_FLOOR, 0.0)
    if fine.all():
        return given
    with np.errstate(invalid="ignore"):
        positive = ~given.absent & (values > ROUNDING)
        rounded = ~given.absent & (values > 0) & (values <= ROUNDING)
    missing = ~fine & ~rounded
    values = values.copy()
    rows.flag("missing_logprobs", given.any(missing & ~positive & _items_of_mask(given, mask)))
    rows.flag("positive_logprobs", given.any(positive))
    rows.note("logprob_rounded", given.any(rounded))
    values[rounded] = 0.0
    values[missing] = 0.0  # under a null
    return Ragged(values, missing, given.bounds, given.present)


def _tail_is_surplus(rows: _Rows, given: Ragged, ids: Ragged, asked: Bools) -> Bools:
    """Rows whose first token texts make up the response, so that the surplus stands behind its end."""
    found = np.zeros(rows.count, bool)
    if "logprob_tokens" not in rows.columns:
        return found
    for row in np.flatnonzero(asked).tolist():
        tokens = rows.columns["logprob_tokens"][row].as_py()
        text = rows.column("response")[row].as_py()
        if tokens is not None and text is not None and len(tokens) == given.lengths[row]:
            kept = [token or "" for token in tokens[: int(ids.lengths[row])]]
            found[row] = "".join(kept) == text
    return found


def _mask(rows: _Rows, prompt_ids: Ragged, ids: Ragged) -> Ragged:
    """A mask that fits the response ids; one over prompt and response that is 0 on the prompt is cut."""
    mask = rows.ragged("loss_mask")
    if not mask.present.any():
        return mask
    item_ok = ~mask.absent & ((mask.items == 0) | (mask.items == 1))
    ones = mask.any(item_ok) & ~mask.any(~item_ok | (mask.items == 0))
    place = np.arange(len(mask.items)) - np.repeat(mask.bounds[:-1], mask.lengths)
    on_prompt = mask.any((place < np.repeat(prompt_ids.lengths, mask.lengths)) & (mask.items != 0))
    whole = ids.present & prompt_ids.present & (mask.lengths == prompt_ids.lengths + ids.lengths) & ~on_prompt
    whole &= mask.lengths != ids.lengths
    mask = mask.cut(np.where(whole, prompt_ids.lengths, 0), mask.lengths)
    alone = mask.present & ~ids.present
    rows.flag("mask_without_ids", alone & ones)
    item_ok = ~mask.absent & ((mask.items == 0) | (mask.items == 1))
    bad = mask.present & (
        mask.any(~item_ok) | (ids.present & (mask.lengths != ids.lengths)) | (alone & ~ones)
    )
    rows.refuse("bad_mask", bad, "not one 0 or 1 for each response id")
    return mask.only(ids.present & ~bad)


def _refuse_incomplete(rows: _Rows, prompt_ids: Ragged, ids: Ragged) -> None:
    text = _bools(pc.fill_null(pc.not_equal(rows.column("prompt"), ""), False))
    rows.refuse("no_prompt", ~text & ~prompt_ids.present)
    rows.refuse("no_response", ~rows.present("response") & ~rows.present("response_messages") & ~ids.present)


def _logprob_kind(rows: _Rows) -> pa.Array:
    return _renamed(rows.column("logprob_kind"), _KINDS, other="unknown", missing="unknown")


def _finish_reason(rows: _Rows) -> pa.Array:
    reason = _renamed(rows.column("finish_reason"), _FINISH)
    cut = _bools(pc.fill_null(rows.column("truncated"), False))
    reason = pc.if_else(pa.array(cut & _bools(pc.is_null(reason))), "length", reason)
    rows.flag("truncated", cut | _bools(pc.fill_null(pc.equal(reason, "length"), False)))
    return reason


def _renamed(
    labels: pa.Array, names: dict[str, str], other: str | None = None, missing: str | None = None
) -> pa.Array:
    """Labels under their usual names; few distinct ones, so they are renamed once each."""
    encoded = labels.dictionary_encode()
    usual = [names.get(label.lower(), other or label) for label in encoded.dictionary.to_pylist()]
    renamed = pc.take(pa.array(usual, pa.string()), encoded.indices)
    return renamed if missing is None else pc.fill_null(renamed, missing)


def _behavior_logprob(rows: _Rows, ids: Ragged, logprobs: Ragged, mask: Ragged, kinds: pa.Array) -> pa.Array:
    """Sum over the mask where it is one of sampling: every value is there, of the right distribution."""
    temperature = pc.fill_null(rows.column("temperature"), 1.0).to_numpy(zero_copy_only=False)
    greedy = temperature == 0
    raw = (
        ~_bools(pc.equal(kinds, "processed")) & (np.abs(temperature - 1) > 1e-6) & ~greedy & logprobs.present
    )
    rows.flag("greedy", greedy)
    rows.flag("raw_at_temperature", raw)
    counted = _items_of_mask(logprobs, mask)
    usable = logprobs.present & ids.present & ~logprobs.any(logprobs.absent & counted) & ~greedy & ~raw
    # float32 is what is stored, so the sum of the stored values is what anyone else will find
    values = logprobs.items.astype(np.float32).astype(np.float64)
    left_out = ~counted | logprobs.absent
    if left_out.any():
        values[left_out] = 0.0
    return pa.array(logprobs.sum(values), mask=~usable)


def _items_of_mask(logprobs: Ragged, mask: Ragged) -> Bools:
    """Which log-probs the mask counts: all where there is no mask."""
    counted = np.ones(len(logprobs.items), bool)
    if not mask.present.any():
        return counted
    fits = mask.present & (mask.lengths == logprobs.lengths)
    counted[np.repeat(fits, logprobs.lengths)] = mask.items[np.repeat(fits, mask.lengths)] == 1
    return counted


def _counts(ids: Ragged) -> pa.Array:
    return pa.array(ids.lengths.astype(np.int32), mask=~ids.present)


def _flag_lists(rows: _Rows) -> pa.Array:
    """Own flags of the log first, then those of the rules."""
    own = rows.column("flags")
    lists = [[flag for flag in flags or () if flag is not None] for flags in own.to_pylist()]
    for name, flagged in sorted(rows.flags.items()):
        for row in np.flatnonzero(flagged).tolist():
            if name not in lists[row]:
                lists[row].append(name)
    for row, flags in enumerate(lists):
        for flag in flags if row not in rows.refused else ():
            rows.notes.add(flag, [row])
    return pa.array(lists, pa.list_(pa.string()))


def _bools(array: pa.Array) -> Bools:
    values: npt.NDArray[np.bool_] = np.asarray(array.to_numpy(zero_copy_only=False), bool)
    return values
