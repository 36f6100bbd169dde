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

if TYPE_CHECKING:
    from data_tools.store.dataset import StoredDataset

ANSWERS = {"answers": "extra->'answers'"}
"""What is taken of a dataset where nothing else is said: the column that most rewards compare with."""

PROMPT_FIELDS = ("prompt", "messages", "question", "problem")
"""What a file may call its prompts, the surest first."""


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


def file_prompts(file: str | Path) -> Task:
    """The prompts of a JSONL, JSON, CSV or Parquet file, a row each; `tools` and all other fields beside.

    A prompt is text or a list of chat messages. DataError names the row that has none.
    """
    rows = _records(Path(file))
    if not rows:
        raise DataError(f"{file} holds no prompts")
    name = next((name for name in PROMPT_FIELDS if name in rows[0]), None)
    if name is None:
        raise DataError(f"{file}: row 0 has none of {', '.join(PROMPT_FIELDS)}", "name the field prompt")
    prompts = []
    for number, row in enumerate(rows):
        if not row.get(name):
            raise DataError(f"{file}: row {number} has no {name}")
        prompts.append(Prompt(_text(row[name]), _text(row.get("tools"))))
    others = dict.fromkeys(key for row in rows for key in row if key not in (name, "tools"))
    return Task(prompts, {key: [row.get(key) for row in rows] for key in others})


def _text(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()


def _records(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        table: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return table
    if path.suffix == ".csv":
        from pyarrow import csv

        rows: list[dict[str, Any]] = csv.read_csv(path).to_pylist()
        return rows
    content = path.read_bytes()
    try:
        whole = content.lstrip().startswith(b"[")
        found = (
            orjson.loads(content) if whole else [orjson.loads(line) for line in content.splitlines() if line]
        )
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path} cannot be read: {error}", "give JSONL, JSON, CSV or Parquet") from error
    if not all(isinstance(row, dict) for row in found):
        raise DataError(f"{path}: a prompt is an object with the field prompt")
    return found


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
        return file_prompts(source)
    condition = "split = 'train'" + (f" AND ({where}\n)" if where else "")
    return dataset_prompts(data_tools.open(str(source)), where=condition, columns=columns)
