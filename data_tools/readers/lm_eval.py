"""Samples of lm-eval-harness (`--log_samples`): one file a task, one record a document and filter.

Records of one document that differ in their filter hold the same responses again: they are one set of rows,
judged under several filters. A metric judges what a filter made of all repeats, so with several repeats it is
the reward of none. Tasks that score given texts sampled nothing, and are refused.
"""

import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from data_tools.collecting.ids import choice_digest, digest
from data_tools.logs.jsontext import canonical, dump
from data_tools.logs.records import Block, blocks, flat
from data_tools.readers.base import (
    Carries,
    Chunk,
    ChunkBuilder,
    Log,
    Passed,
    Reader,
    Refused,
    Row,
    first_object,
    without,
)  # fmt: skip

Object = dict[str, Any]

OF_SAMPLE = {"doc_id", "arguments", "resps", "filtered_resps"}
USED = (*sorted(OF_SAMPLE), "filter", "metrics")
_NAME = re.compile(
    r"samples_(?P<task>[^/]+)_(?P<day>\d{4}-\d\d-\d\d)T(?P<time>\d\d-\d\d-\d\d(?:\.\d+)?)\.json"
)
_WORD = re.compile(r"\W+")
_MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@dataclass(slots=True)
class Request:
    """One prompt of a document, how it was sampled, and what came back, a text a repeat."""

    prompt: Any
    sampling: Object
    responses: list[Any]


@dataclass(slots=True)
class Sample:
    """One record: what was asked and answered, equal under every filter, and how it was judged."""

    key: bytes
    requests: list[Request]
    filter: str
    scores: Object
    filtered: Any


class LmEvalReader(Reader):
    """One record is all responses to one document, judged under one filter."""

    name = "lm-eval"
    title = "lm-eval-harness samples of generation tasks (JSONL)"
    carries = Carries(
        prompt="yes", group="document", reward="the metric, without repeats", time="of the file's name"
    )

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record is a sample."""
        return first_object(samples).keys() >= OF_SAMPLE

    def chunks(self, log: Log) -> Iterator[Chunk]:
        """Look through the log for what belongs together, then give each response with all its scores."""
        book = _Book(log)
        for first, block in _blocks(log):
            made = ChunkBuilder(rejects=block.rejects, input_rows=block.input_rows)
            made.notes.update(block.notes)
            for place, (record, row) in enumerate(zip(block.records, block.rows, strict=True), first):
                for content, values in _rows(book, place, record, log):
                    made.add(row, content, values, record)
            chunk = made.chunk()
            chunk.names = {"reward": next(iter(book.names))} if len(book.names) == 1 else {}
            chunk.details["several_scores"] = ", ".join(sorted(book.names))
            yield chunk


def _blocks(log: Log) -> Iterator[tuple[int, Block]]:
    """The log's records, with the place of the first of each block among all that can be read."""
    first = 1
    for block in map(flat, blocks(log)):
        yield first, block
        first += len(block.records)


def _rows(book: "_Book", place: int, record: Any, log: Log) -> Iterator[tuple[bytes, Row]]:
    try:
        sample = _sample(record)
    except Refused as refused:
        yield b"", refused
        return
    except _MALFORMED as error:
        yield b"", Refused("bad_record", f"not an lm-eval sample ({type(error).__name__}: {error})")
        return
    judged = book.judged(place)
    if not judged:
        yield b"", Passed("merged_filter")
        return
    shared, extra = _shared(record, log), _extra(record, log, judged)
    scores = {book.name(name, one.filter): value for one in judged for name, value in one.scores.items()}
    responses = [(at, text) for at, request in enumerate(sample.requests) for text in request.responses]
    for place, (at, text) in enumerate(responses):
        request = sample.requests[at]
        row = {**shared, "prompt": request.prompt, "response": text, **_sampling(request.sampling, extra)}
        if len(sample.requests) > 1:
            row["group_id"] = f"{row['group_id']}/{at}"
        _judge(row, scores, shared=len(responses) > 1, several=len(book.names) > 1)
        yield choice_digest(sample.key, place), row


def _judge(row: Object, scores: Object, *, shared: bool, several: bool) -> None:
    """Give a row its scores: those of all responses together are not its own; of several none is chosen."""
    if not scores:
        return
    row["extra"]["shared_scores" if shared else "scores"] = scores
    if shared:
        row["flags"] = ["shared_reward"]
    elif several:
        row["notes"] = ["several_scores"]
    else:
        row["reward"] = next(iter(scores.values()))


def _sample(record: Any) -> Sample:
    """Take a record apart; raises Refused where it is no sample of a generation task."""
    if not isinstance(record, dict) or not record.keys() >= OF_SAMPLE:
        raise Refused("bad_record", "no lm-eval sample")
    asked = [_arguments(one) for one in _listed(record["arguments"])]
    if not asked or not all(len(one) > 1 and isinstance(one[1], dict) for one in asked):
        raise Refused("not_sampled")
    answered = record["resps"]
    if not isinstance(answered, list) or len(answered) != len(asked):
        raise Refused("bad_record", "resps does not have one list for each request")
    requests = [
        Request(_prompt(one[0]), one[1], back if isinstance(back, list) else [back])
        for one, back in zip(asked, answered, strict=True)
    ]
    if not any(request.responses for request in requests):
        raise Refused("no_response", "resps is empty")
    key = digest("lm-eval", canonical([record["doc_id"], record["arguments"], record["resps"]]))
    name = record.get("filter")
    return Sample(
        key, requests, name if isinstance(name, str) else "none", _scores(record), record["filtered_resps"]
    )


def _listed(arguments: Any) -> list[Any]:
    return list(arguments.values()) if isinstance(arguments, dict) else list(arguments)


def _arguments(request: Any) -> list[Any]:
    """Prompt and generation settings; {"arg_0", "arg_1"}, or a list in older files."""
    return list(request.values()) if isinstance(request, dict) else list(request)


def _prompt(logged: Any) -> Any:
    """The prompt of a request; one that was a chat is JSON text in a list of its own."""
    return (
        logged[0] if isinstance(logged, list) and len(logged) == 1 and isinstance(logged[0], str) else logged
    )


def _scores(record: Object) -> Object:
    """The metrics of a record that are numbers."""
    names = record.get("metrics")
    if not isinstance(names, list):
        names = [name for name in record if name not in USED]
    found = {name: record.get(name) for name in names if isinstance(name, str) and name != "doc"}
    return {name: value for name, value in found.items() if isinstance(value, bool | int | float)}


def _shared(record: Object, log: Log) -> Object:
    """Columns that all responses of a document have in common."""
    named = _NAME.search(log.name)
    clock = named["time"].replace("-", ":") if named else ""
    parts = [record["doc_id"], record.get("doc_hash")]
    return {
        "group_id": "/".join(str(part) for part in parts if part is not None),
        "sampled_at": f"{named['day']}T{clock}" if named else None,
    }


def _extra(record: Object, log: Log, judged: "list[_Judged]") -> Object:
    """What is no column and no score, with everything that any filter made of the responses."""
    named = _NAME.search(log.name)
    metrics = {name for one in judged for name in one.scores}
    extra = without(record, *USED, *metrics)
    extra["filtered_resps"] = {one.filter: one.filtered for one in judged}
    return extra | ({"task": named["task"]} if named else {})


def _sampling(settings: Object, extra: Object) -> Object:
    """Sampling parameters of a request; `do_sample` false is a temperature of 0."""
    row = {name: settings.get(name) for name in ("temperature", "top_p", "top_k")}
    if settings.get("do_sample") is False:
        row["temperature"] = 0.0
    return {**row, "extra": {**extra, "generation": without(settings, *row)}}


@dataclass(slots=True)
class _Judged:
    filter: str
    scores: Object
    filtered: Any


class _Book:
    """Which records of a log hold the same responses, and how those were judged under each filter.

    Equal responses under one filter again (a log that was appended to) are another draw. All of it lies in a
    temporary SQLite database on disk; memory is bounded by its cache of 32 MB.
    """

    def __init__(self, log: Log) -> None:
        self._db = sqlite3.connect("")
        self._db.executescript(
            """PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF; PRAGMA cache_size = -32000;
            CREATE TABLE records (place INTEGER PRIMARY KEY, key BLOB, filter TEXT, judged TEXT);"""
        )
        self._pairs: dict[tuple[str, str], None] = {}
        self._db.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", self._entries(log))
        self._db.executescript(
            """CREATE TABLE draws AS SELECT place, key, judged, filter,
                row_number() OVER (PARTITION BY key, filter ORDER BY place) AS draw FROM records;
            CREATE TABLE leaders AS SELECT min(place) AS place, key, draw FROM draws GROUP BY key, draw;
            CREATE INDEX leader_of_place ON leaders (place);
            CREATE INDEX draws_of_key ON draws (key, draw);"""
        )
        self.names = {self.name(*pair) for pair in self._pairs}

    def _entries(self, log: Log) -> Iterator[tuple[int, bytes, str, str]]:
        for first, block in _blocks(log):
            for place, record in enumerate(block.records, first):
                try:
                    sample = _sample(record)
                except (Refused, *_MALFORMED):
                    continue
                self._pairs |= dict.fromkeys((name, sample.filter) for name in sample.scores)
                yield place, sample.key, sample.filter, dump([sample.scores, sample.filtered])

    def name(self, metric: str, filter: str) -> str:
        """The name of a score: the metric, with the filter where there are several; `--reward` takes it."""
        return metric if len({name for _, name in self._pairs}) < 2 else _WORD.sub("_", f"{metric}_{filter}")

    def judged(self, place: int) -> list[_Judged]:
        """How the responses of a record were judged; nothing if an earlier record gave them already."""
        query = """SELECT filter, judged FROM draws JOIN leaders USING (key, draw)
            WHERE leaders.place = ? ORDER BY draws.place"""
        rows = self._db.execute(query, [place])
        return [_Judged(name, *orjson.loads(text)) for name, text in rows]
