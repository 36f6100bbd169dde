"""Fine-tuning files of OpenAI: conversations, preferences, and prompts of reinforcement fine-tuning.

None of them holds a reward. Which response of a preference was preferred is in `extra`, so that
`--reward "(extra->>'preferred')::BOOL::INT"` makes a reward of it for those who want that.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from data_tools.collecting.columns import is_response
from data_tools.collecting.prompts import is_chat, is_learned_from, split_conversation
from data_tools.readers.base import Carries, Log, RecordReader, Refused, Values, first_object, without
from data_tools.readers.completions import functions_as_tools
from data_tools.readers.exchange import Object

PREFERRED = ("preferred_output", "preferred_completion")
OTHER = ("non_preferred_output", "non_preferred_completion")
OF_CONVERSATION = {"messages", "tools", "functions", "parallel_tool_calls"}
NOT_SAMPLED = "a prompt of reinforcement fine-tuning: nothing was sampled yet"


class FinetuneReader(RecordReader):
    """One record is a pair of responses, or a conversation whose last turns with a weight are one."""

    name = "openai-finetune"
    title = "OpenAI fine-tuning files: supervised, preference; prompts of reinforcement (JSONL)"
    carries = Carries(prompt="yes", group="equal prompts")

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take preferences, prompts that nobody answered, and conversations with weights or call settings."""
        first = first_object(samples)
        if _is_preference(first):
            return True
        records = [record for record in samples if isinstance(record, dict)]
        if not _messages(first):
            return False
        return all(map(_is_prompt, records)) or (
            all(record.keys() <= OF_CONVERSATION for record in records) and any(map(_is_weighted, records))
        )

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the response of a conversation, or both of a preference."""
        if not isinstance(record, dict):
            raise Refused("not_an_object", f"a bare {type(record).__name__}")
        if isinstance(record.get("input"), dict):
            yield from _preference(record)
            return
        messages = _messages(record)
        if not messages:
            raise Refused("no_prompt", "messages is no list of messages")
        if _is_prompt(record):
            raise Refused("no_response", NOT_SAMPLED)
        prompt, turns = split_conversation(_learned_from(messages))
        if not turns:
            raise Refused("no_response", "no turn of the assistant that is to be learned from")
        yield {
            "prompt": prompt,
            "response": turns,
            "tools": _tools(record),
            "extra": without(record, "messages", "tools", "functions"),
        }


def _is_preference(record: Object) -> bool:
    asked = record.get("input")
    return isinstance(asked, dict) and "messages" in asked and any(name in record for name in PREFERRED)


def _messages(record: Object) -> list[Object]:
    messages = record.get("messages")
    return messages if isinstance(messages, list) and is_chat(messages) else []


def _is_prompt(record: Object) -> bool:
    """Whether a record is messages that end with the user's, and has no response beside them."""
    messages = _messages(record)
    answered = is_response(record.keys() - {"messages"} | {"prompt"}) or "choices" in record
    return bool(messages) and messages[-1]["role"] not in ("assistant", "tool") and not answered


def _is_weighted(record: Object) -> bool:
    weighted = any("weight" in message for message in _messages(record))
    return weighted or "parallel_tool_calls" in record


def _learned_from(messages: list[Object]) -> list[Object]:
    """The conversation up to the last turn of the assistant that is to be learned from."""
    for end in range(len(messages), 0, -1):
        if messages[end - 1].get("role") == "assistant" and is_learned_from(messages[end - 1]):
            return messages[:end]
    return []


def _tools(fields: Object) -> Any:
    return fields.get("tools") or functions_as_tools(fields.get("functions"))


def _preference(record: Object) -> Iterator[Values | Refused]:
    asked = record["input"]
    rest = without(record, "input", *PREFERRED, *OTHER) | without(asked, "messages", "tools", "functions")
    for preferred, names in ((True, PREFERRED), (False, OTHER)):
        response = next((record[name] for name in names if record.get(name)), None)
        if response is None:
            yield Refused("no_response", f"no {names[0]}")
            continue
        yield {
            "prompt": asked.get("messages"),
            "response": response,
            "tools": _tools(asked),
            "extra": {**rest, "preferred": preferred},
        }
