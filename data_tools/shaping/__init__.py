"""Shaping: which rows are learned from, with which advantage and which weight, as one SQL statement."""

from data_tools.shaping.blame import sql_errors_named
from data_tools.shaping.columns import COLUMNS
from data_tools.shaping.explain import Explanation, PolicyMass, explain
from data_tools.shaping.fields import Shaping, Split
from data_tools.shaping.macros import MACROS, prepare
from data_tools.shaping.presets import BASELINES, DROPS, SCALES
from data_tools.shaping.run import shape, validate
from data_tools.shaping.statement import compile

__all__ = [
    "BASELINES",
    "COLUMNS",
    "DROPS",
    "MACROS",
    "SCALES",
    "Explanation",
    "PolicyMass",
    "Shaping",
    "Split",
    "compile",
    "explain",
    "prepare",
    "shape",
    "sql_errors_named",
    "validate",
]
