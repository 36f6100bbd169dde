"""DuckDB's own parser: SQL text to a tree of dicts and back."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb

Node = dict[str, Any]


class SyntaxProblem(Exception):
    """The text is not what was to be parsed; says why."""


def parse_select(con: "duckdb.DuckDBPyConnection", query: str) -> Node:
    """Return the tree of one SELECT; SyntaxProblem for anything else."""
    found = con.execute("SELECT json_serialize_sql(?)", [query]).fetchone()
    tree = json.loads(found[0]) if found else {}
    if tree.get("error", True):
        raise SyntaxProblem(str(tree.get("error_message", "nothing there")).replace("\n", " "))
    node: Node = tree["statements"][0]["node"]
    if len(tree["statements"]) != 1 or node["type"] != "SELECT_NODE":
        raise SyntaxProblem("it is more than one expression")
    return node


def render(con: "duckdb.DuckDBPyConnection", expression: Node) -> str:
    """Return the SQL text of an expression's tree."""
    node = parse_select(con, "SELECT 1")
    node["select_list"] = [expression]
    tree = {"error": False, "statements": [{"node": node, "named_param_map": []}]}
    found = con.execute("SELECT json_deserialize_sql(?)", [json.dumps(tree)]).fetchone()
    return str(found[0] if found else "").removeprefix("SELECT ")


def nodes(tree: Any, *, into_subqueries: bool = True) -> Iterator[Node]:
    """Yield every dict of a tree."""
    waiting = [tree]  # a stack: deep nesting must not end in a RecursionError
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            if into_subqueries or part.get("class") != "SUBQUERY":
                waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def same(one: Node, other: Node) -> bool:
    """Whether two trees differ in nothing but where their parts stand in the text."""
    return _without_places(one) == _without_places(other)


def _without_places(tree: Node) -> Node:
    def drop(part: Node) -> Node:
        return {key: value for key, value in part.items() if not key.startswith("query_location")}

    bare: Node = json.loads(json.dumps(tree), object_hook=drop)
    return bare


def column_names(parts: Iterator[Node] | list[Node]) -> frozenset[str]:
    """Return the names of the columns in these nodes, in lower case, without the parameters of lambdas."""
    own, found = set(), set()
    for part in parts:
        if part.get("class") == "LAMBDA":
            own |= {name for inner in nodes(part["lhs"]) for name in _name(inner)}
        found |= _name(part)
    return frozenset(found - own)


def _name(part: Node) -> set[str]:
    return {str(part["column_names"][0]).lower()} if part.get("class") == "COLUMN_REF" else set()
