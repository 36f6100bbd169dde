"""Gives judged rows their identity and lineage: hashes of prompts and groups, response ids, file and row."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from data_tools.collecting import ids
from data_tools.collecting.clusters import prompt_cluster
from data_tools.collecting.prompts import canonical_json, canonical_prompt
from data_tools.collecting.ragged import Bools
from data_tools.collecting.reasons import Notes, Refused
from data_tools.collecting.rules import Judged
from data_tools.logs.jsontext import dump
from data_tools.schema import ROLLOUTS


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a log's own keys are valid: its format, and its run where one is named, else the log itself."""

    format: str
    fingerprint: bytes
    source_file: str
    run: str | None = None

    def key(self, run: str | None) -> str:
        """The scope of a row that names `run`."""
        named = self.run or run
        return self.fingerprint.hex() if named is None else f"run:{named}"


@dataclass(slots=True)
class Identified:
    """Rows ready to be written, with what the ledger must know of each.

    `bases`: response ids as bytes, of the first occurrence. `given`: whether the log gave the id. `grouped`:
    whether the log gave the group.
    """

    table: pa.Table
    bases: list[bytes]
    contents: list[bytes]
    given: Bools
    grouped: Bools
    refused: dict[int, Refused] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)


def identify(
    judged: Judged,
    scope: Scope,
    *,
    contents: Sequence[bytes],
    source_rows: Sequence[int | None],
    extra: Sequence[dict[str, Any]],
) -> Identified:
    """Make the rows of the schema ROLLOUTS out of those that the rules kept."""
    refused = dict(judged.refused)
    texts = _extra_texts(extra, refused)
    hashes, clusters = _prompt_hashes(judged, refused)
    keep = [row for row in range(len(contents)) if row not in refused]
    columns, keys = _chosen(judged.rows, keep, len(contents)), _chosen(judged.keys, keep, len(contents))
    given, grouped = (_present(keys[name]) for name in ("response_id", "group_id"))
    run, own_ids, own_groups = (keys[name].to_pylist() for name in ("run", "response_id", "group_id"))
    scopes = list(map(scope.key, run))
    kept_contents = [contents[row] for row in keep]
    bases = _response_ids(scope, scopes, own_ids, kept_contents)
    kept_hashes = [hashes[row] for row in keep]
    columns |= {
        "response_id": pa.array([base.hex() for base in bases], pa.string()),
        "group_id": pa.array(_group_ids(scope, scopes, own_groups, kept_hashes), pa.string()),
        "prompt_hash": pa.array(kept_hashes, pa.string()),
        "prompt_cluster": pa.array([clusters[row] for row in keep], pa.string()),
        "source_file": pa.repeat(pa.scalar(scope.source_file), len(keep)),
        "source_row": pa.array([source_rows[row] for row in keep], pa.int64()),
        "extra": pa.array([texts[row] for row in keep], pa.string()),
    }
    table = pa.Table.from_arrays([columns[name].cast(kind) for name, kind in _FIELDS], schema=ROLLOUTS)
    return Identified(table, bases, kept_contents, given, grouped, refused, judged.notes)


def _chosen(columns: dict[str, pa.Array], keep: list[int], rows: int) -> dict[str, pa.Array]:
    if len(keep) == rows:
        return dict(columns)
    chosen = pa.array(keep, pa.int64())
    return {name: array.take(chosen) for name, array in columns.items()}


def _present(keys: pa.Array) -> Bools:
    return np.asarray(keys.is_valid().to_numpy(zero_copy_only=False), bool)


_FIELDS = [(field.name, field.type) for field in ROLLOUTS]


def _extra_texts(extra: Sequence[dict[str, Any]], refused: dict[int, Refused]) -> list[str | None]:
    texts: list[str | None] = []
    for row, rest in enumerate(extra):
        try:
            texts.append(dump(rest) if rest else None)
        except Refused as error:
            refused.setdefault(row, error)
            texts.append(None)
    return texts


def _prompt_hashes(judged: Judged, refused: dict[int, Refused]) -> tuple[list[str], list[str]]:
    """Hashes and clusters of the rows: of prompt and tools, or of the ids where there is no text.

    Siblings are looked at once.
    """
    prompts, tools = judged.rows["prompt"].to_pylist(), judged.rows["tools"].to_pylist()
    token_ids = judged.rows["prompt_ids"]
    known: dict[tuple[str | None, str | None], tuple[str, str]] = {}
    made: list[tuple[str, str]] = []
    for row, asked in enumerate(zip(prompts, tools, strict=True)):
        if asked[0] is None:
            ints = np.asarray(token_ids[row].as_py() or [], np.int32)
            made.append((ids.prompt_ids_hash(ints.tobytes()),) * 2)
            continue
        try:
            if asked not in known:
                known[asked] = _prompt_hash(*asked), prompt_cluster(asked[0])
        except Refused as error:
            refused.setdefault(row, error)
        made.append(known.get(asked, ("", "")))
    return [pair[0] for pair in made], [pair[1] for pair in made]


def _prompt_hash(prompt: str, tools: str | None) -> str:
    return ids.prompt_hash(canonical_prompt(prompt), None if tools is None else canonical_json(tools))


def _group_ids(scope: Scope, scopes: list[str], keys: list[str | None], hashes: list[str]) -> list[str]:
    known: dict[tuple[str, str], str] = {}
    made = []
    for where, key, prompt in zip(scopes, keys, hashes, strict=True):
        if key is None:
            made.append(prompt)
            continue
        if (where, key) not in known:
            known[where, key] = ids.group_id(scope.format, where, key)
        made.append(known[where, key])
    return made


def _response_ids(
    scope: Scope, scopes: list[str], given: list[str | None], contents: list[bytes]
) -> list[bytes]:
    drawn = ids.drawn_response_id(scope.fingerprint)
    return [
        drawn(content) if key is None else ids.given_response_id(scope.format, where, key)
        for where, key, content in zip(scopes, given, contents, strict=True)
    ]
