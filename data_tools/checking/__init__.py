"""What is wrong with a dataset, as findings with a fix each: all that can be told without a model."""

from data_tools.checking.check import RULES, check, check_rows
from data_tools.checking.findings import Finding, Findings, Report, Rule, Tally
from data_tools.checking.sample import Sample, checked_rows, draw

__all__ = [
    "RULES",
    "Finding",
    "Findings",
    "Report",
    "Rule",
    "Sample",
    "Tally",
    "check",
    "check_rows",
    "checked_rows",
    "draw",
]
