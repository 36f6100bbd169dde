"""A run directory of `rec fit`, opened to be queried: the views `metrics`, `lineage` and `evaluations`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

from data_tools.errors import DataError
from data_tools.store.connection import lock, open_duckdb
from data_tools.store.queryable import Queryable
from data_tools.store.views import literal

if TYPE_CHECKING:
    import duckdb

    from data_tools.store.storage import Storage

MARKS = ("metrics.jsonl", "snapshot.json", "config.yaml")
"""Files that tell a run directory from any other."""

_NO_METRICS = "(SELECT CAST(NULL AS BIGINT) AS step WHERE false)"
_NO_LINEAGE = """(SELECT CAST(NULL AS BIGINT) AS step, CAST(NULL AS VARCHAR) AS response_id,
    CAST(NULL AS DOUBLE) AS weight, CAST(NULL AS FLOAT) AS mean_ratio, CAST(NULL AS FLOAT) AS kept_share
    WHERE false)"""
_NO_EVALUATIONS = """(SELECT CAST(NULL AS VARCHAR) AS policy, CAST(NULL AS VARCHAR) AS compared_with,
    CAST(NULL AS VARCHAR) AS measure, CAST(NULL AS INTEGER) AS k, CAST(NULL AS DOUBLE) AS value,
    CAST(NULL AS DOUBLE) AS low, CAST(NULL AS DOUBLE) AS high, CAST(NULL AS INTEGER) AS evaluation
    WHERE false)"""


def is_run(storage: "Storage") -> bool:
    """Return whether the directory is a run."""
    return any(storage.exists(mark) for mark in MARKS)


class RunDirectory(Queryable):
    """What a fit wrote, as far as it got: answers SQL, and refuses what only a dataset can do."""

    def __getattr__(self, name: str) -> NoReturn:
        from data_tools.dataset import Dataset

        if not hasattr(Dataset, name):
            raise AttributeError(name)
        raise DataError(
            f"{self.path} is the run directory of a fit, not a dataset",
            "it answers SQL over metrics, lineage and evaluations; give a dataset for anything else",
        )

    def connect(self, now: datetime | None = None) -> "duckdb.DuckDBPyConnection":
        """Return a fresh connection with the views `metrics` (a row a step), `lineage` (a row a response and
        step) and `evaluations` (a row a number that `rec eval` found).
        """
        storage = self.storage
        metrics = [storage.url("metrics.jsonl")] if _has_content(storage, "metrics.jsonl") else []
        lineage = [storage.url(f"lineage/{name}.parquet") for name in storage.stems("lineage", ".parquet")]
        numbers = sorted((name for name in storage.entries("eval") if name.isdecimal()), key=int)
        evals = {int(name): storage.url(f"eval/{name}/summary.parquet") for name in numbers}
        con = open_duckdb(storage)
        con.execute(f"CREATE VIEW metrics AS SELECT * FROM {_metrics(metrics)}")
        con.execute(f"CREATE VIEW lineage AS SELECT * FROM {_lineage(lineage)}")
        con.execute(f"CREATE VIEW evaluations AS SELECT * FROM {_evaluations(evals)}")
        lock(con, [*metrics, *lineage, *evals.values()])
        return con


def _metrics(files: Sequence[str]) -> str:
    """Return the scan of the metrics, without the last line if a running fit has written half of it."""
    if not files:
        return _NO_METRICS
    listed = ", ".join(literal(file) for file in files)
    options = "format = 'newline_delimited', ignore_errors = true, sample_size = -1"
    return f"(FROM read_json([{listed}], {options}) WHERE step IS NOT NULL)"


def _lineage(files: Sequence[str]) -> str:
    if not files:
        return _NO_LINEAGE
    return f"read_parquet([{', '.join(literal(file) for file in files)}], union_by_name = true)"


def _evaluations(files: Mapping[int, str]) -> str:
    scans = (
        f"SELECT *, {number} AS evaluation FROM read_parquet({literal(file)})"
        for number, file in files.items()
    )
    return f"({' UNION ALL BY NAME '.join(scans)})" if files else _NO_EVALUATIONS


def _has_content(storage: "Storage", name: str) -> bool:
    return storage.exists(name) and storage.size(name) > 0
