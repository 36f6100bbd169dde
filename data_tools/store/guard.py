"""Lets one SELECT through and nothing else, judged by DuckDB's own parser.

The type of a statement does not tell enough: DuckDB takes COPY, INSERT, UPDATE and DELETE as the body of a
CTE and still calls the whole a SELECT, EXPLAIN ANALYZE runs what it explains, and query() holds a statement
in a string. So the parsed tree is walked, and only query nodes and known table functions pass. What a
connection may read is limited besides (connection.lock): the guard is the first of two walls.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from data_tools.errors import ConfigError

if TYPE_CHECKING:
    import duckdb

TABLE_FUNCTIONS = frozenset(
    {
        *("duckdb_columns", "duckdb_functions", "duckdb_tables", "duckdb_types", "duckdb_views"),
        *("generate_series", "histogram", "histogram_values", "json_each", "json_tree"),
        *("range", "repeat", "repeat_row", "summary", "unnest"),
    }
)
"""The table functions that pass: they read their arguments or the catalogue of views, nothing else."""

REFUSED_FUNCTIONS = frozenset(
    {
        *("getenv", "current_setting", "write_log", "setval", "setseed", "sleep_ms"),
        *("json_deserialize_sql", "json_execute_serialized_sql", "json_serialize_plan"),
    }
)
"""Scalar functions that look outside, leave something behind, or hold a statement in a string."""

_QUERY_NODES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
_FILE_ENDINGS = (".parquet", ".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".db", ".duckdb", ".gz", ".zst")
_WRITING_WORDS = frozenset({"copy", "delete", "insert", "merge", "truncate", "update"})
_VIEWS_ONLY = "only the views can be read"
_HINT = "allowed is one SELECT (also WITH, FROM, PIVOT, DESCRIBE, SUMMARIZE, or EXPLAIN of a SELECT)"


def check_select(query: str, con: "duckdb.DuckDBPyConnection | None" = None) -> str:
    """Return the one statement in `query` if it is a SELECT in a wide sense, else raise a ConfigError.

    `con` is any open connection, used to parse only; without one a fresh one is opened.
    """
    import duckdb

    if con is None:
        with duckdb.connect() as con:
            return check_select(query, con)
    kind, text = _single_statement(query, con)
    if kind == "EXPLAIN":
        kind, explained = _single_statement(_explained(text), con)
    else:
        explained = text
    if kind == "SELECT":
        _check_tree(_parse(explained, con, "SQL"))
    elif kind == "MULTI":
        _check_pivot(explained, con)
    else:
        raise ConfigError(f"a statement of the kind {kind} is refused", _HINT)
    return text


def check_expression(
    text: str, what: str, con: "duckdb.DuckDBPyConnection | None" = None, *, subqueries: bool = False
) -> str:
    """Return `text` if it is one scalar expression, else raise a ConfigError that names `what`.

    A subquery is refused unless `subqueries`; what `check_select` refuses is refused here, too.
    """
    import duckdb

    if con is None:
        with duckdb.connect() as con:
            return check_expression(text, what, con, subqueries=subqueries)
    hint = "write one DuckDB expression over the columns of rollouts"
    # The newline ends a trailing comment before the bracket.
    tree = _parse(f"SELECT ({text}\n)", con, what, hint)
    if not _is_one_expression(tree):
        raise ConfigError(f"{what}: {text!r} is not one expression", hint)
    _parse(f"SELECT {text}\n", con, what, hint)  # `a) or (b` is one only within brackets
    if not subqueries and any("subquery" in part for part in _dicts(tree)):
        raise ConfigError(f"{what}: {text!r} holds a subquery", hint)
    _check_tree(tree)
    return text


def _is_one_expression(tree: dict[str, Any]) -> bool:
    """Return whether the parsed `SELECT (text)` is just that: `text` did not close the bracket itself."""
    if len(tree["statements"]) != 1:
        return False
    node = tree["statements"][0]["node"]
    if node["type"] != "SELECT_NODE" or len(node["select_list"]) != 1:
        return False
    value = node["select_list"][0]
    is_row = value.get("function_name") == "row"  # `()` and `1, 2` in brackets are rows
    others = ("modifiers", "where_clause", "group_expressions", "having", "qualify", "sample")
    is_bare = node["from_table"]["type"] == "EMPTY" and not any(node.get(part) for part in others)
    return bool(is_bare and not value["alias"] and not is_row)


def _single_statement(query: str, con: "duckdb.DuckDBPyConnection") -> tuple[str, str]:
    """Return kind and text of the only statement in `query`."""
    import duckdb

    try:
        found = [(statement.type.name, statement.query) for statement in con.extract_statements(query)]
    except (duckdb.Error, ValueError) as error:  # ValueError: of a kind that the Python client does not know
        raise ConfigError(f"SQL: {_text(error)}", _HINT) from error
    if len(found) != 1:
        raise ConfigError(f"the SQL text holds {len(found) or 'no'} statements, not one", _HINT)
    return found[0]


def _explained(text: str) -> str:
    """Return what follows `EXPLAIN [ANALYZE] [(options)]`."""
    words = _words(text)
    at = 2 if words[1:2] and words[1][1] in ("analyze", "analyse") else 1
    options = [word for _, word, _ in words[at : at + 2]]
    if options[:1] == ["("] and options[1:] in (["analyze"], ["analyse"], ["format"], ["verbose"]):
        at = next((i + 1 for i in range(at, len(words)) if words[i][1] == ")"), at)
    return text.encode()[words[at][0] :].decode() if at < len(words) else ""


def _parse(text: str, con: "duckdb.DuckDBPyConnection", what: str, hint: str = _HINT) -> dict[str, Any]:
    [(serialised,)] = con.execute("SELECT json_serialize_sql(?)", [text]).fetchall()
    try:
        tree: dict[str, Any] = json.loads(serialised)
    except RecursionError:
        raise ConfigError(f"{what}: nested too deeply", "split it into several CTEs") from None
    if tree["error"]:
        raise ConfigError(f"{what}: {' '.join(tree['error_message'].split())}", hint)
    return tree


def _dicts(tree: Any) -> Iterator[dict[str, Any]]:
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def _check_tree(tree: Any) -> None:
    for part in _dicts(tree):
        kind = str(part.get("type", ""))
        if kind.endswith("_NODE") and kind not in _QUERY_NODES:
            raise ConfigError(f"{kind.split('_')[0]} inside a query is refused", _HINT)
        if kind == "TABLE_FUNCTION":
            _check_table_function(str(part["function"].get("function_name", "")))
        if kind == "BASE_TABLE":
            _check_table(str(part.get("table_name", "")))
        if part.get("class") == "FUNCTION":
            _check_function(str(part.get("function_name", "")))


def _check_table_function(name: str) -> None:
    if name.lower() not in TABLE_FUNCTIONS:
        raise ConfigError(f"the table function {name} is refused", _VIEWS_ONLY)


def _check_function(name: str) -> None:
    if name.lower() in REFUSED_FUNCTIONS:
        raise ConfigError(f"the function {name} is refused", _HINT)


def _check_table(name: str) -> None:
    if name.lower().endswith(_FILE_ENDINGS) or any(mark in name for mark in "/\\*:"):
        raise ConfigError(f"reading the file {name!r} is refused", _VIEWS_ONLY)


def _check_pivot(text: str, con: "duckdb.DuckDBPyConnection") -> None:
    """Judge a statement with a PIVOT by its words: the parser expands it and cannot show it as a tree.

    Stricter than the tree: a column may not be called like a statement that writes.
    """
    functions = con.execute("SELECT function_name FROM duckdb_functions() WHERE function_type = 'table'")
    refused = {row[0] for row in functions.fetchall()} - TABLE_FUNCTIONS
    words = _words(text)
    for (_, word, is_string), (_, follower, _) in zip(words, [*words[1:], (0, "", False)], strict=True):
        if word in _WRITING_WORDS:
            raise ConfigError(f"{word.upper()} in a statement with PIVOT is refused", _HINT)
        if follower == "(" and word in refused:
            raise ConfigError(f"the table function {word} is refused", _VIEWS_ONLY)
        if follower == "(":
            _check_function(word)
        if not is_string and word.isidentifier() is False and len(word) > 2:
            _check_table(word)


def _words(text: str) -> list[tuple[int, str, bool]]:
    """Return (offset in UTF-8 bytes, lower-case word without its quotes, is a string) but for comments."""
    import duckdb

    tokens, content = duckdb.tokenize(text), text.encode()
    ends = [start for start, _ in tokens[1:]] + [len(content)]
    found = []
    for (start, kind), end in zip(tokens, ends, strict=True):
        word = content[start:end].decode().strip().lower()
        if kind != duckdb.token_type.comment:
            found.append((start, word.strip('"'), kind == duckdb.token_type.string_const))
    return found


def _text(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
