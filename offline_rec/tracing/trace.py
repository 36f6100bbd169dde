"""`trace`: the updates that used a row, or the rows that made an update."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_tools.errors import ConfigError, DataError
from offline_rec.tracing.runs import TracedRun, advantages
from offline_rec.training.metrics import read_metrics

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from data_tools.dataset import Dataset

LIMIT = 20
"""Rows of an update, or updates of a row, that are shown unless the user wants more."""

Facts = dict[str, Any]


@dataclass(frozen=True)
class RowTrace:
    """A row and the updates that used it: `uses` holds the first of these `n_uses`, in order.

    A use: step, weight, advantage (null where the index of that fit is gone), mean_ratio, kept_share. What
    the dataset says of the row is null where it no longer has it. `holding`: the weights that the row had a
    part in.
    """

    run: str
    row: str
    policy: str | None
    policy_version: int | None
    reward: float | None
    prompt: str | None
    n_uses: int
    first_step: int | None
    last_step: int | None
    uses: list[Facts]
    holding: list[str]
    notes: list[str]

    def facts(self) -> Facts:
        """Plain values."""
        return asdict(self)

    def table(self) -> list[Facts]:
        """The uses, as they are shown."""
        return self.uses

    def lines(self) -> Iterator[str]:
        """What stands around the table of uses."""
        who = f"policy {_named(self.policy, self.policy_version)}" if self.policy else "policy unknown"
        yield f"row {self.row}: {who}, reward {_number(self.reward)}"
        if self.n_uses:
            yield f"used by {self.n_uses:,} updates, from {self.first_step} to {self.last_step}"
        else:
            yield "no update used it"
        yield from _left_out(len(self.uses), self.n_uses, "updates")
        yield from (f"has a part in: {path}" for path in self.holding)
        yield from (f"note: {note}" for note in self.notes)


@dataclass(frozen=True)
class StepTrace:
    """An update and what made it: of `n_rows` rows, `rows` holds those of the largest |weight x advantage|.

    `policies`: rows and weight by who sampled them. `record`: the numbers of the update in metrics.jsonl.
    """

    run: str
    step: int
    n_rows: int
    weight: float
    policies: list[Facts]
    rows: list[Facts]
    record: Facts
    holding: list[str]
    notes: list[str]

    def facts(self) -> Facts:
        """Plain values."""
        return asdict(self)

    def table(self) -> list[Facts]:
        """The rows, as they are shown."""
        return self.rows

    def lines(self) -> Iterator[str]:
        """What stands around the table of rows."""
        told = ", ".join(
            f"{name.replace('_', ' ')} {self.record[name]:.4g}"
            for name in ("loss", "lr", "grad_norm", "kl_k3")
            if self.record.get(name) is not None
        )
        yield f"update {self.step}: {self.n_rows:,} rows of total weight {self.weight:.6g}"
        if told:
            yield told
        yield from _left_out(len(self.rows), self.n_rows, "rows")
        for one in self.policies[:LIMIT]:
            who = _named(one["policy"] or "unknown", one["policy_version"])
            yield f"of {who}: {one['rows']:,} rows, weight {one['weight']:.6g}"
        yield from (f"has a part in: {path}" for path in self.holding)
        yield from (f"note: {note}" for note in self.notes)


def trace(
    run: str | Path, *, row: str | None = None, step: int | None = None, limit: int | None = LIMIT
) -> RowTrace | StepTrace:
    """Follow a row to its updates, or an update to its rows, in the run directory of a fit or a loop.

    At most `limit` of them are listed, all if None. `ConfigError` unless one of `row` and `step` is given,
    `DataError` if the run has no such row or update; it names the nearest.
    """
    if (row is None) == (step is None):
        raise ConfigError("trace a row or a step", "give one of --row ID and --step N")
    if limit is not None and limit < 0:
        raise ConfigError(f"limit {limit} is negative", "0 lists none of them")
    traced = TracedRun(run)
    with traced.connect() as con:
        return _row(traced, con, row, limit) if row is not None else _step(traced, con, int(step or 0), limit)


def _row(run: TracedRun, con: "duckdb.DuckDBPyConnection", row: str, limit: int | None) -> RowTrace:
    con.execute("CREATE TEMP TABLE _uses AS SELECT * FROM used WHERE response_id = $row", {"row": row})
    _add_advantages(run, con)
    found = con.sql("SELECT count(*) AS n, min(step) AS first, max(step) AS last FROM _uses")
    n_uses, first, last = found.fetchall()[0]
    ds = run.dataset()
    known = _in_dataset(ds, [row])
    notes = _notes(run, ds)
    if not n_uses and not known:
        raise _no_row(run, con, row, ds)
    if not known and ds is not None:
        erased = row in ds.erased()
        notes.append(
            "the dataset no longer has it: it was erased" if erased else "the dataset has no such row"
        )
    if not n_uses and known:
        notes.append(_why_unused(known[0]))
    uses = con.sql(
        f"SELECT step, weight, advantage, mean_ratio, kept_share FROM _uses ORDER BY step {_limit(limit)}"
    ).to_arrow_table()
    logged = _sampler(con, "_uses") | (known[0] if known else {})
    return RowTrace(
        run=str(run.path),
        row=row,
        policy=logged.get("policy"),
        policy_version=logged.get("policy_version"),
        reward=logged.get("reward"),
        prompt=logged.get("prompt"),
        n_uses=n_uses,
        first_step=first,
        last_step=last,
        uses=uses.to_pylist(),
        holding=[str(w.path) for w in run.weights() if w.hold(first)] if n_uses else [],
        notes=notes,
    )


def _step(run: TracedRun, con: "duckdb.DuckDBPyConnection", step: int, limit: int | None) -> StepTrace:
    con.execute("CREATE TEMP TABLE _uses AS SELECT * FROM used WHERE step = $step", {"step": step})
    [(n_rows, weight)] = con.sql("SELECT count(*), coalesce(sum(weight), 0) FROM _uses").fetchall()
    record: Facts = next((r for r in read_metrics(run.path) if r["step"] == step and "loss" in r), {})
    if not n_rows:
        raise _no_step(run, con, step, record)
    _add_advantages(run, con)
    ds = run.dataset()
    notes = _notes(run, ds)
    _add_sampler(con, ds)
    # Rows without a known advantage come last.
    rows = con.sql(
        f"""SELECT response_id, weight, advantage, mean_ratio, kept_share, policy, policy_version FROM _told
        ORDER BY abs(weight * advantage) DESC NULLS LAST, response_id {_limit(limit)}"""
    ).to_arrow_table()
    policies = con.sql(
        """SELECT policy, policy_version, count(*) AS rows, sum(weight) AS weight FROM _told
        GROUP BY policy, policy_version ORDER BY rows DESC, policy, policy_version"""
    ).to_arrow_table()
    return StepTrace(
        run=str(run.path),
        step=step,
        n_rows=n_rows,
        weight=weight,
        policies=policies.to_pylist(),
        rows=rows.to_pylist(),
        record={name: value for name, value in record.items() if name != "timing"},
        holding=[str(w.path) for w in run.weights() if w.hold(step)],
        notes=notes,
    )


def _add_advantages(run: TracedRun, con: "duckdb.DuckDBPyConnection") -> None:
    """Add the column `advantage` to `_uses`: it may differ from fit to fit of a loop."""
    con.execute("ALTER TABLE _uses ADD COLUMN advantage DOUBLE")
    parts = con.sql("SELECT DISTINCT part FROM _uses").fetchall()
    by_fit: dict[Path, list[str]] = {}
    for (part,) in parts:
        by_fit.setdefault(run.fit_of.get(part, run.path), []).append(part)
    for fit, names in by_fit.items():
        index = advantages(fit)
        if index is None:
            continue
        con.register("_index", index)
        con.execute(
            """UPDATE _uses SET advantage = i.advantage FROM (
                SELECT response_id, advantage FROM _index WHERE response_id IN (SELECT response_id FROM _uses)
            ) i WHERE i.response_id = _uses.response_id AND _uses.part IN (SELECT unnest($names))""",
            {"names": names},
        )
        con.unregister("_index")


def _add_sampler(con: "duckdb.DuckDBPyConnection", ds: "Dataset | None") -> None:
    """Make `_told` of `_uses`: policy and version are the lineage's own, else those of the dataset."""
    missing = con.sql("SELECT response_id FROM _uses WHERE policy IS NULL").to_arrow_table()
    con.execute("CREATE TEMP TABLE _samplers(response_id VARCHAR, policy VARCHAR, policy_version BIGINT)")
    if ds is not None and missing.num_rows:
        con.register("_found", _sampled_by(ds, missing))
        con.execute("INSERT INTO _samplers FROM _found")
    con.execute(
        """CREATE TEMP TABLE _told AS SELECT u.* REPLACE (coalesce(u.policy, s.policy) AS policy,
            coalesce(u.policy_version, s.policy_version) AS policy_version)
        FROM _uses u LEFT JOIN _samplers s USING (response_id)"""
    )


def _sampled_by(ds: "Dataset", ids: "pa.Table") -> "pa.Table":
    with ds.connect() as con:
        con.register("_asked", ids)
        return con.sql(
            """SELECT response_id, any_value(policy) AS policy, any_value(policy_version) AS policy_version
            FROM rollouts WHERE response_id IN (SELECT response_id FROM _asked) GROUP BY response_id"""
        ).to_arrow_table()


def _sampler(con: "duckdb.DuckDBPyConnection", table: str) -> Facts:
    """Who sampled a row, as far as the lineage tells."""
    found = con.sql(f"SELECT policy, policy_version FROM {table} WHERE policy IS NOT NULL LIMIT 1").fetchall()
    return dict(zip(("policy", "policy_version"), found[0], strict=True)) if found else {}


def _in_dataset(ds: "Dataset | None", ids: list[str]) -> list[Facts]:
    if ds is None:
        return []
    query = """SELECT policy, policy_version, reward, prompt, split FROM rollouts
        WHERE response_id IN (SELECT unnest($ids)) LIMIT 1"""
    found: list[Facts] = ds.sql(query, {"ids": ids}).to_pylist()
    return found


def _notes(run: TracedRun, ds: "Dataset | None") -> list[str]:
    named = run.config.get("dataset")
    return [] if ds is not None else [f"the dataset {named} is not there: what it says of rows is unknown"]


def _why_unused(logged: Facts) -> str:
    if logged["split"] == "holdout":
        return "its prompt is in the holdout split, which training never sees"
    if logged["reward"] is None:
        return "it has no reward"
    return "it is in the dataset, but was left out by the shaping, or its group's turn did not come"


def _no_row(run: TracedRun, con: "duckdb.DuckDBPyConnection", row: str, ds: "Dataset | None") -> DataError:
    nearest = con.execute(
        """SELECT response_id FROM (SELECT DISTINCT response_id FROM used)
        ORDER BY jaro_winkler_similarity(response_id, $row) DESC, response_id LIMIT 1""",
        {"row": row},
    ).fetchall()
    unknown = "" if ds is not None else ", and its dataset is not there"
    hint = f"did you mean {nearest[0][0]}?" if nearest else "it has no lineage: did it make an update?"
    return DataError(f"{run.path} used no row {row!r}{unknown}", hint)


def _no_step(run: TracedRun, con: "duckdb.DuckDBPyConnection", step: int, record: Facts) -> DataError:
    [(first, last)] = con.sql("SELECT min(step), max(step) FROM used").fetchall()
    if record.get("skipped"):
        return DataError(
            f"update {step} of {run.path} was skipped: its loss or gradient was not finite",
            f"the rows that it names: {', '.join(map(str, record.get('bad_rows') or ['none']))}",
        )
    if first is None:
        return DataError(f"{run.path} has no lineage", "it is written with the first checkpoint")
    return DataError(f"{run.path} has no update {step}", f"its updates are {first} to {last}")


def _limit(limit: int | None) -> str:
    return "" if limit is None else f"LIMIT {int(limit)}"


def _left_out(shown: int, total: int, what: str) -> Iterator[str]:
    if shown < total:
        yield f"{total - shown:,} more {what} are not shown: --limit {total} shows all"


def _named(policy: str, version: int | None) -> str:
    return policy if version is None else f"{policy}, version {version}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"
