"""OpenTelemetry: spans of model calls, their messages and evaluations, as OTLP JSON, one export a line.

A record holds many spans, or many log records. Evaluations and the messages of a call are events of its span,
or log records that name the span, in the same log or another one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from data_tools.logs.jsontext import dump
from data_tools.logs.records import looked_through
from data_tools.readers.base import Carries, Log, Passed, Refused
from data_tools.readers.exchange import Object
from data_tools.readers.genai_spans import (
    CONTENT,
    DETAILS,
    EVALUATION,
    Events,
    genai_choices,
    genai_request,
    is_genai_call,
    is_message,
)
from data_tools.readers.joined import Joined, Keyed
from data_tools.readers.openinference import SPAN_CONTENT, SPAN_KIND, span_choices, span_request, tree
from data_tools.readers.otlp import (
    attributes_of,
    event_name,
    event_of,
    events_of,
    key_of,
    log_records_of,
    nanoseconds,
    spans_of,
)
from data_tools.readers.scores import Member, Score, ScoreBook
from data_tools.readers.traced import MALFORMED, NOT_A_CALL, Call, Told, TracedReader, own_columns

_FAILED = (2, "2", "STATUS_CODE_ERROR")
_NAMES = {"trace_id": "traceId", "span_id": "spanId", "name": "name"}
_NO_SPAN = "a message of a call whose span is not here: collect spans and log records in one command"


class SpanBook(ScoreBook):
    """Scores of spans, and the messages of spans that stand in log records, by trace and span.

    The logs are looked through for messages once a span lacks its own, and for spans once a message is met.
    """

    def __init__(self, logs: Sequence[Log]) -> None:
        super().__init__()
        # The logs hold this book: without copies of them it would hold itself, and be closed by any thread.
        copies = [replace(log, shared=None) for log in logs]
        self._messages, self._calls = Joined(copies, _messages), Joined(copies, _calls)

    def messages(self, span: Object) -> Events:
        """The messages of a span by time, in the order of the logs where that is equal."""
        told = {dump(found.value): found.value for found in self._messages.of(key_of(span))}
        return [(name, body) for _, _, name, body in sorted(told.values(), key=lambda value: value[0])]

    def is_of_a_call(self, logged: Object) -> bool:
        """Whether a log record names a span that is a call."""
        return bool(self._calls.of(key_of(logged)))


class OtelReader(TracedReader):
    """One record is one export: spans by resource and scope, or log records."""

    name = "otel"
    title = "OpenTelemetry GenAI spans, messages and evaluations, also OpenInference spans (OTLP JSON)"
    carries = Carries(
        prompt="opt-in, also in log records",
        group="choices of a call, else equal prompts",
        reward="evaluation events",
        version="attributes",
        time="yes",
    )
    marks = (EVALUATION.encode(),)

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log of OTLP exports of spans, or of log records."""
        found = [record for record in samples if isinstance(record, dict)]
        return any("resourceSpans" in record or "resourceLogs" in record for record in found)

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Log records behind the spans."""
        return sorted(super().plan(logs), key=lambda log: b'"resourceSpans"' not in log.head)

    def book(self, logs: Sequence[Log]) -> SpanBook:
        """Where scores and messages are looked up."""
        return SpanBook(logs)

    def own_scores(self, record: Any) -> Iterable[Score]:
        """Yield the evaluations in spans that are calls."""
        return (
            score
            for span in spans_of(record)
            if _is_call(attributes_of(span))
            for score in _evaluations(span)
        )

    def kept_scores(self, record: Any) -> Iterable[Score]:
        """Yield the evaluations in other spans, and those in log records."""
        for span in spans_of(record):
            if not _is_call(attributes_of(span)):
                yield from _evaluations(span)
        for logged in log_records_of(record):
            if event_name(logged) == EVALUATION:
                yield _evaluation(attributes_of(logged), key_of(logged))

    def members(self, record: Any) -> Iterable[Member]:
        """Yield where spans are, and calls that may have no span."""
        for span in spans_of(record):
            yield Member(
                key_of(span),
                str(span.get("traceId")),
                _is_call(attributes_of(span)),
                not span.get("parentSpanId"),
            )
        for logged in log_records_of(record):
            if _is_whole_call(logged) and logged.get("traceId"):
                yield Member(key_of(logged), str(logged["traceId"]))

    def calls(self, record: Any, log: Log) -> Iterator[Told]:
        """Yield the calls among the spans, and what log records are."""
        book: SpanBook = log.shared
        for span in spans_of(record):
            try:
                yield self._call(span, attributes_of(span), events_of(span), book)
            except Refused as refused:
                yield refused
        for logged in log_records_of(record):
            try:
                yield self._logged(logged, book)
            except Refused as refused:
                yield refused

    def _logged(self, logged: Object, book: SpanBook) -> Told:
        """What a log record is: an evaluation, a message of a call, or all that there is of a call."""
        if event_name(logged) == EVALUATION:
            return _evaluation(attributes_of(logged), key_of(logged))
        if not _is_message(logged):
            return Passed(NOT_A_CALL)
        if book.is_of_a_call(logged):
            return Passed("joined_message")
        if not _is_whole_call(logged):
            raise Refused("unmatched_message", _NO_SPAN)
        _, fields = event_of(logged)
        return self._call({**logged, "startTimeUnixNano": _time(logged)}, fields, [], book)

    def _call(self, span: Object, attributes: Object, events: Events, book: "SpanBook") -> Call | Passed:
        if not _is_call(attributes):
            return Passed(NOT_A_CALL)
        status = span.get("status")
        if isinstance(status, dict) and status.get("code") in _FAILED:
            raise Refused(
                "failed_call", str(status.get("message") or attributes.get("error.type") or "error")
            )
        request, choices = _said(attributes, events)
        if not choices or "messages" not in request:
            request, choices = _said(attributes, [*events, *book.messages(span)])
        if not choices and attributes.get("error.type"):
            raise Refused("failed_call", str(attributes["error.type"]))
        if not choices:
            raise Refused("no_response", "neither the span nor a log record has content: it is opt-in")
        columns = own_columns(attributes) | {"run": self.name}
        columns["sampled_at"] = nanoseconds(span.get("startTimeUnixNano"))
        columns["policy"] = attributes.get("gen_ai.response.model") or request.get("model")
        spoken = SPAN_CONTENT if SPAN_KIND in attributes else CONTENT
        kept = {name: value for name, value in attributes.items() if not name.startswith(spoken)}
        rest = {name: span.get(named) for name, named in _NAMES.items()} | kept
        return Call(_identity(span), request, {}, choices, columns, rest, list(_evaluations(span)))


def _said(attributes: Object, events: Events) -> tuple[Object, list[Object]]:
    """Request and choices of a call, by the conventions that its span follows."""
    if SPAN_KIND in attributes:
        about = tree(attributes)
        return span_request(about), span_choices(about)
    told = _with_details(attributes, events)
    return genai_request(told, events), genai_choices(told, events)


def _with_details(attributes: Object, events: Events) -> Object:
    """Attributes with those of events that hold the content of the call."""
    made = dict(attributes)
    for name, body in events:
        if name != EVALUATION:
            made |= {key: value for key, value in body.items() if key.startswith(CONTENT)}
    return made


def _is_call(attributes: Object) -> bool:
    kind = attributes.get(SPAN_KIND)
    return kind == "LLM" if kind is not None else is_genai_call(attributes)


def _is_message(logged: Object) -> bool:
    return is_message(event_name(logged))


def _is_whole_call(logged: Object) -> bool:
    """Whether a log record tells all of a call, whose span may never have been sampled."""
    if event_name(logged) != DETAILS:
        return False
    _, fields = event_of(logged)
    return is_genai_call(fields) and bool(fields.get("gen_ai.output.messages"))


def _messages(log: Log) -> Keyed:
    """Messages in log records by their span: time, how many like it stood before it, name and fields.

    The number is that within one export: of another export, the same message is the same one sent again.
    """
    for record in looked_through(log, (b'"resourceLogs"',)):
        seen: Counter[str] = Counter()
        with suppress(*MALFORMED):
            for logged in filter(_is_message, log_records_of(record)):
                key, message = key_of(logged), event_of(logged)
                before = f"{key} {dump(message)}"
                yield key, [_time(logged), seen[before], *message]
                seen[before] += 1


def _calls(log: Log) -> Keyed:
    """Spans that are calls."""
    for record in looked_through(log, (b'"resourceSpans"',)):
        with suppress(*MALFORMED):
            yield from ((key_of(span), True) for span in spans_of(record) if _is_call(attributes_of(span)))


def _time(logged: Object) -> int:
    """When an event was, or was seen; 0 if nobody says."""
    times = (nanoseconds(logged.get(name)) for name in ("timeUnixNano", "observedTimeUnixNano"))
    return next((time for time in times if type(time) is int and time > 0), 0)


def _identity(span: Object) -> str | None:
    return key_of(span) if span.get("traceId") and span.get("spanId") else None


def _evaluations(span: Object) -> Iterator[Score]:
    for name, body in events_of(span):
        if name == EVALUATION:
            yield _evaluation(body, key_of(span))


def _evaluation(body: Object, of: str) -> Score:
    value = body.get("gen_ai.evaluation.score.value")
    label = body.get("gen_ai.evaluation.score.label")
    return Score(str(body.get("gen_ai.evaluation.name")), label if value is None else value, of)
