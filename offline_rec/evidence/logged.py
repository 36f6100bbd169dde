"""The logged rows that a policy is judged on, and its log-ratios on them: a few numbers a row, no tokens.

A trajectory that is logged turn by turn is one episode: its log-ratio sums over its turns, its reward is that
of its last turn that has one.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data_tools.shaping.expressions import closed, parse_expression
from data_tools.store.sql_errors import sql_errors
from offline_rec.data.ragged import IntArray, Ragged
from offline_rec.data.rows import Rows, RowStore
from offline_rec.evidence.diagnostics import Drift
from offline_rec.evidence.estimators import TRUNCATION, Episodes, Floats

if TYPE_CHECKING:
    import duckdb

    from data_tools.dataset import Dataset
    from data_tools.shaping import Split

TABLE = "_judged"
READ_TOKENS = 1 << 18
"""Response tokens whose log-probs are held at once."""

LARGEST_LOG_RATIO = 20.0
"""Bound of a token's log-ratio in k3 alone, as in training; sums are exact."""

LEFT_OUT = {
    "greedy": "they were decoded at temperature 0, so they have no ratio",
    "no_logprobs": "they have no usable log-probs of the policy that sampled",
    "no_tokens": "they have no token of a response",
    "incomplete_trajectory": "some turn of their trajectory is not among the rows that can be used",
    "no_reward": "they have no finite reward",
    "not_scored": "a policy under judgement has no log-probs for them",
}
"""Why rows that were asked for are not judged on: code -> meaning."""

UNFIT = """CASE WHEN temperature = 0 THEN 'greedy' WHEN behavior_logprob IS NULL THEN 'no_logprobs'
    WHEN n_tokens = 0 THEN 'no_tokens' END"""


@dataclass(frozen=True)
class Selection:
    """Which rows are asked for: those of a split, `where` an SQL condition on rows holds."""

    split: "Split"
    where: str | None

    @property
    def condition(self) -> str:
        """The condition over `rollouts`. Raises ConfigError if `where` is not one expression."""
        parts = [] if self.split == "all" else [f"split = '{self.split}'"]
        if self.where is not None:
            parts.append(f"({closed(parse_expression('where', self.where).text)})")
        return " AND ".join(parts) or "true"

    @property
    def scored(self) -> str:
        """The condition on rows whose log-probs are needed."""
        return f"{self.condition} AND ({UNFIT}) IS NULL AND (reward IS NOT NULL OR trajectory_id IS NOT NULL)"

    def write(self, con: "duckdb.DuckDBPyConnection") -> None:
        """Make the table of these rows: where they lie, keys of prompt and episode, reward, what is wrong."""
        chosen = f"""SELECT file, file_row, response_id, group_id, trajectory_id, coalesce(turn, 0) AS turn,
            prompt_hash, prompt_cluster, reward, coalesce(n_tokens, 0) AS n_tokens, {UNFIT} AS unfit
            FROM rollouts WHERE {self.condition}"""
        trajectories = """SELECT group_id, trajectory_id, arg_min(prompt_hash, turn) AS prompt_hash,
            arg_max(reward, turn) FILTER (reward IS NOT NULL) AS reward, count(*) AS turns,
            bool_or(unfit IS NOT NULL) AS broken
            FROM chosen WHERE trajectory_id IS NOT NULL GROUP BY ALL"""
        every_turn = """SELECT group_id, trajectory_id, count(*) AS turns FROM rollouts
            WHERE trajectory_id IS NOT NULL GROUP BY ALL"""
        reward = "CASE WHEN c.trajectory_id IS NULL THEN c.reward ELSE t.reward END"
        statement = f"""CREATE OR REPLACE TEMP TABLE {TABLE} AS
            WITH chosen AS ({chosen}), trajectories AS ({trajectories}), every_turn AS ({every_turn})
            SELECT file, file_row, n_tokens, {reward} AS reward,
                hash(c.prompt_hash) AS prompt_key, hash(c.prompt_cluster) AS cluster_key,
                hash(response_id) AS response_key, hash(coalesce(t.prompt_hash, c.prompt_hash)) AS prompt,
                CASE WHEN c.trajectory_id IS NULL THEN hash(response_id)
                    ELSE hash(c.group_id, c.trajectory_id) END AS episode,
                coalesce(unfit,
                    CASE WHEN t.broken OR t.turns < e.turns THEN 'incomplete_trajectory'
                        WHEN NOT coalesce(isfinite({reward}), false) THEN 'no_reward' END) AS reason
            FROM chosen c LEFT JOIN trajectories t USING (group_id, trajectory_id)
            LEFT JOIN every_turn e USING (group_id, trajectory_id)"""
        with sql_errors("where"):
            con.execute(statement)


@dataclass(frozen=True)
class Places:
    """The rows that can be judged on, in the order in which they lie; entry i of every field is row i."""

    file: IntArray
    file_row: IntArray
    tokens: IntArray
    prompt: NDArray[np.uint64]
    episode: NDArray[np.uint64]
    reward: Floats

    @classmethod
    def of(cls, con: "duckdb.DuckDBPyConnection", batches: list[str]) -> "Places":
        """Read them from the table that `Selection.write` made; `file` numbers the batches."""
        con.execute(
            "CREATE OR REPLACE TEMP TABLE _numbers AS SELECT unnest($names) AS file, "
            "unnest(range(len($names))) AS number",
            {"names": batches},
        )
        found = con.sql(f"""SELECT number, file_row, n_tokens, prompt, episode, reward
            FROM {TABLE} JOIN _numbers USING (file) WHERE reason IS NULL ORDER BY number, file_row""")
        return cls(*(column.to_numpy() for column in found.to_arrow_table().columns))

    def __len__(self) -> int:
        return len(self.reward)


def counted(con: "duckdb.DuckDBPyConnection") -> tuple[int, Counter[str]]:
    """How many rows were asked for, and how many of them are left out by which reason."""
    found = con.execute(f"SELECT reason, count(*) FROM {TABLE} GROUP BY ALL").fetchall()
    return sum(count for _, count in found), Counter({why: count for why, count in found if why is not None})


@dataclass(frozen=True)
class RowRatios:
    """Sums over the tokens that were produced of each row; NaN where the policy has no log-probs of it."""

    log_ratio: Floats
    truncated: Floats
    k3: Floats
    tokens: Floats

    @classmethod
    def of(cls, ds: "Dataset", key: str, places: Places, batches: list[str]) -> "RowRatios":
        """Of the policy whose scores are kept under `key`; tokens are read a part at a time."""
        # Rows are read in order, so one row group at a time is enough.
        store = RowStore(ds, anchor_key=key, batches=batches, cache_bytes=0)
        sums = np.full((4, len(places)), np.nan)
        for part in _parts(places.tokens):
            rows = store.take(places.file[part], places.file_row[part], strict=False)
            sums[:, part] = _sums(rows)
        return cls(*sums)


def _parts(tokens: IntArray) -> Iterator[slice]:
    """Runs of rows of about READ_TOKENS tokens each."""
    cuts = np.flatnonzero(np.diff(np.cumsum(tokens) // READ_TOKENS)) + 1
    ends = [0, *cuts.tolist(), len(tokens)]
    yield from (slice(first, last) for first, last in pairwise(ends) if last > first)


def _sums(rows: Rows) -> Floats:
    """The fields of `RowRatios`, [4, rows]."""
    assert rows.anchor is not None
    produced = rows.mask.values != 0
    ratio = np.where(produced, rows.anchor.values.astype(np.float64) - rows.behavior.values, 0.0)
    bounded = np.clip(ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    columns = (ratio, np.minimum(ratio, np.log(TRUNCATION)), np.expm1(bounded) - bounded, produced)
    return np.stack([_row_sums(Ragged(column, rows.mask.offsets)) for column in columns])


def _row_sums(values: Ragged) -> Floats:
    sums = np.add.reduceat(np.append(values.values.astype(np.float64), 0.0), values.offsets[:-1])
    return np.where(values.lengths > 0, sums, np.float64(0))


def episodes_of(places: Places, ratios: RowRatios, usable: NDArray[np.bool_]) -> tuple[Episodes, Drift]:
    """The usable rows as episodes, in the order of their keys, and how far the policies are apart."""
    keys, first, episode = np.unique(places.episode[usable], return_index=True, return_inverse=True)
    prompt = np.unique(places.prompt[usable][first], return_inverse=True)[1]

    def over_turns(values: Floats) -> Floats:
        return np.asarray(np.bincount(episode, values[usable], len(keys)), np.float64)

    episodes = Episodes(
        log_ratio=over_turns(ratios.log_ratio),
        truncated=over_turns(ratios.truncated),
        reward=places.reward[usable][first],
        prompt=prompt,
    )
    tokens, log_ratio, k3 = (
        float(values[usable].sum()) for values in (ratios.tokens, ratios.log_ratio, ratios.k3)
    )
    return episodes, Drift(int(tokens), log_ratio, k3)
