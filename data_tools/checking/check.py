"""`check`: every finding about a dataset that needs no model."""

from typing import TYPE_CHECKING

from data_tools.checking.conditions import CONDITIONS
from data_tools.checking.findings import Findings, Report, Rule
from data_tools.checking.levels import find_conditions
from data_tools.checking.records import RECORD_RULES, find_records, reward_facts
from data_tools.checking.sample import Sample, checked_rows, draw
from data_tools.checking.stored import STORED_RULES, find_stored
from data_tools.errors import ConfigError

if TYPE_CHECKING:
    from data_tools.store.dataset import StoredDataset

SAMPLE = 512

RULES: tuple[Rule, ...] = (
    *(condition.rule for condition in CONDITIONS),
    *RECORD_RULES,
    *STORED_RULES,
)
"""All that is looked for without a model."""


def check(
    dataset: "StoredDataset", *, sample: int = SAMPLE, seed: int = 0, where: str | None = None
) -> Report:
    """Check the rows of `rollouts` where an SQL condition holds, `sample` of them token by token.

    ConfigError if the condition is none, or the sample is empty.
    """
    findings = Findings.about(dataset.path)
    report = check_rows(drawn(dataset, sample, seed=seed, where=where), findings, where=where)
    report.findings = findings.sorted()
    return report


def drawn(dataset: "StoredDataset", sample: int, *, seed: int, where: str | None) -> Sample:
    """The sample to read; ConfigError if none is asked for."""
    if sample < 1:
        raise ConfigError(f"the sample must have at least 1 row, got {sample}", "512 rows is the default")
    return draw(dataset, sample, seed=seed, where=where)


def check_rows(sample: Sample, findings: Findings, *, where: str | None = None) -> Report:
    """The same for a sample that is drawn already; the findings are added to those that are there."""
    report = Report(sample.dataset.path, sample.total, len(sample))
    if not sample.total:
        return report
    with checked_rows(sample.dataset, where) as con:
        find_conditions(con, CONDITIONS, findings)
        find_records(con, sample.total, findings)
        report.rewards = reward_facts(con)
    find_stored(sample, findings)
    return report
