"""Which weights have learned from rows that were erased since, in runs and in those that began from them."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import data_tools
from data_tools.errors import ConfigError, DataError
from data_tools.store.erased import HASH_SQL
from offline_rec.tracing.runs import TracedRun, owner

if TYPE_CHECKING:
    import pyarrow as pa

EXAMPLES = 20
"""Rows that a report names of a run."""


@dataclass(frozen=True)
class RunErasure:
    """What a run has of the erased rows.

    `n_rows` of them made updates, the first of which is `first_step`; `rows` names the first. `inherited`:
    the weights that it began with, where these had learned from erased rows. `touched` weights hold something
    of erased rows, `clean` ones do not.
    """

    run: str
    n_rows: int
    n_uses: int
    first_step: int | None
    inherited: str | None
    rows: list[str]
    touched: list[str]
    clean: list[str]


@dataclass(frozen=True)
class ErasureTrace:
    """Which runs have learned from the `n_erased` rows of a list."""

    erased: str
    n_erased: int
    runs: list[RunErasure]

    @property
    def touched(self) -> list[str]:
        """All weights that hold something of erased rows."""
        return list(dict.fromkeys(path for run in self.runs for path in run.touched))

    def facts(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"touched": self.touched}

    def table(self) -> list[dict[str, Any]]:
        """A record for each run, as it is shown."""
        return [
            {
                "run": one.run,
                "erased rows": one.n_rows,
                "first update": one.first_step,
                "began touched": "yes" if one.inherited else "no",
                "weights touched": len(one.touched),
                "clean": len(one.clean),
            }
            for one in self.runs
        ]

    def lines(self) -> Iterator[str]:
        """Every folder that is touched, and why."""
        yield f"{self.n_erased:,} erased rows in {self.erased}"
        for one in self.runs:
            if one.inherited:
                yield f"{one.run} began with {one.inherited}, which had learned from erased rows"
        yield from (f"touched: {path}" for path in self.touched)
        if not self.touched:
            yield "no weights are touched"


@dataclass
class _Search:
    """Runs that were looked into, each once."""

    hashes: "pa.Table"
    known: dict[Path, RunErasure] = field(default_factory=dict)
    open: set[Path] = field(default_factory=set)

    def run(self, path: str | Path) -> RunErasure:
        key = Path(path).absolute()
        if key not in self.known:
            self.open.add(key)
            self.known[key] = self.look(TracedRun(path))
            self.open.discard(key)
        return self.known[key]

    def look(self, run: TracedRun) -> RunErasure:
        with run.connect() as con:
            con.register("_erased", self.hashes)
            con.execute(
                f"""CREATE TEMP TABLE _found AS SELECT response_id, count(*) AS uses, min(step) AS first
                FROM used WHERE {HASH_SQL} IN (SELECT id_hash FROM _erased) GROUP BY response_id"""
            )
            [(n_rows, n_uses, first)] = con.sql(
                "SELECT count(*), coalesce(sum(uses), 0)::BIGINT, min(first) FROM _found"
            ).fetchall()
            query = f"SELECT response_id FROM _found ORDER BY first, response_id LIMIT {EXAMPLES}"
            rows = [name for (name,) in con.sql(query).fetchall()]
        inherited = self.inherited(run)
        weights = run.weights()
        touched = [w for w in weights if inherited or (first is not None and w.hold(first))]
        return RunErasure(
            run=str(run.path),
            n_rows=n_rows,
            n_uses=n_uses,
            first_step=first,
            inherited=inherited,
            rows=rows,
            touched=[str(w.path) for w in touched],
            clean=[str(w.path) for w in weights if w not in touched],
        )

    def inherited(self, run: TracedRun) -> str | None:
        """The weights that a run began with, if they had learned from erased rows in a run of their own."""
        start = run.start()
        found = None if start is None else owner(start)
        if start is None or found is None:
            return None
        source, step = found
        if source in self.open or source == run.path.absolute():
            return None
        before = self.run(source)
        first = before.first_step
        if before.inherited or (first is not None and (step is None or step >= first)):
            return str(start)
        return None


def trace_erased(runs: Sequence[str | Path], erased: str | Path) -> ErasureTrace:
    """Find what runs have learned from rows that were erased, and which of their weights hold it.

    `erased` is a dataset, whose deletions are recorded, or a text file with a response id a line (`-` is
    stdin). A run that began with touched weights of another one is touched throughout.
    """
    if not runs:
        raise ConfigError("no run is named", "name run directories")
    hashes = _hashes(erased)
    search = _Search(hashes)
    return ErasureTrace(str(erased), hashes.num_rows, [search.run(run) for run in runs])


def _hashes(erased: str | Path) -> "pa.Table":
    """The hashes of the erased ids, each once."""
    import pyarrow as pa

    from data_tools.store.connection import open_duckdb

    if str(erased) == "-" or Path(erased).is_file():
        data = sys.stdin.read() if str(erased) == "-" else Path(erased).read_bytes()
        text = data if isinstance(data, str) else data.decode("utf-8", errors="replace")
        ids = [line.strip() for line in text.splitlines() if line.strip()]
        if not ids:
            raise DataError(f"{erased} is empty", "write a response id a line")
        with open_duckdb() as con:
            con.register("_ids", pa.table({"response_id": pa.array(ids, pa.string())}))
            return con.sql(f"SELECT DISTINCT {HASH_SQL} AS id_hash FROM _ids").to_arrow_table()
    ds = data_tools.open(erased)
    ds.erased()  # a run directory says that it is none
    with ds.connect() as con:
        return con.sql("SELECT DISTINCT id_hash FROM _erased").to_arrow_table()
