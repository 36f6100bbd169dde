"""The responses of one call to an OpenAI-compatible server, chat or legacy completions, as rows.

All choices of a call share its prompt, and so their group. The log-probs of alternatives (`top_logprobs`) and
of the prompt, and routed experts, are not kept; every other field is in `extra`, all levels side by side.
"""

import re
from collections.abc import Iterator
from typing import Any

from data_tools.collecting.columns import names_of, pick
from data_tools.collecting.reasons import Refused
from data_tools.readers.base import Values
from data_tools.readers.call_prompts import Prompt, prompts_of
from data_tools.readers.echo import is_echo, without_echo
from data_tools.readers.exchange import Exchange, Object, decoded, failure
from data_tools.readers.token_logprobs import TokenLogprobs, token_logprobs

AROUND = (
    "response_id", "group_id", "run", "trajectory_id", "turn", "policy_version", "logprob_kind", "ids_source",
    "truncated",
)  # fmt: skip
"""Columns that a log may give beside the call, by any of their names; reward, policy and time besides."""

NOT_KEPT = ("prompt_logprobs", "routed_experts")
_FINISH_REASONS = ("stop", "length", "tool_calls", "function_call")
_VERSION = re.compile(r"(?:[A-Za-z_]+[-_:]?)?(\d{1,15})")


def completions(call: Exchange) -> Iterator[Values | Refused]:
    """Yield one row per choice, by index; raises Refused where no response of the call can be used."""
    choices = _in_order(call.choices)
    prompts = prompts_of(call, choices)
    rewards, around = _rewards(call.around, len(choices))
    shared, rest = _shared(call.request, call.body, around)
    rest[""] |= call.beside
    incomplete = ["incomplete_group"] if _requested(call.request, prompts) > len(choices) else []
    for at, choice in enumerate(choices):
        try:
            row, left = _row(choice, prompts[at], call.request)
        except Refused as refused:
            yield refused
            continue
        if row["response_id"] is None:
            row["response_id"] = _response_id(call.body, shared["response_id"], choice.get("index", at))
        if row["reward"] is None:
            row["reward"] = rewards[at] if rewards else None
            row["flags"] += [] if rewards else ["shared_reward"]
        row["flags"] += incomplete
        yield {**shared, **row, "extra": _merged({"": rest[""], "choice_": left, **rest})}


def _in_order(choices: list[Any]) -> list[Any]:
    """Choices by their index, where each has its own: servers finish them in any order."""
    indexes = [choice.get("index") if isinstance(choice, dict) else None for choice in choices]
    if not all(type(index) is int for index in indexes) or len(set(indexes)) < len(indexes):
        return choices
    return sorted(choices, key=lambda choice: int(choice["index"]))


def _requested(request: Object, prompts: list[Prompt]) -> int:
    """How many responses the request asked for; 0 if it does not say."""
    n = request.get("n")
    return n * len({prompt.place for prompt in prompts}) if type(n) is int else 0


def _rewards(around: Object, count: int) -> tuple[list[Any], Object]:
    """The reward of each choice, and the fields around the call without it.

    One reward for several responses does not say what each is worth: it stays where it is, the list is empty.
    """
    rest = dict(around)
    logged = taken(rest, "reward")
    if logged is None:
        return [None] * count, rest
    if count == 1:
        return [logged], rest
    fits = isinstance(logged, list) and len(logged) == count
    return (logged, rest) if fits else ([], around)


def _shared(request: Object, body: Object, around: Object) -> tuple[Object, dict[str, Object]]:
    """Columns that all choices have in common, and what is left over at each level."""
    request, body, around = dict(request), dict(body), dict(around)
    row: Object = {column: taken(around, column) for column in AROUND}
    row["policy"] = _said(around, "policy", body, "model") or request.get("model")
    row["sampled_at"] = _said(around, "sampled_at", body, "created")
    row["logprob_kind"] = row["logprob_kind"] or _logprob_kind(around.get("engine"), body, request)
    row["policy_version"] = version_number(row["policy_version"])
    row["tools"] = request.pop("tools", None) or functions_as_tools(request.pop("functions", None))
    row |= {name: request.pop(name, None) for name in ("temperature", "top_p", "top_k")}
    model = request.pop("model", None)
    request |= {} if model == row["policy"] else {"request_model": model}
    for name in ("messages", "prompt", "prompt_token_ids", "prompt_text", *NOT_KEPT):
        (request if name in ("messages", "prompt") else body).pop(name, None)
    return row, {"": around, "response_": body, "request_": request}


def taken(fields: Object, column: str) -> Any:
    """The value of a column under one of its names, taken out of `fields`; None if there is none."""
    present = [name for name in names_of(column) if name in fields]
    name = pick(fields, present, column) if present else None
    return None if name is None else fields.pop(name)


def _said(around: Object, column: str, body: Object, name: str) -> Any:
    """A column that the log gives by its very name, else what the server said, else an alias in the log."""
    if around.get(column) is None and body.get(name) is not None:
        return body.pop(name)
    return taken(around, column)


def _logprob_kind(*levels: Any) -> Any:
    names = names_of("logprob_kind")
    found = (level.get(name) for level in levels if isinstance(level, dict) for name in names)
    return next((kind for kind in found if kind is not None), None)


def functions_as_tools(functions: Any) -> Any:
    """Tool definitions of the API's older form in the newer one, which chat templates know."""
    if not isinstance(functions, list) or not functions:
        return None
    return [{"type": "function", "function": function} for function in functions]


def _response_id(body: Object, given: Any, index: Any) -> str | None:
    """The log's or the server's id, per choice; the time is part of it, as small servers reuse their ids."""
    parts = [given, index] if given else [body.get("id"), body.get("created"), index]
    usable = isinstance(parts[0], str | int) and not isinstance(parts[0], bool) and parts[0] != ""
    return "/".join(map(str, parts)) if usable else None


def _merged(levels: dict[str, Object]) -> Object:
    """Fields of several levels side by side; one that an earlier level has too gets a prefix."""
    made: Object = {}
    for prefix, fields in levels.items():
        for name, value in fields.items():
            if value is not None and made.get(name) != value:
                made[prefix + name if name in made else name] = value
    return made


def _row(choice: Any, prompt: Prompt, request: Object) -> tuple[Object, Object]:
    """The columns of one choice, and what is left of it."""
    if isinstance(choice, Refused):
        raise choice
    if not isinstance(choice, dict):
        raise Refused("bad_record", f"a choice that is no object but {type(choice).__name__}")
    failed = failure({"error": choice["error"]}) if choice.get("error") else ""
    if failed:
        raise Refused("failed_call", failed)
    left = {name: value for name, value in choice.items() if name not in NOT_KEPT}
    row = _response(left)
    tokens, ids = token_logprobs(left.pop("logprobs", None)), taken(left, "response_ids")
    taken(left, "prompt_ids")  # prompt.ids already
    row["response_id"] = taken(left, "response_id")
    row |= {"prompt": prompt.text, "prompt_ids": prompt.ids, "flags": []}
    text = choice.get("text")
    if isinstance(text, str) and (request.get("echo") is True or is_echo(text, tokens, prompt.text)):
        made = without_echo(text, tokens, prompt.text, (prompt.ids, ids))
        if made.text == "" and request.get("max_tokens") == 0:
            raise Refused("no_response", "the call only scored its prompt")
        row["response"], tokens = made.text, made.tokens
        row["flags"] += ["logprob_length"] if made.lost else []
    row |= _paired(tokens, ids, row["flags"])
    row["finish_reason"] = _finish_reason(left)
    oldest = _oldest_version(left.get("weight_versions") or [{"version": left.get("weight_version")}])
    row |= {} if oldest is None else {"policy_version": oldest}
    row["reward"] = taken(left, "reward")
    return row, left


def _response(left: Object) -> Object:
    """Text or message of a choice, taken out of it."""
    message, text = left.pop("message", None), left.pop("text", None)
    if message is None and "delta" in left:
        raise Refused("bad_record", "a piece of a stream, not a whole response")
    if not isinstance(message, dict):
        return {"response": text if message is None else message}
    if not message.get("content") and isinstance(message.get("refusal"), str):
        return {"response": message["refusal"], "response_messages": [message]}
    # A message that says nothing at all is a missing response, not an empty one.
    says = any(value not in (None, [], {}) for name, value in message.items() if name != "role")
    return {"response": message if says else None}


def _paired(tokens: TokenLogprobs | None, ids: Any, flags: list[str]) -> Object:
    """Log-probs and the ids that belong to them: the server's, or those that stand for the token texts."""
    if tokens is None:
        return {"response_ids": ids}
    if not tokens.whole:
        flags.append("logprob_length")
        return {"response_ids": ids}
    if tokens.ids is None:
        row = {"response_ids": ids, "behavior_logprobs": tokens.values}
        # Texts of tokens only tell where a surplus of log-probs stands.
        surplus = ids is not None and (not isinstance(ids, list) or len(tokens.values) > len(ids))
        return row | {"logprob_tokens": tokens.texts} if surplus else row
    ids = decoded(ids)
    if not isinstance(ids, list) or ids == tokens.ids[: len(ids)]:
        return {"response_ids": tokens.ids, "behavior_logprobs": tokens.values}
    if ids[: len(tokens.ids)] == tokens.ids:
        return {"response_ids": ids, "behavior_logprobs": tokens.values}
    flags.append("logprob_length")
    return {"response_ids": ids}


def _finish_reason(left: Object) -> Any:
    """Why a choice ended; what is not in the words of OpenAI's API stays in `left` as logged too."""
    finish = left.get("finish_reason")
    if finish in _FINISH_REASONS:
        del left["finish_reason"]
    return finish.get("type") if isinstance(finish, dict) else finish


def version_number(version: Any) -> Any:
    """The number in a version such as "step-12" or "w000031"; what holds none stays as it is."""
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    return int(match[1]) if match else version


def _oldest_version(spans: Any) -> int | None:
    """The least version of vLLM's spans [{"version", "start", "end"}]; None if one is no number."""
    if not isinstance(spans, list) or not spans:
        return None
    versions = [version_number(span.get("version")) if isinstance(span, dict) else None for span in spans]
    numbers = [version for version in versions if type(version) is int]
    return min(numbers) if len(numbers) == len(spans) else None
