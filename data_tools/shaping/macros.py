"""The weight macros: factors that multiply as plain SQL, such as `red_weight(0.5) * staleness_halflife(5)`.

A DuckDB macro sees its arguments only, not the columns of the row. So each macro takes its column as the last
parameter, and a call in a shaping field that leaves it out is completed before it runs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True)
class Macro:
    """A macro of one number and one column; `meaning` says what it gives."""

    parameter: str
    column: str
    body: str
    meaning: str


MACROS: dict[str, Macro] = {
    "red_weight": Macro(
        "t", "advantage", "exp(advantage / t)", "exp(advantage / T): RED-Weight of arXiv 2509.24203"
    ),
    "staleness_halflife": Macro(
        "k", "staleness", "pow(0.5, staleness / k)", "halves with every k versions of the policy since"
    ),
    "age_halflife": Macro(
        "days", "age_days", "pow(0.5, age_days / days)", "halves with every so many days of age"
    ),
}


def prepare(con: "duckdb.DuckDBPyConnection") -> None:
    """Create the macros on a connection, so that compiled statements run on it."""
    for name, macro in MACROS.items():
        refusal = f"error('{name}({macro.parameter}): {macro.parameter} must be above 0')"
        con.execute(
            f"CREATE OR REPLACE TEMP MACRO {name}({macro.parameter}, {macro.column}) AS"
            f" CASE WHEN {macro.parameter} > 0 THEN {macro.body} ELSE {refusal} END"
        )
