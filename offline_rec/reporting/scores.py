"""Scores of policies that a dataset holds: which there are, and what they say of rows as a whole."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_tools.errors import ConfigError
from data_tools.schema import LOGPROBS
from data_tools.store.connection import lock, open_duckdb
from data_tools.store.swaps import sidecar_folders
from data_tools.store.views import literal, scan

if TYPE_CHECKING:
    import duckdb

    from data_tools.store.dataset import StoredDataset


@dataclass(frozen=True)
class Scores:
    """Log-probs of one policy, `key` their folder; `rows` have them."""

    key: str
    rows: int

    @property
    def short(self) -> str:
        """The policy as a page calls it."""
        return f"weights {self.key[:8]}"


def kept_scores(ds: "StoredDataset") -> list[Scores]:
    """The scores of a dataset, those of most rows first."""
    keys = [name.split("/", 1)[1] for name in sidecar_folders(ds.storage) if name.startswith("logprobs/")]
    found = []
    for key in keys:
        with sidecars(ds, [key]) as con:
            rows = con.execute("SELECT count(logprob) FROM scores_0").fetchall()[0][0]
        if rows:
            found.append(Scores(key, rows))
    return sorted(found, key=lambda one: (-one.rows, one.key))


def chosen_scores(ds: "StoredDataset", key: str | None) -> Scores | None:
    """The scores whose key begins with `key`, or else those of most rows; None where there are none.

    Raises ConfigError where `key` names none, or several.
    """
    there = kept_scores(ds)
    if key is None:
        return there[0] if there else None
    matching = [one for one in there if one.key.startswith(key)]
    if len(matching) != 1:
        names = ", ".join(one.key[:12] for one in there) or "none"
        raise ConfigError(
            f"{'several' if matching else 'no'} scores begin with {key!r}", f"the dataset has: {names}"
        )
    return matching[0]


@contextmanager
def sidecars(ds: "StoredDataset", keys: Sequence[str]) -> Iterator["duckdb.DuckDBPyConnection"]:
    """A connection with views `scores_0`, `scores_1`, ... of the scores under `keys`, and `logged`.

    Rows meet by `file` and `file_row`; it has none of the views of the dataset itself.
    """
    with open_duckdb(ds.storage) as con:
        files = []
        for i, key in enumerate(keys):
            sidecar = ds.sidecar("logprobs", key)
            missing = set(sidecar.missing())
            there = [sidecar.path(batch) for batch in ds.batches() if batch not in missing]
            con.execute(
                f"CREATE VIEW scores_{i} AS SELECT parse_filename(filename, true) AS file, "
                f"file_row_number AS file_row, response_id, logprob FROM {scan(there, LOGPROBS)}"
            )
            files += there
        rollouts = [ds.rollout_path(batch) for batch in ds.batches()]
        if rollouts:
            listed = ", ".join(map(literal, rollouts))
            con.execute(
                f"CREATE VIEW logged AS SELECT parse_filename(filename, true) AS file, "
                f"file_row_number AS file_row, response_id, behavior_logprob, n_tokens "
                f"FROM read_parquet([{listed}], filename = true, file_row_number = true)"
            )
        lock(con, [*files, *rollouts])
        yield con
