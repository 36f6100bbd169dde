"""Checks the SQL expression of a field: it is one, reads no token column, and gives the same every time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from data_tools.errors import ConfigError
from data_tools.schema import TOKEN_COLUMNS
from data_tools.shaping.columns import FIELDS
from data_tools.shaping.hoisting import hoist
from data_tools.shaping.macros import MACROS
from data_tools.shaping.syntax import Node, SyntaxProblem, column_names, nodes, parse_select, render, same
from data_tools.store.guard import check_select

if TYPE_CHECKING:
    import duckdb

_CLOCKS = frozenset(
    (
        *("now", "today", "transaction_timestamp", "localtime", "localtimestamp", "current_date"),
        *("current_time", "current_timestamp", "current_localtime", "current_localtimestamp"),
        *("get_current_time", "get_current_timestamp"),
    )
)
_CHANCE = frozenset(
    ("random", "setseed", "uuid", "uuidv4", "uuidv7", "gen_random_uuid", "nextval", "currval")
)

_HINT = "write one DuckDB expression over the columns of rollouts"
_OTHER_CLAUSES = (
    *("where_clause", "group_expressions", "group_sets", "having"),
    *("qualify", "sample", "modifiers"),
)


@dataclass(frozen=True)
class Expression:
    """A checked expression: `text` may stand between brackets, and uses `columns` and the names in `hoisted`.

    `hoisted` is computed where the row is read: name to SQL. `reads` are all columns that were written.
    """

    text: str
    columns: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    windowed: bool = False
    several: bool = False
    hoisted: Mapping[str, str] = field(default_factory=dict)


@lru_cache(maxsize=256)
def parse_expression(name: str, text: str, *, several: bool = False) -> Expression:
    """Return the expression of a field with its macro calls completed; ConfigError says what is wrong.

    With `several` it may be a list of expressions separated by commas.
    """
    import duckdb

    with duckdb.connect() as con:
        try:
            return _parse(con, name, text, several)
        except SyntaxProblem as problem:
            raise ConfigError(f"{name} = {text!r}: {problem}", _HINT) from problem


def bracketed(expression: Expression) -> str:
    """Return the expression in brackets, or as it is where it is a bare name or number."""
    text = expression.text.strip()
    return text if text.replace("_", "").replace(".", "").isalnum() else f"({closed(text)})"


def closed(text: str) -> str:
    """Return SQL text that a bracket may follow: not one inside a line comment."""
    return f"{text}\n" if "--" in text else text


def _parse(con: "duckdb.DuckDBPyConnection", name: str, text: str, several: bool) -> Expression:
    # Parsed twice: bare, where a stray bracket or a second clause shows, and in brackets, as it will stand.
    node = parse_select(con, f"SELECT {text}\n")
    items = node["select_list"]
    if _has_more_than_items(node) or (len(items) > 1 and not several):
        raise SyntaxProblem("it is not one expression")
    parse_select(con, f"SELECT json_array({text}\n)" if several else f"SELECT ({text}\n)")
    _refuse_files(con, name, f"SELECT {text}\n")
    _refuse_parts(name, list(nodes(items)))
    text = _complete_macros(text, list(nodes(items)))
    items = parse_select(con, f"SELECT {text}\n")["select_list"]
    reads, hoisted = column_names(list(nodes(items))), dict[str, str]()
    if FIELDS[name]:
        text, items[0], hoisted = _hoist(con, name, text, items[0])
    return Expression(
        text=text,
        columns=column_names(list(nodes(items))) - hoisted.keys(),
        reads=reads,
        windowed=any(part.get("class") == "WINDOW" for part in nodes(items, into_subqueries=False)),
        several=len(items) > 1,
        hoisted=hoisted,
    )


def _hoist(
    con: "duckdb.DuckDBPyConnection", name: str, text: str, item: Node
) -> tuple[str, Node, dict[str, str]]:
    rest, hoisted = hoist(con, item, name)
    if not hoisted:
        return text, item, {}
    rendered = render(con, rest)
    # What DuckDB renders must mean what was written; where it does not, the wide columns are carried along.
    if not same(parse_select(con, f"SELECT {rendered}")["select_list"][0], rest):
        return text, item, {}
    return rendered, rest, hoisted


def _has_more_than_items(node: Node) -> bool:
    return (
        node["from_table"]["type"] != "EMPTY"
        or bool(node["cte_map"]["map"])
        or any(node.get(clause) for clause in _OTHER_CLAUSES)
        or any(item.get("alias") or item["class"] == "STAR" for item in node["select_list"])
    )


def _refuse_files(con: "duckdb.DuckDBPyConnection", name: str, query: str) -> None:
    try:
        check_select(query, con)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}", _HINT) from error


def _refuse_parts(name: str, parts: list[Node]) -> None:
    for part in parts:
        if part.get("class") in ("PARAMETER", "POSITIONAL_REFERENCE") or part.get("columns") is True:
            raise ConfigError(f"{name}: a {part['class'].lower()} has no meaning here", "name the columns")
    paths = {str(step).lower() for part in parts for step in part.get("column_names", ())}
    for found in sorted(paths & frozenset(TOKEN_COLUMNS)):
        raise ConfigError(
            f"{name}: {found} is a token column, and shaping reads none",
            "n_tokens, n_prompt_tokens and behavior_logprob (their sum; null if one is missing) are columns",
        )
    used = paths | {str(part["function_name"]).lower() for part in parts if "function_name" in part}
    for found in sorted(used & _CLOCKS):
        raise ConfigError(f"{name}: {found} differs from run to run", "age_days counts from one fixed moment")
    for found in sorted(used & _CHANCE):
        raise ConfigError(
            f"{name}: {found} differs from run to run", "a draw that stays: md5('seed' || response_id) < '8'"
        )


def _complete_macros(text: str, parts: list[Node]) -> str:
    """Append its column to every macro call that leaves it out."""
    calls = [
        (part["query_location"] + part["query_location_length"], part)
        for part in parts
        if part.get("class") == "FUNCTION"
        and str(part["function_name"]).lower() in MACROS
        and len(part["arguments"]) == 1
    ]
    content = text.encode()  # the parser counts bytes
    for end, call in sorted(calls, key=lambda found: found[0], reverse=True):
        column = MACROS[str(call["function_name"]).lower()].column
        added = f", {column} := {column}" if call["arguments"][0]["name"] else f", {column}"
        close = end - len("SELECT ") - 1
        content = content[:close] + added.encode() + content[close:]
    return content.decode()
