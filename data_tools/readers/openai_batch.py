"""Files of the OpenAI Batch API, whoever wrote them: outputs and errors, joined with inputs by custom_id."""

from collections.abc import Iterator, Sequence
from typing import Any

from data_tools.logs.records import looked_through, samples
from data_tools.readers.base import Carries, Log, RecordReader, Refused, Values, first_object
from data_tools.readers.completions import completions
from data_tools.readers.exchange import Object, exchange
from data_tools.readers.joined import Keyed, join, joined_of

NO_INPUT = "no request of this custom_id: collect the input file of the batch in the same command"


class BatchReader(RecordReader):
    """One record of an output or error file is one call; input files only give the requests."""

    name = "openai-batch"
    title = "OpenAI Batch API: output and error files, joined with input files by custom_id (JSONL)"
    carries = Carries(
        prompt="from the input file",
        group="choices of a call, else equal prompts",
        ids="optional",
        logprobs="optional",
        time="yes",
    )

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record is a line of such a file; one that is both sides is a logged call."""
        first = first_object(samples)
        return _is_input(first) or _is_output(first)

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Join the outputs with the inputs; inputs are read by themselves only where there are no outputs."""
        inputs = [log for log in logs if _is_input(first_object(samples(log)))]
        outputs = [log for log in logs if log not in inputs]
        if not outputs:
            return inputs
        join(outputs, inputs, "requests", _requests)
        return outputs

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the choices of a call."""
        if not isinstance(record, dict):
            raise Refused("not_an_object", f"a bare {type(record).__name__}")
        found = joined_of(log).nearest(_key(record), log) if "body" not in record else []
        if len(found) > 1:
            raise Refused("bad_record", f"{len(found)} different requests have this custom_id")
        call = exchange({**record, "request": found[0]} if found else record)
        try:
            yield from completions(call)
        except Refused as refused:
            detail = NO_INPUT if refused.reason == "no_prompt" and not found else refused.detail
            raise Refused(refused.reason, detail) from None


def _is_input(record: Object) -> bool:
    return (
        "custom_id" in record
        and isinstance(record.get("body"), dict)
        and not {"response", "error"} & record.keys()
    )


def _is_output(record: Object) -> bool:
    return "custom_id" in record and bool({"response", "error"} & record.keys()) and "body" not in record


def _key(record: Object) -> str:
    return str(record.get("custom_id"))


def _requests(log: Log) -> Keyed:
    for record in looked_through(log):
        if isinstance(record, dict) and _is_input(record):
            yield _key(record), record["body"]
