"""OTLP JSON: the spans and log records of an export, their ids, and attributes as plain values."""

from collections.abc import Iterator
from typing import Any

from data_tools.readers.exchange import Object, decoded
from data_tools.readers.genai_spans import Events


def spans_of(record: Any) -> Iterator[Object]:
    """The spans of an export."""
    yield from _within(record, "resourceSpans", "scopeSpans", "spans")


def log_records_of(record: Any) -> Iterator[Object]:
    """The log records of an export."""
    yield from _within(record, "resourceLogs", "scopeLogs", "logRecords")


def _within(record: Any, *path: str) -> Iterator[Any]:
    """Objects at a path of lists inside a record."""
    if not path:
        if isinstance(record, dict):
            yield record
        return
    inner = record.get(path[0]) if isinstance(record, dict) else None
    for item in inner if isinstance(inner, list) else ():
        yield from _within(item, *path[1:])


def key_of(found: Object) -> str:
    """The trace and span that a span is, or that a log record names."""
    return f"{found.get('traceId')}/{found.get('spanId')}"


def nanoseconds(time: Any) -> Any:
    """A time in nanoseconds, which OTLP JSON writes as text."""
    return int(time) if isinstance(time, str) and time.isdecimal() else time


def plain(logged: Any) -> Any:
    """A value of OTLP JSON: {"stringValue": "a"}, {"intValue": "3"}, {"arrayValue": {"values": [...]}}."""
    if not isinstance(logged, dict):
        return logged
    if "intValue" in logged:
        return int(logged["intValue"])
    if "arrayValue" in logged:
        return [plain(item) for item in (logged["arrayValue"] or {}).get("values") or ()]
    if "kvlistValue" in logged:
        return _pairs((logged["kvlistValue"] or {}).get("values"))
    return next(iter(logged.values()), None)


def _pairs(logged: Any) -> Object:
    found = [pair for pair in logged or () if isinstance(pair, dict)]
    return {str(pair.get("key")): plain(pair.get("value")) for pair in found}


def attributes_of(found: Object) -> Object:
    """The attributes of a span, an event or a log record."""
    return _pairs(found.get("attributes"))


def events_of(span: Object) -> Events:
    """The events that stand in a span."""
    found = span.get("events")
    events = [event for event in found if isinstance(event, dict)] if isinstance(found, list) else []
    return [(str(event.get("name")), attributes_of(event)) for event in events]


def event_name(logged: Object) -> str:
    """Which event a log record is; older exporters say it in an attribute."""
    return str(logged.get("eventName") or attributes_of(logged).get("event.name"))


def event_of(logged: Object) -> tuple[str, Object]:
    """The event that a log record is: what its body holds counts as attributes."""
    held = decoded(plain(logged.get("body")))
    fields = held if isinstance(held, dict) else {"body": held}
    return event_name(logged), {**attributes_of(logged), **fields}
