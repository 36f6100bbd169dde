"""What a collect did, per log and in all: every record counted once, every change by its code."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from data_tools.collecting.reasons import EXAMPLES, FLAGS, NOTES, REASONS, Notes

FEW_LOGS = 4
"""Up to so many logs the lines about each are easily read; more are summed up by format."""

_COUNTED = ("logs", "read", "kept", "duplicate", "rejected")


@dataclass(slots=True)
class LogReport:
    """Counts of one log: read == kept + duplicate + sum(rejected).

    `input_rows` are records of the log; `read` are the rows they gave (more with several responses a record,
    any number with --select), refused ones included. `where` names the first lines of each reject and note,
    `details` what the first of some notes said.
    `redacted` counts what was replaced, by kind.
    """

    source: str
    format: str
    input_rows: int = 0
    read: int = 0
    kept: int = 0
    duplicate: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    where: dict[str, list[int]] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    def reject(self, code: str, rows: Iterable[int | None], count: int) -> None:
        """Count rejects, the first of them at `rows`."""
        self.rejected[code] += count
        self._locate(code, rows)

    def note(self, notes: Notes) -> None:
        """Count notes."""
        self.notes += notes.counts
        self.details = notes.details | self.details
        for code, rows in notes.rows.items():
            self._locate(code, rows)

    def _locate(self, code: str, rows: Iterable[int | None]) -> None:
        known = self.where.setdefault(code, [])
        known += [row for row in rows if row is not None][: EXAMPLES - len(known)]

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON-able values."""
        return {
            "source": self.source,
            "format": self.format,
            "input_rows": self.input_rows,
            "read": self.read,
            "kept": self.kept,
            "duplicate": self.duplicate,
            "rejected": dict(sorted(self.rejected.items())),
            "notes": dict(sorted(self.notes.items())),
            "redacted": dict(sorted(self.redacted.items())),
            "where": {code: rows for code, rows in sorted(self.where.items()) if rows},
            "details": dict(sorted(self.details.items())),
        }


@dataclass(slots=True)
class CollectReport:
    """Counts of every log of a collect and of all together.

    `skipped`: files of a folder that are no logs, and why; `companions`: logs that were not read by
    themselves, and what they are to another log.
    """

    logs: list[LogReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    companions: dict[str, str] = field(default_factory=dict)
    batch: str | None = None
    """Name of the committed batch; None where nothing was written."""

    dry_run: bool = False

    redaction: str = ""
    """What personal data was looked for, in words."""

    @property
    def total(self) -> LogReport:
        """All logs together."""
        made = LogReport("total", "/".join(dict.fromkeys(log.format for log in self.logs)))
        for log in self.logs:
            made.input_rows += log.input_rows
            made.read += log.read
            made.kept += log.kept
            made.duplicate += log.duplicate
            made.rejected += log.rejected
            made.notes += log.notes
            made.redacted += log.redacted
            made.details = log.details | made.details
        return made

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values."""
        return {
            "logs": [log.to_dict() for log in self.logs],
            "formats": self.formats,
            "total": self.total.to_dict(),
            "skipped": self.skipped,
            "companions": self.companions,
            "batch": self.batch,
            "redaction": self.redaction,
            "dry_run": self.dry_run,
        }

    @property
    def formats(self) -> list[dict[str, Any]]:
        """The counts of each format, in the order in which they were read."""
        made: dict[str, dict[str, Any]] = {}
        for log in self.logs:
            row = made.setdefault(log.format, {"format": log.format} | dict.fromkeys(_COUNTED, 0))
            for name, count in zip(_COUNTED, _numbers(log), strict=True):
                row[name] += count
        return list(made.values())

    def lines(self) -> list[str]:
        """The report as text, a line a fact; that of many logs ends with a table by format."""
        shown = [line for log in self.logs for line in _log_lines(log)]
        if 1 < len(self.logs) <= FEW_LOGS:
            shown.append(_counts(self.total))
        shown += [f"{name}: {what}" for name, what in self.companions.items()]
        shown += [f"skipped {name}: {why}" for name, why in self.skipped.items()]
        if self.redaction:
            shown.append(f"looked for {self.redaction}")
        if len(self.logs) > FEW_LOGS:
            shown += ["", *_table(self.formats)]
        if self.dry_run:
            shown.append("dry run: nothing was written")
        return shown


def _numbers(log: LogReport) -> tuple[int, ...]:
    return 1, log.read, log.kept, log.duplicate, log.rejected.total()


def _table(formats: list[dict[str, Any]]) -> list[str]:
    """The counts by format as aligned columns, with their sum in the last line."""
    total = {"format": "total"} | {name: sum(row[name] for row in formats) for name in _COUNTED}
    rows = [["format", *_COUNTED], *([str(value) for value in row.values()] for row in (*formats, total))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{row[0]:{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def _log_lines(log: LogReport) -> list[str]:
    shown = [_counts(log)]
    for code, count in sorted(log.rejected.items()):
        shown.append(_code_line(log, code, count, label=f"rejected {code}", meaning=REASONS.get(code, "")))
    for code, count in sorted(log.notes.items()):
        shown.append(_code_line(log, code, count, label=code, meaning=(NOTES | FLAGS).get(code, "")))
    if log.redacted:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(log.redacted.items()))
        shown.append(f"  {log.redacted.total()} replaced: {kinds}")
    return shown


def _counts(log: LogReport) -> str:
    rejected = log.rejected.total()
    source = f"{log.source} ({log.format})" if log.source != "total" else "total"
    records = f" from {log.input_rows} records" if log.input_rows != log.read else ""
    return (
        f"{source}: {log.read} read{records}, {log.kept} kept, {log.duplicate} duplicate, {rejected} rejected"
    )


def _code_line(log: LogReport, code: str, count: int, *, label: str, meaning: str) -> str:
    rows = log.where.get(code, [])
    at = f" (row {', '.join(map(str, rows))}{', ...' if count > len(rows) else ''})" if rows else ""
    detail = f" ({log.details[code]})" if code in log.details else ""
    return f"  {count} {label}{at}" + (f": {meaning}" if meaning else "") + detail
