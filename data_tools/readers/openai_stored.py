"""Stored completions of OpenAI's API: pages of the list, joined with pages of the messages of each.

What the user noted in `metadata` is text; a reward and a group are read from it by the names of columns.
The ids of completions are unique among all pages, which may overlap.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from data_tools.collecting.ids import choice_digest
from data_tools.logs.records import Block, element_digest, flat, looked_through, samples
from data_tools.readers.base import Carries, Log, RecordReader, Refused, Values, first_object
from data_tools.readers.completions import completions
from data_tools.readers.exchange import Object, exchange
from data_tools.readers.joined import Keyed, join, joined_of
from data_tools.readers.traced import OWN_NAMES

NO_MESSAGES = "no messages of this completion: collect its pages of messages in the same command"
OF_COMPLETION = {"choices", "metadata", "request_id"}
_MESSAGE_ID = re.compile(r"(.+)-(\d{1,9})")


class StoredReader(RecordReader):
    """One stored completion is one call; a page holds many."""

    name = "openai-stored"
    title = (
        "stored completions of OpenAI's API: pages of the list, joined with pages of messages (JSON, JSONL)"
    )
    carries = Carries(
        prompt="from pages of messages",
        group="metadata, choices of a call, else equal prompts",
        reward="metadata",
        logprobs="optional",
        version="metadata",
        time="yes",
    )

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record is a stored completion, or a page of them or of messages."""
        first = first_object(samples)
        return _is_completion(first) or _is_page(first)

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Join the completions with their messages."""
        others = [log for log in logs if _holds_messages(first_object(samples(log)))]
        lists = [log for log in logs if log not in others]
        if not lists:
            return others
        join(lists, others, "messages", _messages)
        return lists

    def records_of(self, block: Block) -> Block:
        """The completions of each page one by one."""
        return _without_pages(flat(block))

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the choices of a completion."""
        if not isinstance(record, dict) or "choices" not in record:
            raise Refused(
                "no_response", "no completion; messages are read with the list of completions alone"
            )
        messages = _prompt(record, log)
        call = exchange({**record, **({"messages": messages} if messages else {})})
        noted = record.get("metadata")
        for name in ("reward", *OWN_NAMES):
            if isinstance(noted, dict) and noted.get(name) is not None:
                call.around.setdefault(name, noted[name])
        content = element_digest(record["choices"])
        try:
            for at, row in enumerate(completions(call)):
                yield row if isinstance(row, Refused) else {**row, **self._of_all_pages(row, content, at)}
        except Refused as refused:
            raise Refused(
                refused.reason, NO_MESSAGES if refused.reason == "no_prompt" else refused.detail
            ) from None

    def _of_all_pages(self, row: Values, content: bytes, choice: int) -> Values:
        return {"run": row["run"] or self.name, "content": choice_digest(content, choice)}


def _is_completion(record: Object) -> bool:
    return record.get("object") == "chat.completion" and record.keys() >= OF_COMPLETION


def _is_page(record: Object) -> bool:
    if record.get("object") != "list" or not isinstance(record.get("data"), list):
        return False
    first = first_object(record["data"])
    return _is_completion(first) or _holds_messages(record)


def _holds_messages(page: Object) -> bool:
    data = page.get("data")
    first = first_object(data) if isinstance(data, list) else {}
    return {"id", "role", "content"} <= first.keys() and "choices" not in first


def _without_pages(block: Block) -> Block:
    """The items of pages in place of the pages."""
    made = Block(rejects=block.rejects, notes=block.notes)
    for row, record, content in zip(block.rows, block.records, block.contents, strict=True):
        if not isinstance(record, dict) or not isinstance(record.get("data"), list):
            made.add(row, record, content)
            continue
        for item in record["data"]:
            made.add(row, item, element_digest(item))
    made.input_rows += len(made.rejects)
    return made


def _messages(log: Log) -> Keyed:
    """Messages by the id of their completion; where a page ends before the last one, that is said too."""
    for page in looked_through(log):
        data = page.get("data") if isinstance(page, dict) else None
        named = [
            (_MESSAGE_ID.fullmatch(str(item.get("id"))), item)
            for item in data or ()
            if isinstance(item, dict)
        ]
        for match, item in named:
            if match:
                yield match[1], {"place": int(match[2]), "message": _message(item)}
        if named and named[-1][0] and page.get("has_more") is True:
            yield named[-1][0][1], {"place": int(named[-1][0][2]) + 1, "message": None}


def _message(item: Object) -> Object:
    """A message as it was sent: without its id and what is null."""
    kept = {
        name: value
        for name, value in item.items()
        if value is not None and name not in ("id", "content_parts")
    }
    return {**kept, "content": item.get("content_parts") or item.get("content")}


def _prompt(record: Object, log: Log) -> list[Object]:
    """The messages of a completion; raises Refused where some of them are on pages that were not given."""
    found = joined_of(log).nearest(str(record.get("id")), log)
    places: dict[int, Object | None] = {}
    for one in found:
        places[one["place"]] = one["message"] or places.get(one["place"])
    whole = list(places) and sorted(places) == list(range(len(places))) and all(places.values())
    if places and not whole:
        raise Refused("no_prompt", "some messages of this completion are on pages that were not collected")
    return [message for _, message in sorted(places.items()) if message]
