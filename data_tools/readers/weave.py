"""W&B Weave: calls of traced functions, those of models among them, with feedback in them or beside them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from data_tools.readers.base import Carries, Log, Passed, Refused
from data_tools.readers.bodies import answer, asked
from data_tools.readers.exchange import Object, decoded, failure
from data_tools.readers.scores import Member, Score
from data_tools.readers.traced import NOT_A_CALL, Call, TracedReader, other_fields, own_columns

OF_CALL = {"op_name", "trace_id", "started_at", "inputs"}
OF_FEEDBACK = {"feedback_type", "payload", "weave_ref"}
USED = ("inputs", "output", "started_at", "exception", "summary", "deleted_at")
NAMED = ("wandb.runnable.", "wandb.annotation.", "wandb.")
"""Beginnings of a type of feedback; what follows is the name of the scorer or of the question."""

_OPS = ("chat.completions", "completions.create", "messages.create", "generate_content", "responses.create")


class WeaveReader(TracedReader):
    """One record is one call of a function, or one feedback."""

    name = "weave"
    title = "W&B Weave calls and feedback (JSONL, JSON, CSV, Parquet)"
    carries = Carries(
        prompt="yes",
        group="choices of a call, else equal prompts",
        reward="feedback, joined by id",
        logprobs="optional",
        version="attributes",
        time="yes",
    )
    marks = (b"feedback",)

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log of calls or of feedback."""
        return any(_is_traced(record) or _is_feedback(record) for record in samples)

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Feedback behind the calls."""
        return sorted(
            super().plan(logs), key=lambda log: b"weave_ref" in log.head and b"op_name" not in log.head
        )

    def own_scores(self, record: Any) -> Iterable[Score]:
        """Yield the feedback in a call of a model."""
        return _feedback(record) if _is_call(record) else ()

    def kept_scores(self, record: Any) -> Iterable[Score]:
        """Yield a feedback, and those in calls of other functions."""
        if _is_feedback(record):
            of = str(record["weave_ref"]).rsplit("/call/", 1)[-1]
            yield from _scores(record, of, record.get("id"), str(record.get("created_at") or ""))
        elif _is_traced(record) and not _is_call(record):
            yield from _feedback(record)

    def members(self, record: Any) -> Iterable[Member]:
        """Yield where a call is."""
        if _is_traced(record):
            yield Member(str(record["id"]), record["trace_id"], _is_call(record), not record.get("parent_id"))

    def calls(self, record: Any, log: Log) -> Iterator[Call | Score | Refused | Passed]:
        """Yield the call of a model that a record is, or the feedback."""
        if _is_feedback(record):
            yield from self.kept_scores(record)
            return
        if not _is_call(record):
            yield Passed(NOT_A_CALL)
            return
        if record.get("deleted_at"):
            raise Refused("deleted", f"deleted at {record['deleted_at']}")
        summary = _object(decoded(record.get("summary")))
        failed = failure({"exception": record.get("exception")}, _object(summary.get("weave")))
        if failed:
            raise Refused("failed_call", failed)
        inputs, output = decoded(record["inputs"]), decoded(record.get("output"))
        if isinstance(output, str) and output.startswith("weave:///"):
            raise Refused("no_response", "the output is a reference to an object that is not in the record")
        body, choices = answer(output)
        attributes = decoded(record.get("attributes"))
        request = asked(other_fields(inputs, ["self"]) if isinstance(inputs, dict) else inputs)
        columns = own_columns(attributes) | {
            "run": record.get("project_id") or self.name,
            "sampled_at": record["started_at"],
        }
        rest = other_fields(record, USED) | {"summary": _without_feedback(summary)}
        yield Call(str(record["id"]), request, body, choices, columns, rest, list(_feedback(record)))


def _is_feedback(record: Any) -> bool:
    return isinstance(record, dict) and record.keys() >= OF_FEEDBACK


def _is_traced(record: Any) -> bool:
    return isinstance(record, dict) and record.keys() >= OF_CALL and bool(record.get("id"))


def _is_call(record: Any) -> bool:
    """Whether the function is one that asks a model."""
    if not _is_traced(record):
        return False
    attributes = decoded(record.get("attributes"))
    if isinstance(attributes, dict) and attributes.get("kind") == "llm":
        return True
    output = decoded(record.get("output"))
    whole = isinstance(output, dict) and isinstance(output.get("choices"), list)
    return whole or any(op in str(record["op_name"]) for op in _OPS)


def _object(value: Any) -> Object:
    return value if isinstance(value, dict) else {}


def _without_feedback(summary: Object) -> Object:
    about = _object(summary.get("weave"))
    return {**summary, "weave": other_fields(about, ["feedback"])} if about else summary


def _feedback(record: Any) -> Iterator[Score]:
    """The feedback that was asked for with a call."""
    found = _object(_object(decoded(record.get("summary"))).get("weave")).get("feedback")
    for feedback in found if isinstance(found, list) else ():
        if isinstance(feedback, dict):
            yield from _scores(feedback, str(record["id"]))


def _scores(feedback: Object, of: str, identity: Any = None, at: str = "") -> Iterator[Score]:
    """What one feedback says: a scorer's output, which may hold several numbers; an answer; a reaction."""
    kind, payload = str(feedback.get("feedback_type")), _object(decoded(feedback.get("payload")))
    name = next((kind.removeprefix(start) for start in NAMED if kind.startswith(start)), kind)
    name = name.split(".")[0] if name.startswith(("reaction", "note")) else name
    output = payload.get("output", payload.get("value", payload.get("emoji", payload.get("note"))))
    parts = output if isinstance(output, dict) else {"": output}
    for part, value in parts.items():
        own = "" if len(parts) == 1 and part in ("", "score", "value") else f".{part}"
        marked = f"{identity}{own}" if identity else None
        yield Score(name + own, value, of, marked, at)
