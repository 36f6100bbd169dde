"""What an evaluation asks: the prompts of a file or of a dataset, with what is known about each."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import orjson

from data_tools.collecting.prompt_files import read_prompts
from data_tools.errors import DataError
from data_tools.schema import ROLLOUTS
from data_tools.store.guard import check_expression
from offline_rec.sampling.sampled_rows import REASON, Task
from offline_rec.sampling.sampler import Prompt

if TYPE_CHECKING:
    from data_tools.store.dataset import StoredDataset

HELD_OUT = "split = 'holdout'"
"""The rows whose prompts are asked of a dataset unless told: those that no fit has seen."""


def file_task(source: str) -> Task:
    """The prompts of a file; its other fields are columns, but those named as columns of a dataset.

    Raises DataError for a file that holds anything but prompts.
    """
    rows = read_prompts(source)
    return _task([Prompt(row.prompt, row.tools) for row in rows], [row.fields for row in rows])


def dataset_task(dataset: "StoredDataset", where: str | None = None) -> Task:
    """The prompts of a dataset's rows `where` (an SQL condition; `HELD_OUT` by default), each once.

    Columns are the fields of `extra` that are the same in all those rows of the prompt. Raises DataError if
    there is no such row, ConfigError for a condition that is none.
    """
    condition = HELD_OUT if where is None else where
    check_expression(condition, "--where", subqueries=True)
    query = f"""SELECT prompt_hash, prompt, tools, extra FROM rollouts
        WHERE prompt IS NOT NULL AND ({condition}
        ) ORDER BY prompt_hash, response_id"""
    prompts: list[Prompt] = []
    fields: list[dict[str, Any]] = []
    for _, rows in groupby(_rows(dataset, query), key=itemgetter("prompt_hash")):
        first, *rest = rows
        shared = orjson.loads(first["extra"] or "{}")
        for other in (orjson.loads(row["extra"] or "{}") for row in rest):
            shared = {name: value for name, value in shared.items() if other.get(name) == value}
        prompts.append(Prompt(first["prompt"], first["tools"]))
        fields.append(shared)
    if not prompts:
        raise DataError(
            f"{dataset.path} has no prompt where {condition}",
            "--where says which rows to take; --where true takes all",
        )
    return _task(prompts, fields)


def _rows(dataset: "StoredDataset", query: str) -> Iterator[dict[str, Any]]:
    for batch in dataset.reader(query, 4096):
        yield from batch.to_pylist()


def _task(prompts: list[Prompt], fields: Sequence[dict[str, Any]]) -> Task:
    """Prompts with those fields that the samples have no column of their own for."""
    names = dict.fromkeys(name for one in fields for name in one)
    kept = [name for name in names if name not in ROLLOUTS.names and name != REASON]
    return Task(prompts, {name: [one.get(name) for one in fields] for name in kept})
