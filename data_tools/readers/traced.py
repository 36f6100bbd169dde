"""What logs of observability platforms share: calls among other spans, and scores beside or within them."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from data_tools.collecting.ids import digest
from data_tools.logs.jsontext import canonical
from data_tools.logs.records import looked_through
from data_tools.readers.base import Chunk, Log, Passed, RecordReader, Refused, Row, Values
from data_tools.readers.completions import completions, version_number
from data_tools.readers.exchange import Exchange, Object
from data_tools.readers.scores import CHOSEN, SEVERAL, Member, Score, ScoreBook

OWN_NAMES = ("group_id", "trajectory_id", "turn", "policy_version")
"""Columns that a user may set by tagging calls with metadata; only by these very names, as any other name may
mean anything there."""

NOT_A_CALL, JOINED = "not_a_call", "joined_score"
MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError, Refused)


@dataclass(slots=True)
class Call:
    """A model call as a platform logged it. `id` is the platform's.

    `columns` holds what the platform says in its own fields; `rest` goes to `extra`, `scores` stood in the
    record itself.
    """

    id: str | None
    request: Object
    body: Object
    choices: list[Any]
    columns: Object = field(default_factory=dict)
    rest: Object = field(default_factory=dict)
    scores: Sequence[Score] = ()


Told = Call | Score | Refused | Passed


class TracedReader(RecordReader):
    """A format of calls that are scored: in their records, in other records, or in files of scores."""

    marks: tuple[bytes, ...] = ()
    """A line without any of these holds no score; looking for scores passes over it."""

    @abstractmethod
    def calls(self, record: Any, log: Log) -> Iterator[Told]:
        """Yield the calls of a record, and each score that it holds of something in another one."""

    def book(self, logs: Sequence[Log]) -> ScoreBook:
        """What the logs share, empty."""
        return ScoreBook()

    def own_scores(self, record: Any) -> Iterable[Score]:
        """Yield the scores that stand in the record of their response."""
        return ()

    def kept_scores(self, record: Any) -> Iterable[Score]:
        """Yield the scores in a record that judge what is in another one."""
        return ()

    def members(self, record: Any) -> Iterable[Member]:
        """Yield the ids of the responses of a record, and of those spans that stand for their whole trace."""
        return ()

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Find the scores of all logs, and what they judge; files of scores come behind the calls."""
        book = self.book(logs)
        for log in logs:
            log.shared = book
            if self.marks:
                self._look_for_scores(log, book)
        if book.holds_any:
            for member in (member for log in logs for member in self._members_of(log)):
                book.add_member(member)
        book.settle()
        return list(logs)

    def _look_for_scores(self, log: Log, book: ScoreBook) -> None:
        for record in looked_through(log, self.marks):
            with suppress(*MALFORMED):
                for score in self.own_scores(record):
                    book.name(score)
                for score in self.kept_scores(record):
                    book.add(score)

    def _members_of(self, log: Log) -> Iterator[Member]:
        for record in looked_through(log):
            with suppress(*MALFORMED):
                yield from self.members(record)

    def chunks(self, log: Log) -> Iterator[Chunk]:
        """Read record by record, and name the scores, those that became rewards and those that did not."""
        if not isinstance(log.shared, ScoreBook):
            self.plan([log])
        for chunk in super().chunks(log):
            chunk.details |= {SEVERAL: log.shared.told_names(), CHOSEN: log.shared.reward_name or ""}
            yield chunk

    def rows(self, record: Any, log: Log) -> Iterator[Row]:
        """Yield the responses of a record."""
        if not isinstance(record, dict):
            raise Refused("not_an_object", f"a {type(record).__name__}")
        book: ScoreBook = log.shared
        nothing = True
        for found in self.calls(record, log):
            nothing = False
            if isinstance(found, Call):
                yield from _responses(found, book)
            elif isinstance(found, Score):
                yield _outcome(found, book)
            else:
                yield found
        if nothing:
            yield Passed(NOT_A_CALL)


def _outcome(score: Score, book: ScoreBook) -> Passed | Refused:
    if book.is_joined(score):
        return Passed(JOINED)
    of = score.of or "nothing"
    return Refused("unmatched_score", f"a score of {of}, which is no response collected with it")


def _responses(call: Call, book: ScoreBook) -> Iterator[Row]:
    """The choices of a call with the columns that the platform gives and the reward that its scores make."""
    kept = book.scores_of(call.id) if call.id else []
    verdict = book.verdict([*call.scores, *kept])
    notes = [note for note in verdict.notes if note != CHOSEN or len(call.choices) == 1]
    around = {"response_id": call.id, "reward": verdict.reward, **call.columns}
    around = {name: value for name, value in around.items() if value not in (None, "")}
    if "policy_version" in around:
        around["policy_version"] = version_number(around["policy_version"])
    rest = {name: value for name, value in call.rest.items() if value not in (None, "", [], {})}
    beside = {**rest, **({"scores": verdict.shown} if verdict.shown else {})}
    try:
        for row in completions(Exchange(call.request, call.body, call.choices, around, beside)):
            if isinstance(row, Refused):
                yield row
                continue
            told = {"flags": [*row["flags"], *verdict.flags], "notes": notes}
            yield {**row, **told, "content": _content(row) if call.id else None}
    except Refused as refused:
        yield refused


def _content(row: Values) -> bytes:
    """Hash of what was asked and answered: platforms export a call again when something about it changes."""
    said = [row.get(name) for name in ("prompt", "response", "response_messages", "response_ids")]
    return digest("call", canonical(said))


def own_columns(*holders: Any) -> Object:
    """Columns that a user set by tagging a call with metadata of their very names."""
    found: Object = {}
    for metadata in holders:
        if isinstance(metadata, Mapping):
            found |= {name: metadata[name] for name in OWN_NAMES if isinstance(metadata.get(name), str | int)}
    return found


def other_fields(record: Mapping[str, Any], used: Iterable[str]) -> Object:
    """The fields of a record but those used."""
    used = set(used)
    return {name: value for name, value in record.items() if name not in used}
