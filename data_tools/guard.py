"""Lets one SELECT through and nothing else, judged by DuckDB's own parser.

The statement type alone does not suffice: DuckDB takes COPY, INSERT, UPDATE and DELETE as the body of a CTE
and still calls the statement a SELECT, EXPLAIN ANALYZE runs what it explains, and query() holds a statement
in a string. So the parsed tree is walked, and only query nodes and known table functions pass.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from data_tools.errors import ConfigError

if TYPE_CHECKING:
    import duckdb

TABLE_FUNCTIONS = frozenset(
    [
        "duckdb_columns",
        "duckdb_functions",
        "duckdb_tables",
        "duckdb_types",
        "duckdb_views",
        "generate_series",
        "histogram",
        "histogram_values",
        "json_each",
        "json_tree",
        "pragma_table_info",
        "range",
        "repeat",
        "repeat_row",
        "summary",
        "unnest",
    ]
)
"""Table functions that read nothing but their arguments or the catalogue."""

_REFUSED_SCALARS = frozenset(
    [
        "getenv",
        "json_deserialize_sql",
        "json_execute_serialized_sql",
        "json_serialize_plan",
        "setval",
        "sleep_ms",
        "write_log",
    ]
)
_QUERY_NODES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
_FILE_ENDINGS = (".parquet", ".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".db", ".duckdb", ".gz", ".zst")
_STATEMENT_WORDS = frozenset(
    [
        "alter",
        "attach",
        "call",
        "checkpoint",
        "comment",
        "copy",
        "create",
        "deallocate",
        "delete",
        "detach",
        "drop",
        "execute",
        "export",
        "import",
        "insert",
        "install",
        "load",
        "merge",
        "pragma",
        "prepare",
        "reset",
        "set",
        "truncate",
        "update",
        "use",
        "vacuum",
    ]
)
_HINT = "allowed is one SELECT (also WITH, FROM, PIVOT, DESCRIBE, SUMMARIZE, or EXPLAIN of a SELECT)"


def check_select(query: str, con: "duckdb.DuckDBPyConnection | None" = None) -> str:
    """Return the statement to run for `query`, which must be one SELECT; ConfigError says what else it holds.

    `con` is any open connection, only used to parse; without one a fresh one is opened.
    """
    import duckdb

    if "\0" in query:
        raise ConfigError("the SQL text holds a NUL character", _HINT)
    if con is None:
        with duckdb.connect() as con:
            return check_select(query, con)
    text = _single_statement(query, con)
    inner, analyze = _strip_explain(text)
    _check_tree(inner, con)
    if inner is text:
        return text
    return f"EXPLAIN {'ANALYZE ' if analyze else ''}{inner}"


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
    tree = _parse(f"SELECT ({text}\n)", con, what)  # the newline ends a trailing comment before the bracket
    if not _is_one_expression(tree):
        raise ConfigError(f"{what}: {text!r} is not one expression", hint)
    if not subqueries and any("subquery" in part for part in _dicts(tree)):
        raise ConfigError(f"{what}: {text!r} holds a subquery", hint)
    _check_parts(tree)
    return text


def _is_one_expression(tree: dict[str, Any]) -> bool:
    """Return whether the parsed `SELECT (text)` is just that, so that `text` did not close the bracket
    itself.
    """
    if len(tree["statements"]) != 1:
        return False
    node = tree["statements"][0]["node"]
    others = ("modifiers", "where_clause", "group_expressions", "having", "qualify", "sample")
    return bool(
        node["type"] == "SELECT_NODE"
        and len(node["select_list"]) == 1
        and not node["select_list"][0]["alias"]
        and node["from_table"]["type"] == "EMPTY"
        and not any(node.get(part) for part in others)
    )


def _single_statement(query: str, con: "duckdb.DuckDBPyConnection") -> str:
    import duckdb

    try:
        statements = con.extract_statements(query)
    except (
        duckdb.Error,
        ValueError,
    ) as error:  # ValueError: a statement type that the Python client does not know
        raise ConfigError(f"SQL: {_first_line(error)}", _HINT) from error
    if len(statements) != 1:
        found = f"{len(statements)} statements" if statements else "no statement"
        raise ConfigError(f"the SQL text holds {found}, not one", _HINT)
    kind = statements[0].type.name
    if kind not in ("SELECT", "EXPLAIN", "MULTI"):
        raise ConfigError(f"a {kind} statement is refused", _HINT)
    return str(statements[0].query)


def _strip_explain(text: str) -> tuple[str, bool]:
    """Split `EXPLAIN [ANALYZE] [(options)] statement` into the statement and whether it is analysed."""
    words = _words(text)
    if not words or words[0][1] != "explain":
        return text, False
    at, analyze = 1, False
    if at < len(words) and words[at][1] in ("analyze", "analyse"):
        at, analyze = at + 1, True
    if (
        at + 1 < len(words)
        and words[at][1] == "("
        and words[at + 1][1] in ("analyze", "analyse", "format", "verbose")
    ):
        close = next((i for i in range(at, len(words)) if words[i][1] == ")"), len(words) - 1)
        analyze = analyze or any(word.startswith("analy") for _, word, _ in words[at:close])
        at = close + 1
    if at >= len(words):
        raise ConfigError("EXPLAIN of nothing", _HINT)
    return text.encode()[words[at][0] :].decode(), analyze


def _check_tree(text: str, con: "duckdb.DuckDBPyConnection") -> None:
    statements = con.extract_statements(text)
    if len(statements) != 1 or statements[0].type.name not in ("SELECT", "MULTI"):
        raise ConfigError("EXPLAIN is allowed for one SELECT only", _HINT)
    if statements[0].type.name == "MULTI":
        _check_words(text, con)
        return
    _check_parts(_parse(text, con, "SQL"))


def _parse(text: str, con: "duckdb.DuckDBPyConnection", what: str) -> dict[str, Any]:
    [(serialised,)] = con.execute("SELECT json_serialize_sql(?)", [text]).fetchall()
    tree: dict[str, Any] = json.loads(serialised)
    if tree["error"]:
        raise ConfigError(f"{what}: {tree['error_message']}", _HINT)
    return tree


def _dicts(tree: Any) -> Iterator[dict[str, Any]]:
    waiting = [tree]  # a stack: deep nesting must not end in a RecursionError
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def _check_parts(tree: Any) -> None:
    for part in _dicts(tree):
        kind = str(part.get("type", ""))
        if kind.endswith("_NODE") and kind not in _QUERY_NODES:
            raise ConfigError(f"{kind.split('_')[0]} inside a query is refused", _HINT)
        if kind == "TABLE_FUNCTION":
            _check_table_function(str(part["function"].get("function_name", "")))
        if kind == "BASE_TABLE":
            _check_table(str(part.get("table_name", "")))
        if part.get("class") == "FUNCTION" and str(part.get("function_name", "")).lower() in _REFUSED_SCALARS:
            raise ConfigError(f"the function {part['function_name']} is refused", _HINT)


def _check_table_function(name: str) -> None:
    if name.lower() not in TABLE_FUNCTIONS:
        raise ConfigError(f"the table function {name} is refused", "only the dataset's own views can be read")


def _check_table(name: str) -> None:
    if name.lower().endswith(_FILE_ENDINGS) or any(mark in name for mark in "/\\*:"):
        raise ConfigError(f"reading the file {name!r} is refused", "only the dataset's own views can be read")


def _check_words(text: str, con: "duckdb.DuckDBPyConnection") -> None:
    """Judge a PIVOT, which the parser expands and cannot serialise, by its words alone, strictly."""
    words = _words(text)
    names = con.execute("SELECT DISTINCT function_name FROM duckdb_functions() WHERE function_type = 'table'")
    refused = {row[0] for row in names.fetchall()} - TABLE_FUNCTIONS | _REFUSED_SCALARS
    for at, (_, word, is_keyword) in enumerate(words):
        if is_keyword and word in _STATEMENT_WORDS:
            raise ConfigError(f"{word.upper()} inside a PIVOT is refused", _HINT)
        follows = words[at + 1][1] if at + 1 < len(words) else ""
        if follows == "(" and word in refused:
            raise ConfigError(f"the function {word} is refused", _HINT)
        _check_table(word if word.startswith(("'", '"')) else "")


def _words(text: str) -> list[tuple[int, str, bool]]:
    """Return (offset in UTF-8 bytes, lower-case word without identifier quotes, is a keyword); comments are
    left out.
    """
    import duckdb

    tokens, content = duckdb.tokenize(text), text.encode()
    ends = [start for start, _ in tokens[1:]] + [len(content)]
    found = []
    for (start, kind), end in zip(tokens, ends, strict=True):
        if kind == duckdb.token_type.comment:
            continue
        word = content[start:end].decode().strip().lower()
        found.append((start, word.strip('"'), kind == duckdb.token_type.keyword))
    return found


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
