"""Logs of tests: bytes in, rows and rejects out, with or without a dataset."""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

import data_tools
from data_tools import readers
from data_tools.collecting.identity import Scope
from data_tools.collecting.pipeline import Processed, Settings, process
from data_tools.collecting.reasons import Reject
from data_tools.collecting.report import CollectReport
from data_tools.logs.log import Log
from data_tools.logs.records import fingerprint


def lines(*records: dict[str, Any]) -> bytes:
    """JSON lines, with NaN and Infinity as Python writes them."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def draw(**values: Any) -> dict[str, Any]:
    """One plain row: a prompt, a response, token ids with log-probs and a reward, unless said otherwise."""
    filled = {
        "prompt": "1+1=",
        "response": "2",
        "response_ids": [7, 2],
        "behavior_logprobs": [-0.5, -0.25],
        "reward": 1.0,
    }
    return {key: value for key, value in (filled | values).items() if value is not ...}


def log_of(data: bytes, name: str = "log.jsonl") -> Log:
    """A log in memory."""
    return Log(name, lambda: io.BytesIO(data))


def processed(data: bytes, *, tolerant: bool = False) -> list[Processed]:
    """The chunks of a log after types, rules and identity, without a dataset."""
    log = log_of(data)
    reader = readers.detect(log)
    assert reader is not None, readers.unknown(log).message
    scope = Scope(reader.name, fingerprint(log), log.name)
    return [process(chunk, scope, Settings(tolerant=tolerant)) for chunk in reader.chunks(log)]


def table_of(chunks: Iterable[Processed]) -> pa.Table:
    """Their rows."""
    return pa.concat_tables([chunk.rows.table for chunk in chunks])


def rows_of(data: bytes) -> list[dict[str, Any]]:
    """The rows of a log as dictionaries."""
    return table_of(processed(data)).to_pylist()


def row_of(record: dict[str, Any]) -> dict[str, Any]:
    """The row that one record becomes."""
    [row] = rows_of(lines(record))
    return row


def rejects_of(data: bytes) -> list[Reject]:
    """The rejects of a log."""
    return [reject for chunk in processed(data) for reject in chunk.rejects]


def reason_of(record: dict[str, Any]) -> str:
    """Why one record is refused."""
    [reject] = rejects_of(lines(record))
    return reject.reason


def adds_up(report: CollectReport) -> bool:
    """Whether every row read is kept, a duplicate or rejected."""
    return all(
        log.read == log.kept + log.duplicate + log.rejected.total() for log in [*report.logs, report.total]
    )


def collected(folder: Path, *sources: Path | str, **options: Any) -> CollectReport:
    """Collect into the dataset `folder`/ds and check that the counts add up."""
    report = data_tools.collect([str(source) for source in sources], str(folder / "ds"), **options)
    assert adds_up(report)
    return report


def dataset(folder: Path) -> "data_tools.Dataset":
    """The dataset that `collected` fills."""
    return data_tools.open(str(folder / "ds"))


def rollouts(
    folder: Path, columns: str = "*", order: str = "source_file, source_row"
) -> list[dict[str, Any]]:
    """Its rows."""
    return dataset(folder).sql(f"SELECT {columns} FROM rollouts ORDER BY {order}").to_pylist()
