"""Rules, what was found by them, and the report of it all with its verdict."""

import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

EXAMPLES = 3
"""How many rows are named per finding."""

SAMPLED = "sampled rows"

VERDICTS: dict[Severity, str] = {
    "error": "do not fit yet: some numbers in it are wrong",
    "warning": "can be used, if the warnings are what you expect",
    "info": "ready to be used",
}
"""What the gravest finding means for the dataset."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Something to look for. `fix` is a command with {names} that are filled in when it is found.

    `unit` is what is counted. An error makes the log-probs, ids or rewards wrong for training; a warning may
    be intended; an info is a fact to know.
    """

    code: str
    severity: Severity
    meaning: str
    fix: str
    unit: str = "rows"


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that found something: `count` of the `of` units looked at, and the ids of up to three rows."""

    code: str
    severity: Severity
    what: str
    count: int
    of: int
    unit: str
    rows: list[str]
    fix: str
    detail: str = ""

    def lines(self) -> list[str]:
        """The finding for a reader; the first line says how grave it is and how often it was found."""
        told = [f"{self.severity} {self.code}: {self.count} of {self.of} {self.unit}", f"  {self.what}"]
        told += [f"  {self.detail}"] * bool(self.detail)
        told += [f"  rows: {', '.join(self.rows)}"] * bool(self.rows)
        return [*told, f"  fix: {self.fix}"]


@dataclass
class Tally:
    """Rows that break rules, counted one after another: the first three ids and the first detail stay."""

    counts: dict[Rule, int] = field(default_factory=dict)
    rows: dict[Rule, list[str]] = field(default_factory=dict)
    details: dict[Rule, str] = field(default_factory=dict)

    def add(self, rule: Rule, rows: Iterable[str], detail: str = "") -> None:
        """Count rows by their ids."""
        listed = list(rows)
        if not listed:
            return
        self.counts[rule] = self.counts.get(rule, 0) + len(listed)
        known = self.rows.setdefault(rule, [])
        known += listed[: EXAMPLES - len(known)]
        self.details.setdefault(rule, detail)


@dataclass
class Findings:
    """Collects findings; `names` fill in the commands of their fixes."""

    names: dict[str, str]
    found: list[Finding] = field(default_factory=list)

    @classmethod
    def about(cls, dataset: str, model: str | None = None) -> "Findings":
        """Findings about a dataset, and a model where one is given."""
        return cls({"dataset": shlex.quote(dataset), "model": shlex.quote(model) if model else "MODEL"})

    def add(
        self,
        rule: Rule,
        count: int,
        rows: Iterable[str] | None,
        *,
        of: int,
        detail: str = "",
        **values: object,
    ) -> None:
        """Note what a rule found, unless it is nothing; `values` fill in its fix."""
        if not count:
            return
        fix = rule.fix.format(**self.names, **values)
        examples = list(rows or [])[:EXAMPLES]
        self.found.append(
            Finding(rule.code, rule.severity, rule.meaning, count, of, rule.unit, examples, fix, detail)
        )

    def take(self, tally: Tally, *, of: int, **values: object) -> None:
        """Note everything of a tally; `values` fill in the fixes."""
        for rule, count in tally.counts.items():
            self.add(rule, count, tally.rows[rule], of=of, detail=tally.details[rule], **values)

    def detail(self, code: str, detail: str, *, severity: Severity) -> None:
        """Say more of what a rule found, now that it was measured, and how grave that makes it."""
        self.found = [
            replace(one, detail=detail, severity=severity) if one.code == code else one for one in self.found
        ]

    def sorted(self) -> list[Finding]:
        """The gravest first; equally grave ones as they were found."""
        return sorted(self.found, key=lambda finding: SEVERITIES.index(finding.severity))


@dataclass
class Report:
    """What a check found in the `rows` of a dataset, of which `sampled` were read token by token.

    `rewards`: their range and type. `logprobs`: a record a policy and sampling setting, with the quantiles of
    recomputed minus logged log-probs; empty without a model.
    """

    dataset: str
    rows: int
    sampled: int
    model: str | None = None
    rewards: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def counts(self) -> dict[Severity, int]:
        """Findings by severity."""
        return {s: sum(finding.severity == s for finding in self.findings) for s in SEVERITIES}

    @property
    def failed(self) -> bool:
        """Whether there is an error."""
        return self.counts["error"] > 0

    @property
    def verdict(self) -> str:
        """One sentence on what the findings mean."""
        if not self.rows:
            return "there are no rows"
        return VERDICTS[next((s for s in SEVERITIES if self.counts[s]), "info")]

    def facts(self) -> dict[str, Any]:
        """The report as plain values."""
        return {"verdict": self.verdict, "counts": self.counts, **asdict(self)}

    def lines(self) -> list[str]:
        """The findings and the verdict, for a reader."""
        told = [line for finding in self.findings for line in [*finding.lines(), ""]]
        said = ", ".join(f"{n} {_plural(s, n)}" for s, n in self.counts.items())
        looked = f"{self.rows} rows, {self.sampled} of them token by token"
        looked += f", with {self.model}" if self.model else ""
        return [*told, f"checked: {looked}", f"verdict: {self.verdict} ({said})"]


def _plural(severity: Severity, count: int) -> str:
    return severity if severity == "info" or count == 1 else f"{severity}s"
