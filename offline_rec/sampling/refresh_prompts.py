"""Prompts to be sampled, with what rewards need: those of a dataset, each once, or those of a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from data_tools.errors import ConfigError, DataError
from data_tools.store.guard import check_expression
from offline_rec.sampling.sampled_rows import Task
from offline_rec.sampling.sampler import Prompt
from offline_rec.sampling.tasks import file_task

if TYPE_CHECKING:
    from data_tools.store.dataset import StoredDataset

ANSWERS = {"answers": "extra->'answers'"}
"""What is taken of a dataset where nothing else is said: the column that most rewards compare with."""


def dataset_prompts(
    ds: "StoredDataset",
    *,
    where: str | None = None,
    columns: Mapping[str, str] | None = None,
    chosen: Sequence[str] | None = None,
) -> Task:
    """The distinct prompts of the rows `where`, in the order of their hashes, or of the hashes `chosen`.

    `columns`: name -> SQL expression over `rollouts`; a prompt has the value of its first row that has one.
    """
    if where is not None:
        check_expression(where, "--where", subqueries=True)
    wanted = ANSWERS if columns is None else columns
    for name, expression in wanted.items():
        check_expression(expression, f"column {name}")
    listed = "".join(
        f", arg_min(CAST(to_json({expression}) AS VARCHAR), response_id) AS c{number}"
        for number, expression in enumerate(wanted.values())
    )
    query = f"""SELECT prompt_hash, arg_min(prompt, response_id) AS prompt,
            arg_min(tools, response_id) AS tools{listed}
        FROM rollouts WHERE prompt IS NOT NULL AND ({where or "true"}
        ) GROUP BY prompt_hash ORDER BY prompt_hash"""
    found = ds.sql(query)
    if chosen is not None:
        place = {key: row for row, key in enumerate(found["prompt_hash"].to_pylist())}
        found = found.take(pa.array([place[key] for key in chosen], pa.int64()))
    if not found.num_rows:
        raise DataError(f"{ds.path} has no prompts" + (f" where {where}" if where else ""), "see rec stats")
    values = {name: _parsed(found[f"c{number}"]) for number, name in enumerate(wanted)}
    if columns is None:
        values = {name: column for name, column in values.items() if any(v is not None for v in column)}
    texts, tools = found["prompt"].to_pylist(), found["tools"].to_pylist()
    return Task([Prompt(text, given) for text, given in zip(texts, tools, strict=True)], values)


def _parsed(column: pa.ChunkedArray) -> list[Any]:
    return [None if text is None else orjson.loads(text) for text in column.to_pylist()]


def read_prompts(
    source: str | Path, *, where: str | None = None, columns: Mapping[str, str] | None = None
) -> Task:
    """Prompts of a file or, where a directory is named, those that a dataset has for training."""
    import data_tools

    if not Path(source).is_dir():
        if where is not None or columns is not None:
            raise ConfigError(
                f"{source} is a file of prompts, which SQL does not see", "leave where and columns out"
            )
        return file_task(str(source))
    condition = "split = 'train'" + (f" AND ({where}\n)" if where else "")
    return dataset_prompts(data_tools.open(str(source)), where=condition, columns=columns)
