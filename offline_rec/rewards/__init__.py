"""Rewards by name: one interface for judging responses when they are sampled, evaluated or collected.

`get("exact")(["4", "5"], answers=["4", "4"])` is `[1.0, 0.0]`. A new reward is a function that makes a rule
from its options, and its entry in `REWARDS`.
"""

import difflib
from collections.abc import Callable
from typing import Any

from data_tools.errors import ConfigError
from data_tools.rewards.functions import function_reward
from data_tools.rewards.reward import Judgement, Reward, Rule
from offline_rec.rewards.text import contains, exact, regex

__all__ = ["REWARDS", "Judgement", "Reward", "get"]

REWARDS: dict[str, Callable[..., Rule]] = {"exact": exact, "contains": contains, "regex": regex}


def get(name: str, **options: Any) -> Reward:
    """The reward of that name: `(responses: list[str], **columns: list) -> list[float | None]`.

    `module:function` is a function of your own, sync or async, called with all responses at once and those
    of the columns that it has parameters for. Raises ConfigError for an unknown name or option.
    """
    if ":" in name:
        return function_reward(name, **options)
    if name not in REWARDS:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        known = f"known: {', '.join(sorted(REWARDS))}, module:function"
        raise ConfigError(f"unknown reward {name!r}", f"did you mean {near[0]!r}?" if near else known)
    try:
        return Reward(name, REWARDS[name](**options))
    except TypeError as error:
        raise ConfigError(f"reward {name}: {error}".replace(f"{name}() ", "")) from error
