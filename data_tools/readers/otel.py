"""OpenTelemetry: spans of model calls and evaluations of them, as OTLP JSON, one export a line.

A record holds many spans. Evaluations are events of a span, or log records that name it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from data_tools.readers.base import Carries, Log, Passed, Refused
from data_tools.readers.exchange import Object
from data_tools.readers.genai_spans import (
    CONTENT,
    EVALUATION,
    Events,
    genai_choices,
    genai_request,
    is_genai_call,
)
from data_tools.readers.openinference import SPAN_CONTENT, SPAN_KIND, span_choices, span_request, tree
from data_tools.readers.scores import Member, Score
from data_tools.readers.traced import NOT_A_CALL, Call, TracedReader, own_columns

_FAILED = (2, "2", "STATUS_CODE_ERROR")


class OtelReader(TracedReader):
    """One record is one export: spans by resource and scope, or log records."""

    name = "otel"
    title = "OpenTelemetry GenAI spans and evaluations, also OpenInference spans (OTLP JSON)"
    carries = Carries(
        prompt="opt-in",
        group="choices of a call, else equal prompts",
        reward="evaluation events",
        version="attributes",
        time="yes",
    )
    marks = (EVALUATION.encode(),)

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log of OTLP exports of spans, or of log records with evaluations."""
        found = [record for record in samples if isinstance(record, dict)]
        return any("resourceSpans" in record for record in found) or (
            any("resourceLogs" in record for record in found) and self.marks[0] in log.head
        )

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Log records behind the spans."""
        return sorted(super().plan(logs), key=lambda log: b'"resourceSpans"' not in log.head)

    def own_scores(self, record: Any) -> Iterable[Score]:
        """Yield the evaluations in spans that are calls."""
        return (score for span in _spans(record) if _is_call(span) for score in _evaluations(span))

    def kept_scores(self, record: Any) -> Iterable[Score]:
        """Yield the evaluations in other spans, and those in log records."""
        for span in _spans(record):
            if not _is_call(span):
                yield from _evaluations(span)
        for logged in _log_records(record):
            if _event_name(logged) == EVALUATION:
                yield _evaluation(_attributes(logged), _key(logged))

    def members(self, record: Any) -> Iterable[Member]:
        """Yield where spans are."""
        for span in _spans(record):
            yield Member(_key(span), str(span.get("traceId")), _is_call(span), not span.get("parentSpanId"))

    def calls(self, record: Any) -> Iterator[Call | Score | Refused | Passed]:
        """Yield the calls among the spans, and the evaluations among log records."""
        for span in _spans(record):
            try:
                yield self._call(span) if _is_call(span) else Passed(NOT_A_CALL)
            except Refused as refused:
                yield refused
        for logged in _log_records(record):
            is_score = _event_name(logged) == EVALUATION
            yield _evaluation(_attributes(logged), _key(logged)) if is_score else Passed(NOT_A_CALL)

    def _call(self, span: Object) -> Call:
        attributes, events = _attributes(span), _events(span)
        status = span.get("status")
        if isinstance(status, dict) and status.get("code") in _FAILED:
            raise Refused(
                "failed_call", str(status.get("message") or attributes.get("error.type") or "error")
            )
        if SPAN_KIND in attributes:
            about = tree(attributes)
            request, choices = span_request(about), span_choices(about)
            spoken: tuple[str, ...] = SPAN_CONTENT
        else:
            said = _with_details(attributes, events)
            request, choices = genai_request(said, events), genai_choices(said, events)
            spoken = CONTENT
        if not choices:
            raise Refused("no_response", "the span has no content: recording it is opt-in")
        columns = own_columns(attributes) | {"run": self.name, "sampled_at": _time(span)}
        columns["policy"] = attributes.get("gen_ai.response.model") or request.get("model")
        kept = {name: value for name, value in attributes.items() if not name.startswith(spoken)}
        rest = {
            "trace_id": span.get("traceId"),
            "span_id": span.get("spanId"),
            "name": span.get("name"),
            **kept,
        }
        return Call(_key(span), request, {}, choices, columns, rest, list(_evaluations(span)))


def _within(record: Any, *path: str) -> Iterator[Any]:
    """Objects at a path of lists inside a record."""
    if not path:
        if isinstance(record, dict):
            yield record
        return
    inner = record.get(path[0]) if isinstance(record, dict) else None
    for item in inner if isinstance(inner, list) else ():
        yield from _within(item, *path[1:])


def _spans(record: Any) -> Iterator[Object]:
    yield from _within(record, "resourceSpans", "scopeSpans", "spans")


def _log_records(record: Any) -> Iterator[Object]:
    yield from _within(record, "resourceLogs", "scopeLogs", "logRecords")


def _key(span: Object) -> str:
    return f"{span.get('traceId')}/{span.get('spanId')}"


def _time(span: Object) -> Any:
    """The start in nanoseconds, which OTLP JSON writes as text."""
    start = span.get("startTimeUnixNano")
    return int(start) if isinstance(start, str) and start.isdecimal() else start


def _value(logged: Any) -> Any:
    """A value of OTLP JSON: {"stringValue": "a"}, {"intValue": "3"}, {"arrayValue": {"values": [...]}}."""
    if not isinstance(logged, dict):
        return logged
    if "intValue" in logged:
        return int(logged["intValue"])
    if "arrayValue" in logged:
        return [_value(item) for item in (logged["arrayValue"] or {}).get("values") or ()]
    if "kvlistValue" in logged:
        return _pairs((logged["kvlistValue"] or {}).get("values"))
    return next(iter(logged.values()), None)


def _pairs(logged: Any) -> Object:
    found = [pair for pair in logged or () if isinstance(pair, dict)]
    return {str(pair.get("key")): _value(pair.get("value")) for pair in found}


def _attributes(span: Object) -> Object:
    return _pairs(span.get("attributes"))


def _events(span: Object) -> Events:
    found = span.get("events")
    events = [event for event in found if isinstance(event, dict)] if isinstance(found, list) else []
    return [(str(event.get("name")), _attributes(event)) for event in events]


def _with_details(attributes: Object, events: Events) -> Object:
    """Attributes with those of events that hold the content of the call."""
    made = dict(attributes)
    for name, body in events:
        if name != EVALUATION:
            made |= {key: value for key, value in body.items() if key.startswith(CONTENT)}
    return made


def _event_name(logged: Object) -> Any:
    return logged.get("eventName") or _attributes(logged).get("event.name")


def _is_call(span: Object) -> bool:
    attributes = _attributes(span)
    kind = attributes.get(SPAN_KIND)
    return kind == "LLM" if kind is not None else is_genai_call(attributes)


def _evaluations(span: Object) -> Iterator[Score]:
    for name, body in _events(span):
        if name == EVALUATION:
            yield _evaluation(body, _key(span))


def _evaluation(body: Object, of: str) -> Score:
    value = body.get("gen_ai.evaluation.score.value")
    label = body.get("gen_ai.evaluation.score.label")
    return Score(str(body.get("gen_ai.evaluation.name")), label if value is None else value, of)
