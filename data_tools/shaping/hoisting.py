"""Takes parts of an expression that the row alone decides, from wide columns, to where the row is read.

`avg(reward) OVER (PARTITION BY extra->>'template')` needs the template in a window, not all of `extra`.
"""

from typing import TYPE_CHECKING, Any

from data_tools.shaping.columns import ROW_COLUMNS, WIDE_COLUMNS
from data_tools.shaping.syntax import Node, column_names, nodes, parse_select, render, same

if TYPE_CHECKING:
    import duckdb

_VALUES = frozenset(("FUNCTION", "OPERATOR", "COMPARISON", "CONJUNCTION", "BETWEEN", "CASE", "CAST"))


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
    if part.get("class") not in _VALUES:
        return False
    inner = list(nodes(part))
    names = column_names(inner)
    return (
        bool(names & WIDE_COLUMNS)
        # After the trajectories are judged, `reward` is no longer that of the row.
        and names <= ROW_COLUMNS - {"reward"}
        and not any(node.get("class") in ("WINDOW", "SUBQUERY") for node in inner)
    )
