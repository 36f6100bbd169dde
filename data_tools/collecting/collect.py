"""Collect: logs into a dataset, every record counted once, in constant memory, with one atomic commit."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from data_tools import readers
from data_tools.collecting.identity import Scope
from data_tools.collecting.intake import intake
from data_tools.collecting.known_rejects import KnownRejects
from data_tools.collecting.ledger import Ledger
from data_tools.collecting.pipeline import Processed, Settings, rare_garbage_collection
from data_tools.collecting.reasons import REASONS, Reject
from data_tools.collecting.report import CollectReport, LogReport
from data_tools.collecting.workers import Workers
from data_tools.errors import ConfigError, DataError
from data_tools.logs.log import Log
from data_tools.logs.records import is_empty_table, samples
from data_tools.logs.sources import Source, expand
from data_tools.readers.base import Reader
from data_tools.readers.select import SelectReader, map_query
from data_tools.schema import REJECTS
from data_tools.store.dataset import open_stored
from data_tools.store.erased import erased_files
from data_tools.store.storage import open_storage

if TYPE_CHECKING:
    from data_tools.rewards.verdicts import RewardRule
    from data_tools.store.batches import BatchWriter
    from data_tools.store.dataset import StoredDataset

__all__ = ["CollectReport", "collect"]


class Tick(Protocol):
    """Told of progress: rows read, of an unknown total, and numbers to show beside."""

    def __call__(
        self, done: float, total: float | None = None, numbers: Mapping[str, float] | None = None
    ) -> None:
        """Show it."""


def collect(
    sources: Sequence[str],
    into: "StoredDataset | str | PathLike[str]",
    *,
    format: str = "auto",
    select: str | None = None,
    map: Mapping[str, str] | None = None,
    reward: str | Callable[..., Any] | None = None,
    policy: str | None = None,
    policy_version: int | None = None,
    logprob_kind: str | None = None,
    temperature: float | None = None,
    run: str | None = None,
    group_size: int | None = None,
    holdout: float | None = None,
    redact: bool = False,
    hash_columns: Sequence[str] = (),
    max_response_chars: int | None = None,
    dry_run: bool = False,
    strict: bool = False,
    workers: int = 1,
    progress: Tick | None = None,
) -> CollectReport:
    """Read logs into a dataset, which is made if there is none; what it holds already is not added again.

    `sources`: files, folders, globs, urls, hf:owner/name, -. `select`: one SELECT over `source`; `map`:
    column -> SQL expression over it; `reward`: how rows are judged, whatever the log says (reward_rules.py).
    `policy`, `policy_version`: where the log does not say. `logprob_kind` (raw or processed), `temperature`:
    how responses were sampled, whatever the log says. `run`: scope of the log's own ids and group keys.
    `group_size`: that many consecutive lines (responses of one line) are a group, where the log names none.
    `redact`, `hash_columns`, `max_response_chars`: what is kept out (intake.py).
    `strict`: a DataError at the first reject. `workers`: processes that read lines of large logs; a script
    that asks for several must run under `if __name__ == "__main__"`, as always when processes start anew.
    """
    chosen = _chosen_reader(format, select, map)
    kept_out = intake(redact, hash_columns, max_response_chars)
    settings = Settings(
        policy=policy,
        policy_version=policy_version,
        logprob_kind=_known_kind(logprob_kind),
        temperature=temperature,
        reward=_reward_rule(reward) if reward else None,
        group_size=group_size,
        intake=kept_out,
    )
    report = CollectReport(dry_run=dry_run)
    with ExitStack() as stack:
        jobs = _jobs(expand(sources, stack), chosen, report)
        dataset = _dataset(into, holdout, dry_run=dry_run)
        if kept_out and dataset:
            kept_out.salt = dataset.info.secret
        ledger = stack.enter_context(Ledger(dataset.storage if dataset else None))
        writer = stack.enter_context(dataset.writer()) if dataset and not dry_run else None
        background = stack.enter_context(ThreadPoolExecutor(1))
        team = stack.enter_context(Workers(workers, settings))
        known = KnownRejects(dataset)
        collecting = _Collecting(ledger, writer, known, team, report, strict, progress, background)
        collecting.read_all(jobs, run)
        collecting.finish(dataset)
    return report


def _chosen_reader(name: str, select: str | None, map: Mapping[str, str] | None) -> Reader | None:
    """The one reader for every log, None to detect each log's own."""
    if select and map:
        raise ConfigError(
            "--select and --map cannot be used together", "write the mapped columns into the SELECT"
        )
    if (select or map) and name not in ("auto", "rows"):
        raise ConfigError(f"--select and --map read plain rows, not --format {name}", "leave --format out")
    if select:
        return SelectReader(select)
    if map:
        return SelectReader(map_query(map), mapped=True)
    return None if name == "auto" else readers.reader(name)


def _known_kind(kind: str | None) -> str | None:
    if kind not in (None, "raw", "processed"):
        raise ConfigError(f"there is no kind of log-probs named {kind!r}", "it is raw or processed")
    return kind


def _reward_rule(definition: str | Callable[..., Any]) -> "RewardRule":
    from data_tools.rewards.rules import reward_rule

    return reward_rule(definition)


def _dataset(
    into: "StoredDataset | str | PathLike[str]", holdout: float | None, *, dry_run: bool
) -> "StoredDataset | None":
    """The dataset, made if need be; None where a dry run has none to look at."""
    if not isinstance(into, str | PathLike):
        return into
    storage = open_storage(fspath(into))
    if dry_run and not storage.exists("rec.json"):
        return None
    return open_stored(storage, create=not dry_run, holdout=holdout)


def _jobs(
    sources: Sequence[Source], chosen: Reader | None, report: CollectReport
) -> list[tuple[Log, Reader]]:
    """Each log with its reader; names in the report what holds no log."""
    found: dict[Reader, list[Log]] = {}
    sweeping = any(source.swept or not source.named for source in sources)
    for source in sources:
        reader = _reader_of(source, chosen, report, sweeping=sweeping)
        if reader is not None:
            found.setdefault(reader, []).append(source.log)
    if not found and sweeping and any(source.log.kind != "empty" for source in sources):
        names = ", ".join(list(report.skipped)[:3])
        raise DataError(
            f"no log was found among {len(sources)} files ({names}, ...)", "rec formats lists what is read"
        )
    jobs = [(log, reader) for reader, logs in found.items() for log in reader.plan(logs)]
    for log, _ in jobs:
        for role, companion in log.companions.items():
            report.companions.setdefault(companion.name, f"{role} of {log.name}")
    return jobs


def _reader_of(
    source: Source, chosen: Reader | None, report: CollectReport, *, sweeping: bool
) -> Reader | None:
    """The reader of a log; None, and why in the report, for a file that is no log.

    That is an error where the user named files alone; patterns, and folders with them, sweep up others.
    """
    log = source.log
    if log.kind == "empty":
        report.skipped[log.name] = "the file is empty"
        return None
    if log.kind == "utf16":
        error = DataError(f"{log.name} is UTF-16 text", "convert it with: iconv -f UTF-16 -t UTF-8")
    else:
        reader = readers.detect(log) if chosen is None else _forced(source, chosen)
        if reader is not None:
            return reader
        if is_empty_table(log):
            report.skipped[log.name] = "the table has no rows"
            return None
        error = readers.unknown(log)
    if not sweeping:
        raise error
    report.skipped[log.name] = error.message
    return None


def _forced(source: Source, chosen: Reader) -> Reader | None:
    """The reader that the user asked for; of a folder it reads only what looks like its format."""
    if source.named and source.log.kind != "binary":
        return chosen
    return chosen if chosen.detect(source.log, samples(source.log)) else None


@dataclass(slots=True)
class _Collecting:
    """The state of one collect: what was counted so far, and where rows go."""

    ledger: Ledger
    writer: "BatchWriter | None"
    known: KnownRejects
    team: Workers
    report: CollectReport
    strict: bool
    tick: Tick | None
    background: ThreadPoolExecutor
    stored: "Future[None] | None" = None
    rows_read: int = 0

    def read_all(self, jobs: Sequence[tuple[Log, Reader]], run: str | None) -> None:
        """Read every log to its end."""
        with rare_garbage_collection():
            for log, reader in jobs:
                self.read(log, reader, run)
        kept_out = self.team.settings.intake
        if kept_out:
            kept_out.check_names()
            self.report.redaction = kept_out.redactor.means if kept_out.redactor else ""
        if self.team.settings.reward:
            self.team.settings.reward.finish()
        self.wait()

    def finish(self, dataset: "StoredDataset | None") -> None:
        """Settle what was read, and commit it."""
        # Another process may collect the same log: whoever comes second must see what the first committed.
        with dataset.storage.committing() if dataset and self.writer else nullcontext():
            self.settle(dataset)
            if self.writer:
                self.report.batch = _commit(self.writer, self.report)

    def read(self, log: Log, reader: Reader, run: str | None) -> None:
        """Read one log to its end."""
        counts = LogReport(log.name, reader.name)
        self.report.logs.append(counts)
        scope = Scope(reader.name, reader.fingerprint(log), log.name, run)
        for done in self.team.read(log, reader, scope):
            self._store(done)
            self._count(counts, done)
            if self.tick:
                self.tick(self.rows_read)
        if self.team.settings.intake:
            counts.redacted += self.team.settings.intake.take_counts()

    def _store(self, done: Processed) -> None:
        """Write in the background: compression takes no part of the interpreter, parsing takes all of it.

        At most one chunk waits, so memory stays flat.
        """
        self.wait()
        self.stored = self.background.submit(self._write, len(self.report.logs) - 1, done)

    def _write(self, log: int, done: Processed) -> None:
        self.ledger.add(log, done.rows)
        if self.writer:
            self.writer.rollouts(done.rows.table)

    def wait(self) -> None:
        """Wait for what is being written; raises what went wrong there."""
        if self.stored is not None:
            self.stored.result()

    def _count(self, counts: LogReport, done: Processed) -> None:
        kept = done.rows.table.num_rows
        counts.input_rows += done.input_rows
        counts.read += kept + len(done.rejects)
        counts.kept += kept
        counts.note(done.notes)
        self.rows_read += kept + len(done.rejects)
        self._reject(counts, done.rejects)

    def _reject(self, counts: LogReport, rejects: Sequence[Reject]) -> None:
        for reject in rejects:
            counts.reject(reject.reason, [reject.row], 1)
        if rejects and self.strict:
            raise _strict_error(counts.source, rejects[0])
        fresh = self.known.without(counts.source, rejects) if self.writer else []
        if fresh and self.writer:
            self.writer.rejects(_reject_table(counts.source, fresh))

    def settle(self, dataset: "StoredDataset | None") -> None:
        """Tell draws from duplicates, once all logs are read, and take out what must not stay."""
        self.wait()
        committed = [dataset.rollout_path(batch) for batch in dataset.batches()] if dataset else []
        self.ledger.settle(committed, erased_files(dataset.storage) if dataset else [])
        for (log, reason), count in self.ledger.counts().items():
            self.report.logs[log].kept -= count
            self.report.logs[log].duplicate += count if reason == "duplicate" else 0
        for batch in self.ledger.refused():
            found = zip(*(column.to_pylist() for column in batch.columns), strict=True)
            for log, rows in groupby(found, key=itemgetter(0)):
                rejects = [Reject(row, reason, REASONS[reason]) for _, row, reason in rows]
                self._reject(self.report.logs[log], rejects)
        for log, count in self.ledger.groups_of_several_prompts().items():
            self.report.logs[log].notes["several_prompts"] += count
        if self.writer and self.ledger.changed():
            self.writer.revise(_revision(self.ledger))
        if self.writer:
            self.known.without_those_since(self.writer)


def _revision(ledger: Ledger) -> Callable[[pa.Table], pa.Table]:
    """Rename and leave out rows as the ledger says; the rows must come in the order of the ledger."""
    start = 0

    def revise(table: pa.Table) -> pa.Table:
        nonlocal start
        verdicts = ledger.between(start, start + table.num_rows)
        places = verdicts.column("ordinal").to_numpy() - start
        start += table.num_rows
        stays = np.ones(table.num_rows, bool)
        stays[places[verdicts.column("reason").is_valid().to_numpy()]] = False
        ids = table.column("response_id").to_pylist()
        for place, new in zip(places.tolist(), verdicts.column("id").to_pylist(), strict=True):
            ids[place] = new or ids[place]
        at = table.schema.get_field_index("response_id")
        renamed = table.set_column(at, table.schema.field(at), pa.array(ids, pa.string()))
        return renamed.filter(pa.array(stays))

    return revise


def _reject_table(source: str, rejects: Sequence[Reject]) -> pa.Table:
    columns = [
        [source] * len(rejects),
        [reject.row for reject in rejects],
        [reject.reason for reject in rejects],
        [reject.detail for reject in rejects],
        [reject.raw for reject in rejects],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, REJECTS, strict=True)]
    return pa.Table.from_arrays(arrays, schema=REJECTS)


def _strict_error(source: str, reject: Reject) -> DataError:
    at = "" if reject.row is None else f", row {reject.row}"
    what = f"{reject.reason}: {reject.detail or REASONS.get(reject.reason, '')}"
    return DataError(
        f"{source}{at}: {what}", "mend the log, or collect without --strict to set such rows aside"
    )


def _commit(writer: "BatchWriter", report: CollectReport) -> str | None:
    """Make the batch visible, unless it holds nothing that the dataset lacks."""
    return writer.commit() if report.total.kept or writer.n_rejects else None
