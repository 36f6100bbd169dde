"""The rows of both sides as one table of scalars, which spills to disk where it does not fit."""

from typing import TYPE_CHECKING

from data_tools.errors import DataError
from data_tools.store.connection import open_duckdb
from data_tools.store.sql_errors import sql_errors

if TYPE_CHECKING:
    import duckdb

    from data_tools.drift.sides import Side

MEASURES = {
    "reward": "reward",
    "response_tokens": "n_tokens",
    "response_characters": "CASE WHEN n_tokens IS NULL THEN length(response) END",
    "prompt_tokens": "n_prompt_tokens",
    "logprob": "behavior_logprob",
    # Most rows have no mask, which takes no reading.
    "logprob_per_token": "behavior_logprob / nullif(coalesce(list_sum(loss_mask), n_tokens), 0)",
}
"""What is compared as numbers, an expression over `rollouts` each; characters only where there are no ids."""

MIXES = {
    "policy": "coalesce(policy, 'unknown')",
    "policy_version": "coalesce(policy, 'unknown') || coalesce(':' || policy_version, '')",
    "finish_reason": "coalesce(finish_reason, 'unknown')",
    "logprob_kind": "logprob_kind",
}
"""What is compared as shares of rows, by category."""

_COLUMNS = ", ".join(
    [
        *(f"CAST({expression} AS DOUBLE) AS {name}" for name, expression in MEASURES.items()),
        *(f"{expression} AS {name}" for name, expression in MIXES.items()),
    ]
)
_SCALARS = """SELECT {second} AS second, prompt_hash AS prompt, hash(group_id) AS grp, {columns}
    FROM rollouts WHERE {condition}"""

CHUNK_ROWS = 65_536


def both(first: "Side", second: "Side", where: str | None) -> "duckdb.DuckDBPyConnection":
    """A connection with the table `sides`: a row a response, `second` tells its side.

    DataError if a side has no row.
    """
    con = open_duckdb()
    try:
        for number, side in enumerate((first, second)):
            _add(con, side, where, second=bool(number))
    except BaseException:
        con.close()
        raise
    return con


def _add(con: "duckdb.DuckDBPyConnection", side: "Side", where: str | None, *, second: bool) -> None:
    condition = side.condition if where is None else f"{side.condition} AND ({where}\n)"
    query = _SCALARS.format(second=str(second).lower(), columns=_COLUMNS, condition=condition)
    with side.dataset.connect() as own, sql_errors(side.named):
        con.register("_part", own.sql(query).to_arrow_reader(CHUNK_ROWS))
        con.execute(f"{'INSERT INTO sides' if second else 'CREATE TABLE sides AS'} FROM _part")
    con.unregister("_part")
    if not con.execute("SELECT count(*) FROM sides WHERE second = $side", {"side": second}).fetchall()[0][0]:
        raise DataError(f"{side.named} selects no row", "see what there is: rec stats DATASET")
