"""LangSmith: runs, as JSON or in its bulk export, with feedback in them or in a file beside them.

A run of type `llm` is a call. Its own feedback is its own; feedback on the run at the root of a trace is its
response's where the trace holds a single one. Runs of an experiment over one example are one group.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from data_tools.collecting.columns import is_response
from data_tools.readers.base import Carries, Log, Passed, Refused
from data_tools.readers.bodies import Answer, answer, asked
from data_tools.readers.exchange import Object, decoded
from data_tools.readers.langchain import chat, generations, message
from data_tools.readers.scores import Member, Score
from data_tools.readers.traced import NOT_A_CALL, Call, TracedReader, other_fields, own_columns

OF_RUN = {"run_type", "inputs", "outputs", "trace_id"}
OF_FEEDBACK = {"run_id", "key", "score"}
USED = ("inputs", "outputs", "start_time", "status", "error", "feedback_stats")


class LangSmithReader(TracedReader):
    """One record is one run or one feedback."""

    name = "langsmith"
    title = "LangSmith runs, bulk export and feedback (JSONL, JSON, Parquet)"
    carries = Carries(
        prompt="yes",
        group="example of an experiment, else equal prompts",
        reward="feedback, joined by id",
        logprobs="optional",
        version="metadata",
        time="yes",
    )
    marks = (b"feedback_stats", b"run_id")

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log of runs or of feedback."""
        return any(_is_run(record) or _is_feedback(record) for record in samples)

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Feedback behind the runs."""
        return sorted(
            super().plan(logs), key=lambda log: b'"run_type"' not in log.head and log.kind != "parquet"
        )

    def own_scores(self, record: Any) -> Iterable[Score]:
        """Yield the feedback in a run that is a call."""
        return _feedback(record) if _is_call(record) else ()

    def kept_scores(self, record: Any) -> Iterable[Score]:
        """Yield a feedback, and those in runs that are no calls."""
        if _is_feedback(record):
            score = record["score"] if record["score"] is not None else record.get("value")
            at = str(record.get("modified_at") or record.get("created_at") or "")
            yield Score(str(record["key"]), score, str(record["run_id"]), record.get("id"), at)
        elif _is_run(record) and not _is_call(record):
            yield from _feedback(record)

    def members(self, record: Any) -> Iterable[Member]:
        """Yield where a run is."""
        if _is_run(record):
            is_root = not record.get("parent_run_id") and record.get("id") == record.get("trace_id")
            yield Member(str(record["id"]), record["trace_id"], _is_call(record), is_root)

    def calls(self, record: Any, log: Log) -> Iterator[Call | Score | Refused | Passed]:
        """Yield the call that a run is, or the feedback."""
        if _is_feedback(record):
            yield from self.kept_scores(record)
            return
        if not _is_call(record):
            yield Passed(NOT_A_CALL)
            return
        if record.get("error") or record.get("status") == "error":
            raise Refused("failed_call", str(record.get("error") or "status error")[:200])
        extra = decoded(record.get("extra"))
        known = extra if isinstance(extra, dict) else {}
        parameters, metadata = (_object(known.get(name)) for name in ("invocation_params", "metadata"))
        body, choices = _answer(decoded(record["outputs"]))
        settings = {"temperature": metadata.get("ls_temperature")} | parameters
        model = parameters.get("model") or parameters.get("model_name") or metadata.get("ls_model_name")
        project = record.get("session_id")
        columns = own_columns(metadata) | {
            "run": project or self.name,
            "sampled_at": record.get("start_time"),
        }
        if record.get("reference_example_id"):
            columns["group_id"] = record["reference_example_id"]
        rest = {name: decoded(value) for name, value in other_fields(record, USED).items()}
        request = settings | _asked(decoded(record["inputs"])) | ({"model": model} if model else {})
        yield Call(str(record["id"]), request, body, choices, columns, rest, list(_feedback(record)))


def _is_feedback(record: Any) -> bool:
    """Whether a record is a feedback, and no row that has a score besides."""
    if not isinstance(record, dict) or not record.keys() >= OF_FEEDBACK or _is_run(record):
        return False
    return bool({"value", "comment", "correction"} & record.keys()) and not is_response(record)


def _is_run(record: Any) -> bool:
    return isinstance(record, dict) and record.keys() >= OF_RUN and bool(record.get("id"))


def _is_call(record: Any) -> bool:
    return _is_run(record) and record["run_type"] == "llm"


def _object(value: Any) -> Object:
    return value if isinstance(value, dict) else {}


def _feedback(record: Any) -> Iterator[Score]:
    """Feedback that a run sums up by key: the mean of numbers, counts of anything else.

    A mean of values that differ is no score that anybody gave; it stands with its count.
    """
    for name, stats in _object(decoded(record.get("feedback_stats"))).items():
        if not isinstance(stats, dict):
            continue
        mean = stats.get("avg")
        of_one = stats.get("n") == 1 or (mean is not None and stats.get("stdev") == 0)
        value = (
            stats.get("values") if mean is None else mean if of_one else {"n": stats.get("n"), "avg": mean}
        )
        yield Score(name, value, str(record["id"]))


def _asked(inputs: Any) -> Object:
    """The prompt of a run, in OpenAI's or LangChain's form, or under whatever name stands alone."""
    if not isinstance(inputs, dict):
        return asked(inputs)
    messages = chat(decoded(inputs.get("messages")))
    if messages is not None:
        return {**inputs, "messages": messages}
    prompts = inputs.get("prompts")
    if isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts):
        return {**other_fields(inputs, ["prompts"]), "prompt": prompts}
    if {"messages", "prompt", "input"} & inputs.keys():
        return asked(inputs)
    return asked(next(iter(inputs.values()))) if len(inputs) == 1 else {}


def _answer(outputs: Any) -> Answer:
    """The response of a run, likewise."""
    if not isinstance(outputs, dict):
        return answer(outputs, structured=True)
    choices = generations(outputs.get("generations"))
    if choices is not None:
        about = _object(outputs.get("llm_output"))
        body = other_fields(outputs, ["generations", "llm_output"])
        return {**about, **body, "model": about.get("model_name")}, choices
    said = chat(outputs.get("messages")) or message(outputs.get("message")) or message(outputs)
    if said:
        return answer(said)
    if len(outputs) == 1:
        [alone] = outputs.values()
        return answer(message(alone) or alone, structured=True)
    return answer({name: value for name, value in outputs.items() if value is not None}, structured=True)
