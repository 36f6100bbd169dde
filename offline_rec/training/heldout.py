"""What a policy is like on groups that it never trains on: no loss, no gradient, the same rows every time."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from offline_rec.data.index import Index, IndexedRows
from offline_rec.data.order import Floats, Ints, share_out
from offline_rec.data.packing import micro_batches
from offline_rec.data.passes import Sharing
from offline_rec.data.rows import Rows, RowStore
from offline_rec.models.policy import Policy
from offline_rec.objectives import ratios
from offline_rec.training.engine import Engine

CHUNK_TOKENS = 1 << 20
"""Tokens of the groups that are read at once; so many are kept from one measurement to the next."""

ROW_GROUPS = 16
"""Row groups of the dataset that held-out groups come from, where so many will do."""

FACTS = ("ordinal", "reward", "tokens", "logprob", "known", "k3", "log_ratio")


@dataclass(frozen=True)
class HeldOut:
    """Held-out groups, and how to read them.

    `anchor` is the field of `Rows` that ratios are taken against; `logged` says whether that is the policy
    that sampled the rows, so that their rewards may be reweighted to those of the current one.
    """

    index: Index
    store: RowStore
    groups: Ints
    anchor: str | None
    logged: bool
    _kept: list[tuple[Rows, IndexedRows]] = field(default_factory=list)

    @classmethod
    def choose(
        cls, index: Index, store: RowStore, *, count: int, seed: int, anchor: str | None, logged: bool
    ) -> "HeldOut":
        """At most `count` groups, drawn once for a seed."""
        groups = index.draw(count, seed, row_groups=ROW_GROUPS)
        return cls(index, store, groups, anchor, logged)

    def measure(self, engine: Engine, policy: Policy, *, token_budget: int) -> dict[str, float]:
        """The measurements of `summarise`, over the rows of all ranks."""
        own = [
            _facts(engine, policy, rows, indexed, anchor=self.anchor, token_budget=token_budget)
            for rows, indexed in self._parts(engine, policy.sharing)
        ]
        self._lend_passes(engine, policy)
        facts = np.concatenate([*own, np.zeros((0, len(FACTS)))])
        together = np.concatenate(engine.gather(facts))
        # In one order, so that sums do not depend on which rank had a row.
        ordered = together[np.argsort(together[:, 0], kind="stable")]
        return summarise(dict(zip(FACTS, ordered.T, strict=True)), logged=self.logged)

    def _lend_passes(self, engine: Engine, policy: Policy) -> None:
        """Take part in the forward passes of ranks that have more of them: sharded weights need all ranks."""
        lent: Rows | None = None
        while passes := _most_passes(engine, 0):  # alone, this is none
            if lent is None:
                indexed = self.index.take(self.groups[:1])
                lent = self.store.take(indexed.file, indexed.file_row).select(np.zeros(1, np.int64))
            with torch.no_grad():
                policy.logprobs(lent, passes=passes)

    def _parts(self, engine: Engine, sharing: Sharing) -> Iterator[tuple[Rows, IndexedRows]]:
        """This rank's groups, as many at a time as memory allows; if that is all of them, read once."""
        if self._kept:
            yield from self._kept
            return
        work = self.index.work(self.groups, sharing)
        mine = self.groups[share_out(work, engine.world_size)[engine.rank]]
        ends = np.cumsum(self.index.tokens(mine)) // CHUNK_TOKENS
        parts = np.split(mine, np.flatnonzero(np.diff(ends)) + 1)
        for part in parts:
            indexed = self.index.take(part)
            if len(indexed):
                read = self.store.take(indexed.file, indexed.file_row), indexed
                if len(parts) == 1:
                    self._kept.append(read)
                    self.store.close()
                yield read


def summarise(facts: dict[str, Floats], *, logged: bool) -> dict[str, float]:
    """Measurements over rows; a row's facts are sums over its unmasked tokens.

    `logprob`: mean log-prob of a token. `reward_weighted_logprob`: mean over rows of a token's mean log-prob,
    weighted by the reward above the lowest of these rows (evenly where all are equal): it falls when good
    responses become unlikely, whatever happens to bad ones. `kl`: KL(anchor || policy) in nats per token, the
    k3 estimate. `ess`: effective share of the responses under their ratios. `value`: mean reward that these
    ratios, self-normalised, give the policy; `value_logged`: that of the log.
    """
    tokens, reward = facts["tokens"], facts["reward"]
    found = {"rows": float(len(tokens)), "tokens": float(tokens.sum())}
    if not found["tokens"]:
        return found
    found["logprob"] = float(facts["logprob"].sum() / tokens.sum())
    judged = np.isfinite(reward) & (tokens > 0)
    if judged.any():
        above = reward[judged] - reward[judged].min()
        weight = above if above.any() else np.ones_like(above)
        per_token = facts["logprob"][judged] / tokens[judged]
        found["reward_weighted_logprob"] = float((weight * per_token).sum() / weight.sum())
        found["value_logged"] = float(reward[judged].mean())
    if facts["known"].sum():
        found["kl"] = float(facts["k3"].sum() / facts["known"].sum())
    complete = (facts["known"] == tokens) & (tokens > 0)
    if complete.any():
        found["ess"] = _effective_share(facts["log_ratio"][complete])
    if logged and (complete & judged).any():
        weight = _self_normalised(facts["log_ratio"][complete & judged])
        found["value"] = float((weight * reward[complete & judged]).sum())
    return found


def _self_normalised(log_ratio: Floats) -> Floats:
    weight = np.exp(log_ratio - log_ratio.max())
    normalised: Floats = weight / weight.sum()
    return normalised


def _effective_share(log_ratio: Floats) -> float:
    """(sum w)^2 / (n sum w^2), in (0, 1]."""
    return float(1 / (len(log_ratio) * np.square(_self_normalised(log_ratio)).sum()))


def _most_passes(engine: Engine, own: int) -> int:
    """How often the layers run on the rank that needs it most; 0 once no rank has rows left."""
    return int(max(count[0] for count in engine.gather(np.array([own]))))


def _facts(
    engine: Engine,
    policy: Policy,
    rows: Rows,
    indexed: IndexedRows,
    *,
    anchor: str | None,
    token_budget: int,
) -> NDArray[np.float64]:
    """`FACTS` of each row, [rows, facts]."""
    facts = np.zeros((len(rows), len(FACTS)))
    facts[:, 0] = indexed.file * 2.0**40 + indexed.file_row
    facts[:, 1] = indexed.reward
    for index in micro_batches(rows, token_budget, policy.sharing):
        chosen = rows.select(index)
        passes = _most_passes(engine, policy.passes(chosen)) if engine.world_size > 1 else 0
        facts[index, 2:] = _measure(policy, chosen, anchor, passes)
    return facts


@torch.no_grad()
def _measure(policy: Policy, rows: Rows, anchor: str | None, passes: int) -> NDArray[np.float64]:
    """Sums over the unmasked tokens of each row: tokens, log-prob, tokens with an anchor, k3, log-ratio."""
    logprobs = ratios.precise(policy.logprobs(rows, passes=passes))
    mask = policy.pad(rows.mask, logprobs.shape[1]) != 0
    columns = [mask, torch.where(mask, logprobs, 0.0)]
    if anchor is None:
        columns += [torch.zeros_like(logprobs)] * 3
    else:
        old = policy.pad(getattr(rows, anchor), logprobs.shape[1])
        known = mask & torch.isfinite(old)
        drift = torch.where(known, ratios.log_ratio(logprobs, torch.where(known, old, 0.0)), 0.0)
        columns += [known, ratios.exponential(drift) * known - known.to(drift.dtype) - drift, drift]
    sums = torch.stack([column.double().sum(1) for column in columns], dim=1)
    measured: NDArray[np.float64] = sums.cpu().numpy()
    return measured
