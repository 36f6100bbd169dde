"""Rewards that arrive after the responses: appended, never overwritten; the latest per response counts."""

import contextlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.errors import ConfigError, DataError
from data_tools.logs.log import Log
from data_tools.logs.sources import expand
from data_tools.schema import REWARDS
from data_tools.store.batches import fresh_name
from data_tools.store.connection import open_duckdb
from data_tools.store.guard import check_expression
from data_tools.store.parquet_writer import ParquetFileWriter
from data_tools.store.sql_errors import sql_errors
from data_tools.store.storage import Storage
from data_tools.store.views import identifier, literal

if TYPE_CHECKING:
    from data_tools.store.dataset import StoredDataset

_FILES = "give a CSV, JSON, JSONL or Parquet file with one row a reward"

EXAMPLES = 5
"""Row numbers of the file that a report names per problem."""


PROBLEMS = {
    "empty": "there is no value",
    "unknown": "no response has this id",
    "unusable": "the value is no finite number, and not true or false",
}
"""What keeps a row of the file from being applied."""


@dataclass(slots=True)
class RewardReport:
    """What became of the rows of a file of rewards: `read` == `applied` + `empty` + `unknown` + `unusable`.

    `empty` rows hold no value, `unknown` ids belong to no row, `unusable` values are no finite number. `rows`
    counts the responses that got a reward; more than `applied` where an id names several.
    """

    read: int = 0
    applied: int = 0
    empty: int = 0
    unknown: int = 0
    unusable: int = 0
    rows: int = 0
    examples: dict[str, list[int]] = field(default_factory=dict)
    """1-based rows of the file, at most EXAMPLES per problem."""

    def lines(self) -> list[str]:
        """The report as text, a line a fact."""
        shown = [
            f"{self.read} read, {self.applied} applied, {self.empty} empty, {self.unknown} unknown, "
            f"{self.unusable} unusable; {self.rows} responses have a new reward"
        ]
        for problem, rows in sorted(self.examples.items()):
            count = getattr(self, problem)
            at = ", ".join(map(str, rows)) + (", ..." if count > len(rows) else "")
            shown.append(f"  {count} {problem} (row {at}): {PROBLEMS[problem]}")
        return shown


class RewardWriter:
    """Appends rewards to a dataset; a context manager that forgets them unless `commit` was called."""

    def __init__(self, storage: Storage, source: str, rewarded_at: datetime | None = None) -> None:
        self._storage = storage
        self._source = source
        self._at = rewarded_at or datetime.now(UTC)
        storage.sweep("rewards")
        self._file = ParquetFileWriter(storage, "rewards/new.parquet", REWARDS)

    def __enter__(self) -> "RewardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.discard()

    @property
    def rows(self) -> int:
        """Rewards given so far."""
        return self._file.rows

    def write(self, table: "pa.Table | pa.RecordBatch") -> None:
        """Append (response_id, reward) rows: null takes an earlier reward back, NaN is a DataError."""
        rewards = table.column("reward").cast(pa.float64())
        usable = pc.fill_null(pc.is_finite(rewards), True)
        if not pc.all(usable, min_count=0).as_py():
            row = pc.index(usable, False).as_py()
            name = table.column("response_id")[row].as_py()
            raise DataError(f"the reward of response {name} is not finite", "leave it out, or give a number")
        columns = {
            "response_id": table.column("response_id"),
            "reward": rewards,
            "source": pa.repeat(self._source, table.num_rows),
            "rewarded_at": pa.repeat(pa.scalar(self._at, REWARDS.field("rewarded_at").type), table.num_rows),
        }
        self._file.write(pa.table(columns))

    def commit(self) -> None:
        """Make the rewards visible; nothing is written where there are none."""
        if not self._file.rows:
            return
        self._file.finish()
        self._file.publish(f"rewards/{fresh_name(self._storage.stems('rewards', '.parquet'))}.parquet")


def add_rewards(
    dataset: "StoredDataset",
    file: str,
    *,
    id_column: str = "response_id",
    value_column: str = "reward",
    on: str = "response_id",
    source: str | None = None,
    nulls_retract: bool = False,
) -> RewardReport:
    """Append the rewards of a file (CSV, JSON, JSONL or Parquet; a path, a URL or `-`), matched by id.

    `on` is what the ids of the file stand for, an expression over `rollouts` such as `extra->>'request_id'`;
    an id that names several rows rewards them all. Of several rewards for an id the last in the file counts.
    An empty value is skipped, or, with `nulls_retract`, takes the earlier reward back. `source` says who
    judged: the file.
    """
    check_expression(on, "the id of the rows")
    with contextlib.ExitStack() as stack:
        log = _only_log(file, stack)
        path = stack.enter_context(log.local_file())
        con = stack.enter_context(dataset.connect())
        writer = stack.enter_context(RewardWriter(dataset.storage, source or log.name))
        _read(con, log, path, columns=(id_column, value_column))
        with sql_errors("the id of the rows"):
            report = _match(con, on, nulls_retract=nulls_retract)
        for batch in con.sql("SELECT response_id, reward FROM _matched ORDER BY row").to_arrow_reader(65_536):
            writer.write(batch)
        writer.commit()
        report.rows = writer.rows
    return report


def _only_log(file: str, stack: contextlib.ExitStack) -> Log:
    found = expand([file], stack)
    if len(found) != 1:
        raise ConfigError(f"{file} is {len(found)} files, not one", "name one file of rewards")
    return found[0].log


def _read(con: duckdb.DuckDBPyConnection, log: Log, path: str, *, columns: tuple[str, str]) -> None:
    """Copy the two columns of the file as text into the table _given (row, id, value)."""
    with open_duckdb() as outside:  # `con` can read nothing but the dataset
        try:
            source = _source(outside, log, path, columns)
            found = outside.sql(f"SELECT row_number() OVER () AS row, * FROM ({source})").to_arrow_reader(
                65_536
            )
            con.register("_found", found)
            con.execute("""CREATE TABLE _given AS SELECT row, trim(id) AS id, trim(value) AS text,
                CASE lower(text) WHEN 'true' THEN 1.0 WHEN 'false' THEN 0.0
                ELSE TRY_CAST(text AS DOUBLE) END AS reward FROM _found""")
            con.unregister("_found")
        except duckdb.Error as error:
            raise DataError(f"{log.name}: {str(error).splitlines()[0]}", _FILES) from error


def _source(outside: duckdb.DuckDBPyConnection, log: Log, path: str, columns: tuple[str, str]) -> str:
    """Return the SELECT of (id, value) over the file; DataError names a column that it lacks."""
    typed = ", ".join(f"{identifier(column)}: JSON" for column in columns)
    scans = {
        "csv": f"read_csv({literal(path)}, all_varchar = true, header = true)",
        "parquet": f"read_parquet({literal(path)})",
        # Columns are typed by hand: DuckDB would take an id such as 2024-01-01T00:00:00Z for a time.
        "jsonl": f"read_json({literal(path)}, columns = {{{typed}}})",
    }
    kind = "jsonl" if log.kind == "json" else log.kind
    if kind not in scans:
        raise DataError(f"{log.name} is {log.kind}, not a file of rewards", _FILES)
    probe = scans[kind] if kind != "jsonl" else f"read_json_auto({literal(path)}, sample_size = 1000)"
    names = outside.sql(f"SELECT * FROM {probe} LIMIT 0").columns
    for column in columns:
        if column not in names:
            raise ConfigError(f"{log.name} has no column {column!r}", f"its columns are: {', '.join(names)}")
    text = "{} ->> '$'" if kind == "jsonl" else "CAST({} AS VARCHAR)"
    chosen = (text.format(identifier(column)) for column in columns)
    return "SELECT {} AS id, {} AS value FROM {}".format(*chosen, scans[kind])


def _match(con: duckdb.DuckDBPyConnection, on: str, *, nulls_retract: bool) -> RewardReport:
    """Fill the table _matched (row, response_id, reward) and count what did not get there."""
    con.execute("""CREATE TABLE _judged AS SELECT *, CASE WHEN coalesce(text, '') = '' THEN 'empty'
        WHEN reward IS NULL OR NOT isfinite(reward) THEN 'unusable' END AS problem FROM _given""")
    wanted = "problem IS NULL OR problem = 'empty'" if nulls_retract else "problem IS NULL"
    con.execute(f"""CREATE TABLE _matched AS SELECT g.row, r.response_id, g.reward
        FROM (SELECT response_id, CAST(({on}\n) AS VARCHAR) AS key FROM rollouts) r
        JOIN (SELECT * FROM _judged WHERE {wanted}) g ON g.id = r.key""")
    outcomes = con.sql(f"""SELECT CASE WHEN m.row IS NOT NULL THEN 'applied'
            WHEN {wanted} THEN 'unknown' ELSE problem END AS outcome, count(*) AS n,
            list(j.row ORDER BY j.row)[:{EXAMPLES}] AS examples
        FROM _judged j LEFT JOIN (SELECT DISTINCT row FROM _matched) m USING (row) GROUP BY outcome""")
    report = RewardReport()
    for outcome, n, examples in outcomes.fetchall():
        setattr(report, outcome, n)
        report.read += n
        if outcome != "applied":
            report.examples[outcome] = examples
    return report
