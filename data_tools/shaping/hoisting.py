"""Takes parts of an expression that read wide columns to where the row is read.

`avg(reward) OVER (PARTITION BY extra->>'template')` needs the template in a window, not all of `extra`. Only
what cannot fail is moved: there it is computed for every row of the population, also for those that a CASE,
`drop` or `keep` would have spared.
"""

from typing import TYPE_CHECKING, Any

from data_tools.shaping.columns import ROW_COLUMNS, WIDE_COLUMNS
from data_tools.shaping.syntax import Node, column_names, nodes, parse_select, render, same

if TYPE_CHECKING:
    import duckdb

_TEXT_FUNCTIONS = frozenset(
    (
        *("length", "len", "strlen", "lower", "upper", "trim", "md5", "left", "right"),
        *("contains", "starts_with", "ends_with", "prefix", "suffix", "instr", "position"),
        *("~~", "!~~", "~~*", "!~~*", "regexp_matches", "regexp_extract"),
    )
)
_JSON_FUNCTIONS = frozenset(("->>", "->", "json_extract_string", "json_extract", "json_array_length"))
_PERHAPS_NOT_JSON = frozenset(("prompt", "response"))


def hoist(con: "duckdb.DuckDBPyConnection", expression: Node, prefix: str) -> tuple[Node, dict[str, str]]:
    """Return the tree with such parts replaced by columns named from `prefix`, and the SQL text of each."""
    taken: dict[str, str] = {}

    def without(part: Any) -> Any:
        if isinstance(part, list):
            return [without(inner) for inner in part]
        if not isinstance(part, dict) or part.get("class") in ("SUBQUERY", "LAMBDA"):
            return part
        if _is_of_the_row(part):
            sql = render(con, part)
            if not same(parse_select(con, f"SELECT {sql}")["select_list"][0], part):
                return part  # some sugar does not survive; then its wide columns are carried
            name = taken.setdefault(sql, f"_{prefix}_{len(taken) + 1}")
            return parse_select(con, f"SELECT {name}")["select_list"][0]
        return {key: without(inner) for key, inner in part.items()}

    rest: Node = without(expression)
    return rest, {name: sql for sql, name in taken.items()}


def _is_of_the_row(part: Node) -> bool:
    if part.get("class") != "FUNCTION":
        return False
    inner = [node for node in nodes(part) if "class" in node]
    names = column_names(inner)
    # After the trajectories are judged, `reward` is no longer that of the row.
    if not names & WIDE_COLUMNS or not names <= ROW_COLUMNS - {"reward"}:
        return False
    allowed = _TEXT_FUNCTIONS if names & _PERHAPS_NOT_JSON else _TEXT_FUNCTIONS | _JSON_FUNCTIONS
    return all(
        node["class"] in ("COLUMN_REF", "CONSTANT")
        or (node["class"] == "FUNCTION" and str(node["function_name"]).lower() in allowed)
        for node in inner
    )
