"""Logged log-probs against the model's: their differences by quantile, for each way of sampling.

Rows are grouped by policy, version, kind and temperature; of each group all sampled rows are computed once,
and a few of them at other temperatures.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_tools.checking import Findings, Sample, Tally
from offline_rec.checking.rules import OTHER_POLICY, SAMPLER_DISAGREES, TEMPERATURE
from offline_rec.checking.temperature import Explanation, Setting, explain
from offline_rec.data.ragged import IntArray, Ragged, offsets_of
from offline_rec.data.rows import Rows, RowStore
from offline_rec.models.policy import Policy
from offline_rec.models.score import row_logprobs

SETTINGS = 8
"""Ways of sampling that are compared, those with the most sampled rows."""

EXPLAINED_TOKENS = 2048
"""Response tokens of a setting that are computed at every temperature tried."""

ROWS_AT_ONCE = 64
CACHE_BYTES = 64 << 20
QUANTILES = {"p01": 0.01, "p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
_FACTS = ("policy", "policy_version", "logprob_kind", "temperature")

Floats = NDArray[np.float32]
Progress = Callable[[int, int], None]


@dataclass
class _Compared:
    """Rows of one setting: differences of all tokens, and some rows with their token counts for more."""

    differences: list[Floats] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    kept: list[Rows] = field(default_factory=list)
    tokens: int = 0

    def keep(self, rows: Rows) -> None:
        """Keep rows up to a number of tokens, the beginning of a longer one."""
        lengths = np.minimum(rows.response_ids.lengths, EXPLAINED_TOKENS)
        before = self.tokens + np.cumsum(lengths) - lengths
        fits = np.flatnonzero(before < EXPLAINED_TOKENS)
        if len(fits):
            self.kept.append(_begun(rows.select(fits)))
            self.tokens += int(lengths[fits].sum())


def compare_logprobs(
    sample: Sample,
    policy: Policy,
    findings: Findings,
    *,
    samplers: set[str],
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Note settings whose log-probs the model does not give; a record of numbers for each setting.

    `samplers`: policies that are this very model by their cards.
    """
    places = _places(sample)
    largest = sorted(places, key=lambda setting: -len(places[setting]))[:SETTINGS]
    store = RowStore(sample.dataset, cache_bytes=CACHE_BYTES)
    total, done = sum(len(places[setting]) for setting in largest), 0
    records = []
    tallies: dict[str, Tally] = {}
    for setting in largest:
        compared = _compare(sample, places[setting], store, policy)
        done += len(places[setting])
        if progress is not None:
            progress(done, total)
        if not compared.names:
            continue
        found = explain(setting, partial(_gap, policy, compared.kept))
        records.append(_record(setting, compared, found))
        rule = SAMPLER_DISAGREES if found.rule is OTHER_POLICY and setting.policy in samplers else found.rule
        if rule is not None:
            shown = f"{found.temperature or setting.own:.2f}" if rule is TEMPERATURE else ""
            tally = tallies.setdefault(shown, Tally())
            tally.add(rule, sorted(compared.names), found.detail(setting))
    for shown, tally in tallies.items():
        findings.take(tally, of=len(sample), temperature=shown)
    return records


def _places(sample: Sample) -> dict[Setting, list[int]]:
    """Numbers of sampled rows with log-probs, by setting; greedy rows have none of sampling."""
    places: dict[Setting, list[int]] = {}
    number = 0
    for table in sample.chunks(_FACTS, size=4096):
        for values in zip(*(table.column(name).to_pylist() for name in _FACTS), strict=True):
            temperature = None if values[3] is None else round(values[3], 6)
            if temperature != 0:
                setting = Setting(values[0], values[1], values[2], temperature)
                places.setdefault(setting, []).append(number)
            number += 1
    return places


def _compare(sample: Sample, places: list[int], store: RowStore, policy: Policy) -> _Compared:
    compared = _Compared()
    for rows in _usable(sample, places, store, policy):
        differences = _differences(policy, rows)
        compared.differences.append(differences)
        compared.names += rows.response_id
        compared.keep(rows)
    return compared


def _usable(sample: Sample, places: list[int], store: RowStore, policy: Policy) -> Iterator[Rows]:
    """The rows that have log-probs and that the model can compute, a few at a time."""
    for first in range(0, len(places), ROWS_AT_ONCE):
        part = places[first : first + ROWS_AT_ONCE]
        at: IntArray = np.array([sample.rows[i] for i in part], np.int64)
        rows = store.take([sample.files[i] for i in part], at, strict=False)
        known = np.add.reduceat(np.append(_known(rows), 0), rows.response_ids.offsets[:-1])
        fine = (rows.response_ids.lengths > 0) & (known > 0) & (rows.prompt_ids.lengths > 0)
        fine &= ~policy.outside(rows) & ~policy.too_long(rows.lengths)
        if fine.any():
            yield rows.select(np.flatnonzero(fine))


def _known(rows: Rows) -> NDArray[np.bool_]:
    """Tokens that the policy produced and whose log-prob is known."""
    known: NDArray[np.bool_] = np.isfinite(rows.behavior.values) & (rows.mask.values == 1)
    return known


def _differences(policy: Policy, rows: Rows) -> Floats:
    """Recomputed minus logged log-prob of every known token."""
    differences: Floats = (row_logprobs(policy, rows).values - rows.behavior.values)[_known(rows)]
    return differences


def _gap(policy: Policy, kept: list[Rows], temperature: float) -> float:
    """Mean absolute difference over some rows at a temperature."""
    parts = [_differences(policy, _at(rows, temperature)) for rows in kept]
    return float(np.abs(np.concatenate(parts)).mean())


def _record(setting: Setting, compared: _Compared, found: Explanation) -> dict[str, Any]:
    differences = np.concatenate(compared.differences)
    quantiles = np.quantile(differences, list(QUANTILES.values())).tolist()
    return {
        **{"policy": setting.policy, "version": setting.version, "kind": setting.kind},
        **{"temperature": setting.temperature, "rows": len(compared.names), "tokens": len(differences)},
        **dict(zip(QUANTILES, quantiles, strict=True)),
        "mean_difference": float(np.abs(differences).mean()),
        "implied_temperature": found.temperature,
        "difference_there": found.gap,
    }


def _begun(rows: Rows) -> Rows:
    """The rows, their responses cut to as many tokens as are explained."""
    response = rows.response_ids
    place = np.arange(len(response.values)) - np.repeat(response.offsets[:-1], response.lengths)
    kept = place < EXPLAINED_TOKENS
    offsets = offsets_of(np.minimum(response.lengths, EXPLAINED_TOKENS))

    def cut(values: Ragged) -> Ragged:
        return Ragged(values.values[kept], offsets)

    return replace(rows, response_ids=cut(response), mask=cut(rows.mask), behavior=cut(rows.behavior))


def _at(rows: Rows, temperature: float) -> Rows:
    return replace(rows, temperature=np.full(len(rows), temperature, np.float32))
