"""Phoenix: OpenInference spans as JSON or as a dataframe, with annotations from a file beside them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from data_tools.readers.base import Carries, Log, Passed, Refused
from data_tools.readers.exchange import Object, decoded
from data_tools.readers.openinference import SPAN_CONTENT, SPAN_KIND, inner, span_choices, span_request, tree
from data_tools.readers.scores import Member, Score
from data_tools.readers.traced import NOT_A_CALL, Call, TracedReader, other_fields, own_columns

OF_ANNOTATION = {"span_id", "trace_id"}
USED = ("attributes", "start_time", "status_code", "context", "context.span_id", "context.trace_id")
_PREFIX = "attributes."


class PhoenixReader(TracedReader):
    """One record is one span, or one annotation of a span or trace."""

    name = "phoenix"
    title = "Phoenix/OpenInference spans and annotations (JSONL, JSON, Parquet)"
    carries = Carries(
        prompt="yes",
        group="equal prompts",
        reward="annotations, joined by id",
        version="metadata",
        time="yes",
    )
    marks = (b"annotator_kind",)

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log of spans or of annotations."""
        return any(_is_span(record) or _is_annotation(record) for record in samples)

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Annotations behind the spans."""
        return sorted(super().plan(logs), key=lambda log: self.marks[0] in log.head)

    def kept_scores(self, record: Any) -> Iterable[Score]:
        """Yield the annotation that a record is; a label without a score is no number."""
        if not _is_annotation(record):
            return
        result = record.get("result")
        if not isinstance(result, dict):
            result = {name: record.get(f"result.{name}", record.get(name)) for name in ("score", "label")}
        value = result.get("score") if result.get("score") is not None else result.get("label")
        of = next(str(record[name]) for name in ("span_id", "trace_id") if record.get(name))
        at = str(record.get("updated_at") or record.get("created_at") or "")
        identity = str(record["id"]) if record.get("id") else None
        yield Score(str(record.get("name") or record.get("annotation_name")), value, of, identity, at)

    def members(self, record: Any) -> Iterable[Member]:
        """Yield where a span is."""
        if _is_span(record):
            span, trace = _ids(record)
            yield Member(span, trace, _kind(record) == "LLM", not record.get("parent_id"))

    def calls(self, record: Any, log: Log) -> Iterator[Call | Score | Refused | Passed]:
        """Yield the call that a span is, or the annotation."""
        if _is_annotation(record):
            yield from self.kept_scores(record)
            return
        if not _is_span(record) or _kind(record) != "LLM":
            yield Passed(NOT_A_CALL)
            return
        if str(record.get("status_code")).upper().endswith("ERROR"):
            raise Refused("failed_call", str(record.get("status_message") or "status ERROR"))
        span, trace = _ids(record)
        attributes = _attributes(record)
        about = tree(attributes)
        choices = span_choices(about)
        if not choices:
            raise Refused("no_response", "the span has no output")
        columns = own_columns(decoded(inner(about, "metadata"))) | {
            "run": self.name,
            "sampled_at": record.get("start_time"),
        }
        kept = {name: value for name, value in attributes.items() if not name.startswith(SPAN_CONTENT)}
        outer = {name: value for name, value in record.items() if not name.startswith(_PREFIX)}
        rest = {"trace_id": trace, "span_id": span, **other_fields(outer, USED), **kept}
        yield Call(span, span_request(about), {}, choices, columns, rest)


def _is_span(record: Any) -> bool:
    if not isinstance(record, dict) or "span_kind" not in record:
        return False
    context = record.get("context")
    return bool(record.get("context.span_id") or (isinstance(context, dict) and context.get("span_id")))


def _is_annotation(record: Any) -> bool:
    if not isinstance(record, dict) or "annotator_kind" not in record:
        return False
    return bool(record.get("span_id") or record.get("trace_id"))


def _ids(record: Object) -> tuple[str, str | None]:
    """Ids of the span and of its trace."""
    context = record.get("context")
    known = context if isinstance(context, dict) else {}
    trace = record.get("context.trace_id") or known.get("trace_id")
    return str(record.get("context.span_id") or known["span_id"]), None if trace is None else str(trace)


def _attributes(record: Object) -> Object:
    held = decoded(record.get("attributes"))
    attributes = dict(held) if isinstance(held, dict) else {}
    columns = {
        name.removeprefix(_PREFIX): value for name, value in record.items() if name.startswith(_PREFIX)
    }
    return attributes | {name: value for name, value in columns.items() if value is not None}


def _kind(record: Object) -> str:
    kind = record.get("span_kind")
    if not kind or kind == "UNKNOWN":
        kind = inner(tree(_attributes(record)), *SPAN_KIND.split("."))
    return str(kind).upper()
