"""Whole token sequences, prompt and response in one list with a mask: cut apart the way a dataset has them.

The response begins with the first token that the policy produced, so what a chat template puts before its
turn is prompt. Tokens of tool results and of later user turns stay inside the response, masked 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from data_tools.collecting.reasons import Refused


def span(mask: Any) -> slice:
    """Where the response stands: from the first to the last produced token; raises Refused for no mask."""
    if not isinstance(mask, list) or not all(value in (0, 1) for value in set(mask)):
        raise Refused("bad_mask", "not one 0 or 1 for each token")
    if 1 not in mask:
        raise Refused("no_response", "the mask leaves no token that the policy produced")
    return slice(mask.index(1), len(mask) - mask[::-1].index(1))


def produced(values: Any, mask: Sequence[Any]) -> Any:
    """Values of the tokens that the policy produced, None elsewhere: what a log writes there is a filler."""
    if not isinstance(values, list) or len(values) != len(mask) or all(mask):
        return values
    return [value if own else None for value, own in zip(values, mask, strict=True)]


def partial_mask(mask: Sequence[Any]) -> list[int] | None:
    """The mask as numbers; None where the policy produced every token."""
    return None if all(mask) else [int(own) for own in mask]


def compact(streams: Mapping[str, Any]) -> dict[str, Any]:
    """Per-token fields for `extra`: those of one value throughout as that value, those of none left out."""
    made = {}
    for name, values in streams.items():
        if isinstance(values, list) and values:
            same = values.count(values[0]) == len(values)
            made[name] = values[0] if same else values
        elif not isinstance(values, list):
            made[name] = values
    return {name: value for name, value in made.items() if value is not None}
