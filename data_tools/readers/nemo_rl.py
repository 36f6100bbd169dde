"""Steps that NeMo-RL logs: `train_data_stepN.jsonl` with ids, `val_data_stepN.jsonl` with messages.

Each value is a batch of one. In training data prompt and response are known by their ids alone: the response
begins at the first token of `token_loss_mask`, and `input_lengths` tells it from the padding. The zeros that
stand for log-probs on the prompt, on other turns and on padding are none. There is no group id.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from data_tools.collecting.prompts import is_chat, split_conversation
from data_tools.readers.base import Carries, Log, RecordReader, Refused, Values, first_object, without

_STEP = re.compile(r"(?:train|val)_data_step(\d+)[^/]*$")
_OF_IDS = ("token_ids", "token_loss_mask", "generation_logprobs", "input_lengths")
_PER_TOKEN = {"prev_logprobs", "advantages"}


class NemoRLReader(RecordReader):
    """One record is one response; the step, which only the file's name holds, is the version."""

    name = "nemo-rl"
    title = "NeMo-RL training and validation data (JSONL)"
    carries = Carries(
        prompt="ids, or messages (validation)",
        group="equal prompts",
        reward="rewards",
        ids="training data",
        logprobs="training data",
        version="in the file's name",
    )
    names: ClassVar[Mapping[str, str]] = {"reward": "rewards", "behavior_logprobs": "generation_logprobs"}

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record is a batch of one with its index."""
        first = first_object(samples)
        content = first.get("content")
        if not isinstance(content, list) or len(content) != 1 or not {"idx", "rewards"} <= first.keys():
            return False
        return {"token_ids", "token_loss_mask"} <= first.keys() or is_chat(content[0])

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the response of a record."""
        made = _of_ids(record) if "token_ids" in record else _of_messages(record)
        step = _STEP.search(log.name)
        reward = "filtered_rewards" if "filtered_rewards" in record else "rewards"
        yield {**made, "reward": _one(record.get(reward)), "policy_version": int(step[1]) if step else None}


def _one(batch: Any) -> Any:
    """The item of a batch of one; None where the batch is empty, itself where it is none."""
    if not isinstance(batch, list) or len(batch) > 1:
        return batch
    return batch[0] if batch else None


def _of_messages(record: Any) -> Values:
    messages = _one(record.get("content"))
    if not is_chat(messages):
        raise Refused("no_prompt", "neither token ids nor messages")
    prompt, turns = split_conversation(messages)
    extra = _extra(record, "content")
    return {"prompt": prompt or None, "response": turns or None, "extra": extra}


def _of_ids(record: Any) -> Values:
    ids, mask = _one(record.get("token_ids")), _one(record.get("token_loss_mask"))
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise Refused("bad_mask", "token_loss_mask is not as long as token_ids")
    if 1 not in mask:
        raise Refused("no_response", "token_loss_mask holds no token of the policy")
    first, last = mask.index(1), len(mask) - mask[::-1].index(1)
    end = _length(record.get("input_lengths"), last, len(ids))
    own = [item == 1 for item in mask[first:end]]
    logprobs = _of_response(_one(record.get("generation_logprobs")), own, first, len(ids))
    odd = isinstance(logprobs, list) and len(logprobs) != len(own)
    extra = _extra(record, *_OF_IDS)
    for name in _PER_TOKEN & extra.keys():
        extra[name] = _shared(_of_response(extra[name], own, first, len(ids)))
    return {
        "prompt_ids": ids[:first],
        "response_ids": ids[first:end],
        "behavior_logprobs": None if odd else logprobs,
        "loss_mask": None if all(own) else mask[first:end],
        "flags": ["logprob_length"] if odd else [],
        "extra": extra,
    }


def _length(logged: Any, last: int, padded: int) -> int:
    """Where the padding begins; behind the last token of the policy where the log does not say."""
    length = _one(logged)
    if not isinstance(length, int) or isinstance(length, bool):
        return last
    if not last <= length <= padded:
        raise Refused("bad_mask", f"input_lengths is {length}, token_loss_mask ends at {last} of {padded}")
    return length


def _of_response(values: Any, own: list[bool], first: int, padded: int) -> Any:
    """One value a token, without prompt and padding; None for tokens that the policy did not sample.

    What does not have as many values as the padded ids stays as it is.
    """
    if not isinstance(values, list) or len(values) != padded:
        return values
    values = values[first : first + len(own)]
    if all(own):
        return values
    return [value if sampled else None for value, sampled in zip(values, own, strict=True)]


def _shared(values: Any) -> Any:
    """The one value that all tokens have, such as an advantage; else all values."""
    alike = isinstance(values, list) and values and values.count(values[0]) == len(values)
    return values[0] if alike else values


def _extra(record: Any, *used: str) -> dict[str, Any]:
    """The other fields. With `filtered_rewards`, `rewards` are those of other rows: it stays as logged."""
    names = ("filtered_rewards",) if "filtered_rewards" in record else ("rewards",)
    return {name: _one(value) for name, value in without(record, *used, *names).items()}
