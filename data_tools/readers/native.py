"""Responses in an engine's own form, within whatever a log wraps around them, read as calls with choices.

Request, failures, caches, rewards and everything else around a response are then as in any log of calls.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from data_tools.collecting.reasons import Refused
from data_tools.readers.base import Values
from data_tools.readers.completions import completions
from data_tools.readers.exchange import REQUESTS, RESPONSES, Object, decoded, exchange


@dataclass(frozen=True, slots=True)
class NativeForm:
    """How an engine writes responses: `mark` is a field of every one, `fields` are all of them.

    `prompts` names the prompt in a request. `choices` turns a response into choices of OpenAI's API.
    """

    mark: str
    fields: frozenset[str]
    prompts: tuple[str, ...]
    choices: Callable[[Object], list[Object]]

    def responses(self, record: Any) -> list[Object]:
        """The responses that a record is or holds."""
        if isinstance(record, dict) and self.mark in record:
            return [record]
        place = self._place(record) if isinstance(record, dict) else None
        return [] if place is None else self._listed(record[place])

    def rows(self, record: Any) -> Iterator[Values | Refused]:
        """Yield the responses of a call; raises Refused where it has none that can be used.

        Log-probs are those of the sampling distribution, unless the log says otherwise.
        """
        if not isinstance(record, dict):
            raise Refused("not_an_object", "an element that is no object")
        for row in completions(exchange(self._as_call(record))):
            if isinstance(row, dict) and row.get("behavior_logprobs") and row.get("logprob_kind") is None:
                row["logprob_kind"] = "processed"
            yield row

    def _as_call(self, record: Object) -> Object:
        around = dict(record)
        if self.mark in record:
            around["response"] = {name: around.pop(name) for name in record if name in self.fields}
        place = self._place(around)
        if place is not None:
            choices = [
                choice for response in self._listed(around[place]) for choice in self.choices(response)
            ]
            around[place] = {"choices": [{**choice, "index": at} for at, choice in enumerate(choices)]}
            if all(choice.get("error") for choice in choices):
                around[place]["error"] = choices[0]["error"]
        for name in REQUESTS:
            request = decoded(around.get(name))
            if name != place and isinstance(request, dict):
                around[name] = self._with_prompt(request)
        return self._with_prompt(around)

    def _place(self, record: Object) -> str | None:
        """The field of a record that holds responses."""
        return next((name for name in RESPONSES if self._listed(record.get(name))), None)

    def _listed(self, value: Any) -> list[Object]:
        value = decoded(value)
        if isinstance(value, dict) and self.mark not in value:
            value = decoded(value.get("body"))  # an HTTP message
        listed = value if isinstance(value, list) else [value]
        return listed if all(isinstance(item, dict) and self.mark in item for item in listed) else []

    def _with_prompt(self, fields: Object) -> Object:
        if "prompt" in fields or "messages" in fields:
            return fields
        found = [name for name in self.prompts if fields.get(name) not in (None, "", [])]
        return {"prompt" if name in found[:1] else name: value for name, value in fields.items()}
