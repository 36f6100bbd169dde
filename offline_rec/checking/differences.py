"""Logged log-probs against the model's: their differences by quantile, for each way of sampling.

Rows are grouped by policy, version, kind, temperature, top-p and top-k; of each group all sampled rows are
computed once, as they say they were sampled, and a few of them at other temperatures.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_tools.checking import Findings, Rule, Sample, Tally
from offline_rec.checking.cut import cut_logprobs
from offline_rec.checking.rules import CUT_DIFFERS, OTHER_POLICY, RAW, SAMPLER_DISAGREES, TEMPERATURE
from offline_rec.checking.temperature import Explanation, Setting, explain
from offline_rec.data.ragged import IntArray, Ragged, offsets_of
from offline_rec.data.rows import Rows, RowStore
from offline_rec.models.policy import Policy
from offline_rec.models.score import row_logprobs
from offline_rec.sampling.sampler import SamplingParams

SETTINGS = 8
"""Ways of sampling that are compared, those with the most sampled rows."""

EXPLAINED_TOKENS = 2048
"""Response tokens of a setting that are computed at every temperature tried."""

ROWS_AT_ONCE = 64
CACHE_BYTES = 64 << 20
QUANTILES = {"p01": 0.01, "p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
_FACTS = ("policy", "policy_version", "logprob_kind", "temperature", "top_p", "top_k")

OUTSIDE = 0.02
"""Share of tokens that the logged top-p or top-k leave out, up to which rounding explains them."""

BESIDE_CLIP = float(np.log(1.2))
"""Nats a token by which ratios may be too small and still be within the usual clip of 0.2."""

LEAST_TOP_P = 1e-6
CUT_RULE = "cut_sampling"

Floats = NDArray[np.float32]
Progress = Callable[[int, int], None]


@dataclass
class _Compared:
    """Rows of one setting: differences of all tokens, and some rows with their token counts for more."""

    differences: list[Floats] = field(default_factory=list)
    outside: int = 0
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
    losses: dict[Setting, float] = {}
    tallies: dict[str, Tally] = {}
    for setting in largest:
        compared = _compare(sample, setting, places[setting], store, policy)
        done += len(places[setting])
        if progress is not None:
            progress(done, total)
        if not compared.names:
            continue
        gap = partial(_gap, policy, compared.kept, setting)
        found = explain(setting, gap)
        records.append(_record(setting, compared, found))
        rule = _rule(setting, compared, found, samplers)
        if rule is None and setting.own_cut:
            losses[setting] = gap(setting.own, False)
        elif rule is not None:
            shown = f"{found.temperature or setting.own:.2f}" if rule is TEMPERATURE else ""
            tally = tallies.setdefault(shown, Tally())
            tally.add(rule, sorted(compared.names), found.detail(setting))
    for shown, tally in tallies.items():
        findings.take(tally, of=len(sample), temperature=shown)
    _settle_cut(places, losses, findings)
    return records


def _rule(setting: Setting, compared: _Compared, found: Explanation, samplers: set[str]) -> Rule | None:
    """What is wrong with a setting, the gravest."""
    if found.rule is OTHER_POLICY and setting.policy in samplers:
        return SAMPLER_DISAGREES
    outside = compared.outside > OUTSIDE * sum(map(len, compared.differences))
    # Log-probs from before a cut are of tokens within it.
    return CUT_DIFFERS if outside and found.rule in (None, RAW) else found.rule


def _settle_cut(
    places: Mapping[Setting, object], losses: Mapping[Setting, float], findings: Findings
) -> None:
    """Whether ratios that leave top-p and top-k out are off by much is known now, if all rows agree."""
    cut = {setting for setting in places if setting.cut}
    if not cut or losses.keys() != cut:
        return
    most = max(losses.values())
    detail = f"with it they agree with the model; ratios without it are too small by {most:.3f} nats a token"
    findings.detail(CUT_RULE, detail, severity="info" if most <= BESIDE_CLIP else "warning")


def _places(sample: Sample) -> dict[Setting, list[int]]:
    """Numbers of sampled rows with log-probs, by setting; greedy rows have none of sampling."""
    places: dict[Setting, list[int]] = {}
    number = 0
    for table in sample.chunks(_FACTS, size=4096):
        for values in zip(*(table.column(name).to_pylist() for name in _FACTS), strict=True):
            temperature, top_p = (None if value is None else round(value, 6) for value in values[3:5])
            if temperature != 0:
                setting = Setting(values[0], values[1], values[2], temperature, top_p, values[5])
                places.setdefault(setting, []).append(number)
            number += 1
    return places


def _compare(
    sample: Sample, setting: Setting, places: list[int], store: RowStore, policy: Policy
) -> _Compared:
    compared = _Compared()
    for rows in _usable(sample, places, store, policy):
        differences, outside = _differences(policy, rows, setting if setting.own_cut else None)
        compared.differences.append(differences)
        compared.outside += outside
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


def _differences(policy: Policy, rows: Rows, cut: Setting | None) -> tuple[Floats, int]:
    """Recomputed minus logged log-prob of every known token, and how many of these are outside of a cut."""
    known = _known(rows)
    if cut is None:
        return (row_logprobs(policy, rows).values - rows.behavior.values)[known], 0
    top_p = 1.0 if cut.top_p is None else min(max(cut.top_p, LEAST_TOP_P), 1.0)
    params = SamplingParams(float(rows.temperature[0]), top_p, max(cut.top_k or 0, 0))
    computed, outside = cut_logprobs(policy, rows, params)
    return (computed.values - rows.behavior.values)[known], int(outside.values[known].sum())


def _gap(policy: Policy, kept: list[Rows], setting: Setting, temperature: float, cut: bool) -> float:
    """Mean absolute difference over some rows at a temperature, with the cut of their setting or without."""
    way = setting if cut else None
    parts = [_differences(policy, _at(rows, temperature), way)[0] for rows in kept]
    return float(np.abs(np.concatenate(parts)).mean())


def _record(setting: Setting, compared: _Compared, found: Explanation) -> dict[str, Any]:
    differences = np.concatenate(compared.differences)
    quantiles = np.quantile(differences, list(QUANTILES.values())).tolist()
    return {
        **{"policy": setting.policy, "version": setting.version, "kind": setting.kind},
        **{"temperature": setting.temperature, "top_p": setting.top_p, "top_k": setting.top_k},
        **{"rows": len(compared.names), "tokens": len(differences), "outside_cut": compared.outside},
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
