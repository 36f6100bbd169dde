"""Tells draws, duplicates, conflicts and erased rows apart, on disk, once all logs of a collect are read.

Rows are written as if each were the first of its kind. The ledger keeps their hashes beside; at the end one
pass over it says which rows must be renamed (an equal record again in one log is its own draw) or left out.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_tools.collecting.identity import Identified
from data_tools.collecting.ids import OCCURRENCE_SQL
from data_tools.errors import DataError
from data_tools.schema import ERASED, ROLLOUTS
from data_tools.store.connection import open_duckdb
from data_tools.store.erased import HASH_SQL
from data_tools.store.sql_errors import sql_errors
from data_tools.store.storage import Storage
from data_tools.store.views import literal, scan

MEMORY = "256MB"
"""Of the ledger's database; the rest spills to disk."""

_TOGETHER = 64
"""Chunks that are inserted at once: an insert costs as much as some thousand rows."""

_SEEN = """CREATE TABLE seen (ordinal BIGINT, log INTEGER, source_row BIGINT, hi UBIGINT, lo UBIGINT,
    content_hi UBIGINT, content_lo UBIGINT, given BOOLEAN, grp UBIGINT, prompt UBIGINT)"""

_ID = "format('{:016x}{:016x}', hi, lo)"

_REPEATED = "CREATE TABLE repeated AS SELECT hi, lo FROM seen GROUP BY hi, lo HAVING count(*) > 1"

# The first record with a given id stays. Of equal records the n-th of a log is a draw of its own, but the
# n-th of two logs with the same beginning is one and the same.
_WITHIN = f"""CREATE TABLE verdicts AS
WITH again AS (SELECT seen.* FROM seen SEMI JOIN repeated USING (hi, lo)),
named AS (
    SELECT ordinal, row_number() OVER same AS place,
        CASE WHEN (content_hi, content_lo) = (first(content_hi) OVER same, first(content_lo) OVER same)
            THEN 'duplicate' ELSE 'id_conflict' END AS reason
    FROM again WHERE given WINDOW same AS (PARTITION BY hi, lo ORDER BY ordinal)),
counted AS (
    SELECT ordinal, hi, lo, row_number() OVER (PARTITION BY log, hi, lo ORDER BY ordinal) - 1 AS n
    FROM again WHERE NOT given),
drawn AS (SELECT *, row_number() OVER (PARTITION BY hi, lo, n ORDER BY ordinal) AS place FROM counted)
SELECT ordinal, CAST(NULL AS VARCHAR) AS id, reason FROM named WHERE place > 1
UNION ALL SELECT ordinal, NULL, 'duplicate' FROM drawn WHERE place > 1
UNION ALL SELECT ordinal, {OCCURRENCE_SQL.format(id=_ID, n="n")}, NULL FROM drawn WHERE place = 1 AND n > 0"""

_FINAL = f"""CREATE VIEW final AS
    SELECT s.ordinal, coalesce(v.id, {_ID}) AS id FROM seen s LEFT JOIN verdicts v USING (ordinal)
    WHERE v.reason IS NULL"""

_SETTLED = """CREATE TABLE settled AS
    SELECT s.ordinal, s.log, s.source_row, v.id, coalesce(o.reason, v.reason) AS reason
    FROM seen s LEFT JOIN verdicts v USING (ordinal) LEFT JOIN outside o USING (ordinal)
    WHERE v.ordinal IS NOT NULL OR o.ordinal IS NOT NULL ORDER BY s.ordinal"""


class Ledger:
    """Hashes of the rows of one collect, in the order in which they were written; a context manager."""

    def __init__(self, storage: Storage | None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rec-ledger-"))
        self._con = open_duckdb(storage)
        try:
            with _temporary_files():
                self._con.execute(f"SET memory_limit = {literal(MEMORY)}")
                self._con.execute(f"ATTACH {literal(str(self._folder / 'ledger.db'))} AS ledger")
                self._con.execute("USE ledger")
                self._con.execute(_SEEN)
        except BaseException:
            self._close()
            raise
        self._waiting: list[pa.Table] = []
        self.rows = 0

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        with suppress(duckdb.Error):  # closing writes, which a full disk refuses once more
            self._con.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, log: int, rows: Identified) -> None:
        """Enter rows, in the order in which they are written; `log` counts the logs of the collect."""
        count = rows.table.num_rows
        if not count:
            return
        base, content = _halves(rows.bases), _halves(rows.contents)
        entries = pa.table(
            {
                "ordinal": np.arange(self.rows, self.rows + count),
                "log": np.full(count, log, np.int32),
                "source_row": rows.table.column("source_row"),
                "hi": base[:, 0],
                "lo": base[:, 1],
                "content_hi": content[:, 0],
                "content_lo": content[:, 1],
                "given": rows.given,
                # Only groups by the log's own key can hold several prompts.
                "grp": pa.array(_first_half(rows.table.column("group_id")), mask=~rows.grouped),
                "prompt": _first_half(rows.table.column("prompt_hash")),
            }
        )
        self._waiting.append(entries)
        self.rows += count
        if len(self._waiting) >= _TOGETHER:
            self._insert()

    def _insert(self) -> None:
        if self._waiting:
            self._con.register("_entries", pa.concat_tables(self._waiting))
            with _temporary_files():
                self._con.execute("INSERT INTO seen SELECT * FROM _entries")
            self._con.unregister("_entries")
            self._waiting.clear()

    def settle(self, committed: Sequence[str], erased: Sequence[str]) -> None:
        """Decide about every row, given the Parquet files of rollouts committed before and of erased ids."""
        self._insert()
        for statement in (
            _REPEATED,
            _WITHIN,
            _FINAL,
            f"""CREATE TABLE outside AS
                SELECT ordinal, 'duplicate' AS reason FROM final
                SEMI JOIN {scan(committed, ROLLOUTS)} c ON c.response_id = final.id
                UNION ALL SELECT ordinal, 'erased' FROM (SELECT ordinal, id AS response_id FROM final)
                SEMI JOIN {scan(erased, ERASED)} e ON e.id_hash = {HASH_SQL}""",
            _SETTLED,
        ):
            with sql_errors("rows collected before"), _temporary_files():
                self._con.execute(statement)

    def changed(self) -> int:
        """How many rows must be renamed or left out."""
        return int(self._con.sql("SELECT count(*) FROM settled").fetchall()[0][0])

    def between(self, start: int, stop: int) -> pa.Table:
        """(ordinal, id, reason) of the rows start..stop to change: a new `id`, or a `reason` to leave out."""
        query = "SELECT ordinal, id, reason FROM settled WHERE ordinal >= ? AND ordinal < ? ORDER BY ordinal"
        return self._con.sql(query, params=[start, stop]).to_arrow_table()

    def counts(self) -> dict[tuple[int, str], int]:
        """How many rows of each log are left out, by reason."""
        query = "SELECT log, reason, count(*) FROM settled WHERE reason IS NOT NULL GROUP BY log, reason"
        return {(log, reason): count for log, reason, count in self._con.sql(query).fetchall()}

    def refused(self) -> pa.RecordBatchReader:
        """(log, source_row, reason) of the rows that become rejects."""
        query = """SELECT log, source_row, reason FROM settled
            WHERE reason IN ('erased', 'id_conflict') ORDER BY ordinal"""
        return self._con.sql(query).to_arrow_reader(65_536)

    def groups_of_several_prompts(self) -> dict[int, int]:
        """How many of the groups that each log names hold more than one prompt."""
        query = """SELECT log, count(*) FROM (
            SELECT log FROM seen WHERE grp IS NOT NULL GROUP BY log, grp HAVING min(prompt) <> max(prompt)
        ) GROUP BY log"""
        return dict(self._con.sql(query).fetchall())


@contextmanager
def _temporary_files() -> Iterator[None]:
    """Say that the folder of temporary files is full, where it is."""
    try:
        yield
    except duckdb.Error as error:
        if not any(told in str(error) for told in ("Could not write", "No space left", "too large")):
            raise
        raise DataError(
            f"could not write temporary files in {tempfile.gettempdir()}: {error}",
            "nothing became visible; make room there, or set TMPDIR to a folder with room",
        ) from error


def _halves(hashes: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    return np.frombuffer(b"".join(hashes), ">u8").astype(np.uint64).reshape(-1, 2)


def _first_half(texts: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    return _halves([bytes.fromhex("".join(texts.to_pylist()))])[:, 0]
