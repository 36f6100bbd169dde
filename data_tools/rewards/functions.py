"""A reward function of the user's own, named as `module:function`."""

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from data_tools.errors import ConfigError, RecError
from data_tools.rewards.limits import in_thread, too_slow, within
from data_tools.rewards.reward import Columns, NotJudged, Reward, Rule

SECONDS = 600.0
"""How long one call of a function may take, unless told."""


def function_reward(
    function: str | Callable[..., Any], *, seconds: float = SECONDS, batch: int | None = None
) -> Reward:
    """The reward that calls a function, or `module:function`, with all responses and the columns it names.

    If that call fails, each response is judged in a call of its own, so that only those that fail are null.
    A call that takes longer than `seconds` judges none of its responses; `batch` of them are in one call at
    most. Raises ConfigError for a limit that is none.
    """
    if seconds <= 0 or (batch is not None and batch < 1):
        raise ConfigError(f"a reward function takes seconds > 0 and batch >= 1; got {seconds} and {batch}")
    named = isinstance(function, str)
    name = function if isinstance(function, str) else _name(function)
    called = load_function(name) if named else function
    assert callable(called)
    return Reward(name, _rule(name, called, seconds, batch))


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _rule(name: str, function: Callable[..., Any], seconds: float, batch: int | None) -> Rule:
    takes = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in takes)
    named = [p for p in list(takes)[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = {p.name for p in named if p.default is p.empty}

    def call(responses: list[str], columns: Columns) -> Sequence[Any]:
        verdicts: Sequence[Any] = within(seconds, lambda: _finished(function(responses, **columns), seconds))
        if not hasattr(verdicts, "__len__") or len(verdicts) != len(responses):
            raise ValueError(f"{name} returned {verdicts!r:.80} for {len(responses)} responses")
        return verdicts

    def judge(responses: list[str], columns: Columns) -> Sequence[Any]:
        lacking = needed - columns.keys()
        if lacking:
            given = ", ".join(columns) or "none"
            raise ConfigError(f"{name} takes the column {min(lacking)!r}; given: {given}")
        wanted = columns if takes_all else [p.name for p in named if p.name in columns]
        chosen = {column: columns[column] for column in wanted}
        size = batch or len(responses)
        starts = range(0, len(responses), size)
        return [verdict for at in starts for verdict in judge_some(*_part(responses, chosen, at, size))]

    def judge_some(responses: list[str], columns: Columns) -> Sequence[Any]:
        try:
            return call(responses, columns)
        except RecError:
            raise
        except NotJudged as late:  # each alone might take as long
            return [late] * len(responses)
        except Exception:
            return [_alone(call, *_part(responses, columns, i, 1)) for i in range(len(responses))]

    return judge


def _part(responses: list[str], columns: Columns, at: int, count: int) -> tuple[list[str], Columns]:
    part = slice(at, at + count)
    return responses[part], {name: values[part] for name, values in columns.items()}


def load_function(name: str) -> Callable[..., Any]:
    """Import `module:function`, also from the working directory; ConfigError if there is no such thing."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"reward {name!r} cannot be loaded: {error}", "write module:function, as Python would import it"
        ) from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise ConfigError(f"reward {name!r} is a {type(found).__name__}, not a function")
    return found


def _alone(call: Callable[..., Sequence[Any]], responses: list[str], columns: Columns) -> Any:
    try:
        return call(responses, columns)[0]
    except Exception as error:
        return error


def _finished(result: Any, seconds: float) -> Any:
    """What an async function comes to; a plain result as it is."""
    if not inspect.isawaitable(result):
        return result

    async def wait(awaitable: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(seconds) as limit:  # so that it can end in order
                return await awaitable
        except TimeoutError as error:
            raise (too_slow(seconds) if limit.expired() else error) from None

    # A loop of its own, in a thread of its own: the caller may be running one already.
    return in_thread(seconds + 1, lambda: asyncio.run(wait(result)))
