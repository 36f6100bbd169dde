"""What a call asked: the prompt of each of its choices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_tools.collecting.columns import names_of, pick
from data_tools.collecting.prompts import is_chat
from data_tools.collecting.reasons import Refused
from data_tools.readers.echo import echoed_prompt
from data_tools.readers.exchange import Exchange, Object, decoded

NO_PROMPT = (
    "a response without its request: log {request, response} pairs, or join the requests by id with --select"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as logged: `text` (a text or messages), the server's token ids, or both.

    `place` counts the prompts of one call: legacy completions take several.
    """

    text: Any = None
    ids: Any = None
    place: int = 0


def prompts_of(call: Exchange, choices: Sequence[Any]) -> list[Prompt]:
    """The prompt of each choice; raises Refused where neither the record nor an echo holds one."""
    asked = _asked(call)
    if not asked:
        echoed = echoed_prompt(call.body.get("usage"), choices)
        asked = [Prompt(echoed)] if echoed else []
    several = max(call.request["n"], 1) if type(call.request.get("n")) is int else 1
    found = []
    for at, choice in enumerate(choices):
        fields = choice if isinstance(choice, dict) else {}
        place = 0
        if len(asked) > 1:
            place = fields["index"] // several if type(fields.get("index")) is int else at // several
        if asked and not 0 <= place < len(asked):
            raise Refused("bad_record", f"choice {at + 1} belongs to none of the {len(asked)} prompts")
        prompt = asked[place] if asked else Prompt()
        ids = _first(fields, "prompt_ids") or _first(call.body, "prompt_ids") or prompt.ids
        found.append(Prompt(prompt.text, ids, place))
    if all(prompt.text in (None, "", []) and not prompt.ids for prompt in found):
        raise Refused("no_prompt", NO_PROMPT)
    return found


def _first(fields: Object, column: str) -> Any:
    """The value of a column under one of its names."""
    name = pick(fields, [name for name in names_of(column) if name in fields], column)
    return None if name is None else fields[name]


def _asked(call: Exchange) -> list[Prompt]:
    """The prompts that the record names; none if it holds the response alone."""
    for value in (call.request.get("messages"), call.request.get("prompt")):
        if value not in (None, "", []):
            return [Prompt(text, ids, place) for place, (text, ids) in enumerate(_separate(decoded(value)))]
    for fields in (call.request, call.around):
        if _first(fields, "prompt") not in (None, "", []):
            return [Prompt(decoded(_first(fields, "prompt")))]
    text = call.body.get("prompt_text")
    return [Prompt(text)] if text else []


def _separate(value: Any) -> list[tuple[Any, Any]]:
    """The prompts in one field as (text, ids): a text, a chat, ids, or a list of texts or of lists of ids."""
    if not isinstance(value, list) or is_chat(value):
        return [(value, None)]
    if all(type(item) is int for item in value):
        return [(None, value)]
    if all(isinstance(item, str) for item in value):
        return [(item, None) for item in value]
    if all(isinstance(item, list) and all(type(one) is int for one in item) for item in value):
        return [(None, item) for item in value]
    return [(value, None)]
