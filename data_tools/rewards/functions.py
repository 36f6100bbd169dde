"""A reward function of the user's own, named as `module:function`."""

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from data_tools.errors import ConfigError, RecError
from data_tools.rewards.reward import Columns, Reward, Rule


def function_reward(function: str | Callable[..., Any]) -> Reward:
    """The reward that calls a function, or `module:function`, with all responses and the columns it names.

    If that call fails, each response is judged in a call of its own, so that only those that fail are null.
    """
    if isinstance(function, str):
        return Reward(function, _rule(function, load_function(function)))
    name = getattr(function, "__qualname__", type(function).__name__)
    return Reward(name, _rule(name, function))


def _rule(name: str, function: Callable[..., Any]) -> Rule:
    takes = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in takes)
    named = [p for p in list(takes)[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = {p.name for p in named if p.default is p.empty}

    def call(responses: list[str], columns: Columns) -> Sequence[Any]:
        verdicts: Sequence[Any] = _finished(function(responses, **columns))
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
        try:
            return call(responses, chosen)
        except RecError:
            raise
        except Exception:
            return [_alone(call, responses, chosen, i) for i in range(len(responses))]

    return judge


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


def _alone(call: Callable[..., Sequence[Any]], responses: list[str], columns: Columns, index: int) -> Any:
    row = {name: values[index : index + 1] for name, values in columns.items()}
    try:
        return call(responses[index : index + 1], row)[0]
    except Exception as error:
        return error


def _finished(result: Any) -> Any:
    """What an async function comes to; a plain result as it is."""
    if not inspect.isawaitable(result):
        return result

    async def wait(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    # A loop of its own, in a thread of its own: the caller may be running one already.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, wait(result)).result()
