"""Langfuse: observations (v2 or older) and traces, with scores from a file beside them, joined by id.

A score of an observation is its response's. One of a whole trace is its response's too where the trace holds
a single one; else it stays in `extra`. Categories and texts are no rewards whatever number is beside them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from data_tools.collecting.coerce import Unreadable, read_number
from data_tools.logs.records import samples
from data_tools.readers.base import Carries, Log, Passed, Refused
from data_tools.readers.bodies import answer, asked
from data_tools.readers.exchange import Object, decoded
from data_tools.readers.scores import Member, Score
from data_tools.readers.traced import NOT_A_CALL, Call, TracedReader, other_fields, own_columns

OF_OBSERVATION = {"type", "start_time", "trace_id", "parent_observation_id"}
OF_SCORE = {"name", "value", "data_type", "trace_id"}
OF_TRACE = {"timestamp", "input", "output", "bookmarked", "public"}
NUMBERS = ("NUMERIC", "BOOLEAN")
USED = ("input", "output", "model_parameters", "start_time", "timestamp", "provided_model_name", "model")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")


class LangfuseReader(TracedReader):
    """One record is one observation, trace or score, as exported or as its API gives them."""

    name = "langfuse"
    title = "Langfuse observations, traces and scores (JSONL, JSON, CSV, Parquet)"
    carries = Carries(
        prompt="yes", group="equal prompts", reward="scores, joined by id", version="metadata", time="yes"
    )
    marks = (b"data_type", b"dataType")

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log of observations, traces or scores."""
        return any(isinstance(record, dict) and _kind(_named(record)) is not None for record in samples)

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Find out about scores; leave out traces, which only repeat the observations beside them."""
        kinds = {
            log: {_kind(_named(record)) for record in samples(log) if isinstance(record, dict)}
            for log in logs
        }
        calls = [log for log in logs if "observation" in kinds[log]]
        traces = [log for log in logs if kinds[log] == {"trace"}] if calls else []
        for at, log in enumerate(traces):
            calls[0].companions[f"traces {at + 1}" if at else "traces"] = log
        order = sorted((log for log in logs if log not in traces), key=lambda log: kinds[log] == {"score"})
        return super().plan(order)

    def kept_scores(self, record: Any) -> Iterable[Score]:
        """Yield the score that a record is."""
        fields = _named(record)
        if _kind(fields) != "score":
            return
        value = fields.get("value")
        if str(fields.get("data_type")).upper() in NUMBERS:
            with suppress(Unreadable):
                value = read_number(float(value) if isinstance(value, bool) else value)
        else:
            value = fields.get("string_value") or str(value)
        of = next((fields[name] for name in ("observation_id", "trace_id") if fields.get(name)), "")
        at = fields.get("updated_at") or fields.get("timestamp")
        yield Score(str(fields.get("name")), value, str(of), _text(fields.get("id")), str(at or ""))

    def members(self, record: Any) -> Iterable[Member]:
        """Yield where an observation or trace is."""
        fields = _named(record)
        kind, identity, trace = _kind(fields), _text(fields.get("id")), _text(fields.get("trace_id"))
        if kind in ("observation", "trace") and identity:
            is_call = kind == "trace" or fields.get("type") == "GENERATION"
            yield Member(identity, trace, is_call, not fields.get("parent_observation_id"))

    def calls(self, record: Any, log: Log) -> Iterator[Call | Score | Refused | Passed]:
        """Yield the call that an observation or trace is, or the score."""
        fields = _named(record)
        kind = _kind(fields)
        if kind == "score":
            yield from self.kept_scores(record)
            return
        if kind is None or (kind == "observation" and fields["type"] != "GENERATION"):
            yield Passed(NOT_A_CALL)
            return
        if fields.get("level") == "ERROR":
            raise Refused("failed_call", str(fields.get("status_message") or "level ERROR"))
        parameters = decoded(fields.get("model_parameters"))
        request = {**(parameters if isinstance(parameters, dict) else {}), **asked(fields.get("input"))}
        body, choices = answer(fields.get("output"), structured=True)
        metadata = decoded(fields.get("metadata"))
        columns = own_columns(metadata) | {
            "run": fields.get("project_id") or self.name,
            "sampled_at": fields.get("start_time") or fields.get("timestamp"),
            "policy": fields.get("provided_model_name") or fields.get("model"),
        }
        yield Call(_text(fields.get("id")), request, body, choices, columns, other_fields(fields, USED))


def _named(record: Any) -> Object:
    """The record with names as exports spell them: the API writes traceId for trace_id."""
    if not isinstance(record, dict):
        return {}
    if "traceId" not in record and "dataType" not in record and "createdAt" not in record:
        return record
    return {_HUMP.sub("_", name).lower(): value for name, value in record.items()}


def _kind(fields: Object) -> str | None:
    names = fields.keys()
    if names >= OF_OBSERVATION:
        return "observation"
    if names >= OF_SCORE and ("observation_id" in names or "source" in names):
        return "score"
    return "trace" if names >= OF_TRACE and "trace_id" not in names else None


def _text(value: Any) -> str | None:
    return str(value) if value not in (None, "") else None
