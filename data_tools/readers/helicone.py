"""Helicone's export: one call a record, with both bodies, the user's rating and scores."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from data_tools.readers.base import Carries, Log, Passed, Refused
from data_tools.readers.bodies import answer, asked
from data_tools.readers.exchange import decoded, failure
from data_tools.readers.scores import Score
from data_tools.readers.traced import Call, TracedReader, other_fields, own_columns

OF_CALL = {"request_id", "request_body", "response_body", "response_status", "request_created_at"}
RATING = "feedback_rating"
USED = (
    "request_body", "response_body", "request_created_at", "response_status", "request_path", RATING,
    "scores",
)  # fmt: skip
NO_CACHE = ("", "00000000-0000-0000-0000-000000000000")


class HeliconeReader(TracedReader):
    """One record is one call through the proxy. The rating and every score are scores, each by its name."""

    name = "helicone"
    title = "Helicone export with bodies (JSONL, JSON, CSV)"
    carries = Carries(
        prompt="yes",
        group="choices of a call, else equal prompts",
        reward="rating, scores",
        logprobs="optional",
        version="properties",
        time="yes",
    )
    marks = (b"scores", RATING.encode())

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose records name Helicone's fields."""
        return any(isinstance(record, dict) and record.keys() >= OF_CALL for record in samples)

    def own_scores(self, record: Any) -> Iterable[Score]:
        """Yield the user's rating and the scores."""
        if record.get(RATING) is not None:
            yield Score(RATING, decoded_flag(record[RATING]))
        scores = decoded(record.get("scores"))
        for name, value in scores.items() if isinstance(scores, dict) else ():
            yield Score(name, value)

    def calls(self, record: Any, log: Log) -> Iterator[Call | Refused | Passed]:
        """Yield the call of a record."""
        response = decoded(record.get("response_body"))
        error = response.get("error") if isinstance(response, dict) else None
        failed = failure({"error": error, "response_status": record.get("response_status")})
        if failed:
            raise Refused("failed_call", failed)
        if str(record.get("cache_reference_id") or "") not in NO_CACHE:
            raise Refused("cache_hit")
        if not response:
            raise Refused("no_response", "the body is not in the record: export with --include-body")
        body, choices = answer(record["response_body"])
        properties = decoded(record.get("request_properties") or record.get("properties"))
        columns = own_columns(properties) | {"run": self.name, "sampled_at": record["request_created_at"]}
        if not body.get("model"):
            columns["policy"] = record.get("response_model") or record.get("request_model")
        identity = str(record["request_id"]) if record.get("request_id") else None
        request, rest = asked(record.get("request_body")), other_fields(record, USED)
        yield Call(identity, request, body, choices, columns, rest, list(self.own_scores(record)))


def decoded_flag(value: Any) -> Any:
    """A boolean that a table without types wrote as text."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
