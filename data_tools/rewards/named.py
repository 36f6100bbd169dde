"""Rewards by name: one interface for judging responses when they are sampled, evaluated or collected.

`get("exact")(["4", "5"], answers=["4", "4"])` is `[1.0, 0.0]`. A new reward is a function that makes a rule
from its options, and its entry in `REWARDS`.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from data_tools.errors import ConfigError
from data_tools.rewards.choice import choice
from data_tools.rewards.functions import function_reward
from data_tools.rewards.http_judge import http
from data_tools.rewards.json_schema import json_schema
from data_tools.rewards.math_answers import math
from data_tools.rewards.reward import NOT_JUDGED, Columns, NotJudged, Reward, Rule
from data_tools.rewards.spelling import Term, terms
from data_tools.rewards.sql import sql
from data_tools.rewards.text import contains, exact, regex

T = TypeVar("T")

_FUNCTION = re.compile(r"[\w.]*:[\w.]*")

REWARDS: dict[str, Callable[..., Rule]] = {
    "math": math,
    "exact": exact,
    "contains": contains,
    "regex": regex,
    "choice": choice,
    "json-schema": json_schema,
    "http": http,
    "sql": sql,
}
"""What makes the rule of each reward from its options."""


def get(definition: str, **options: Any) -> Reward:
    """A reward that is called as `(responses: list[str], **columns: list) -> list[float | None]`.

    `definition` is what `--reward` takes, fields aside: a name, with options in parentheses or as arguments;
    `module:function`, a function of your own, sync or async, called with all responses at once and those of
    the columns that it has parameters for; a weighted sum of such; or SQL over the row. Raises ConfigError
    for an unknown name or option.
    """
    text = definition.strip()
    if options:
        found = terms(text)
        if found is None or len(found) != 1 or found[0].weight != 1:
            raise ConfigError(f"reward {text!r} takes no further options", "write them into its terms")
        made = _one(text, Term(found[0].name, {**found[0].options, **options}))
        return Reward(text, made.rule, f"{text} {sorted(options.items())!r}")
    return spelt(text) or sql_or_unknown(text, lambda expression: Reward(expression, sql(expression)))


def spelt(text: str) -> Reward | None:
    """The reward that a text spells by name; None where it may be SQL.

    Raises ConfigError where it is a name alone, or a sum with a known name, and holds an unknown one.
    """
    found = [Term(text)] if _FUNCTION.fullmatch(text) else terms(text)
    if found is None:
        return None
    unknown = [term.name for term in found if not _is_known(term.name)]
    if len(unknown) == len(found) and text != unknown[0]:
        return None
    if unknown:
        raise _unknown(unknown[0])
    if len(found) == 1 and found[0].weight == 1:
        return _one(text, found[0])
    return Reward(text, _combined([(term.weight, _one(term.name, term)) for term in found]))


def sql_or_unknown(text: str, make: Callable[[str], T]) -> T:
    """What `make` makes of an SQL text; where it is none, but looks like a reward misspelt, says so."""
    try:
        return make(text)
    except ConfigError as error:
        found = terms(text)
        if found and (found[0].options or not found[0].name.isidentifier()):
            raise _unknown(found[0].name) from error
        for name in REWARDS:
            if text.startswith(f"{name}("):
                options = f"options are written {name}(option=value), a text with a comma in quotes"
                raise ConfigError(error.message, options) from error
        raise


def _is_known(name: str) -> bool:
    return name in REWARDS or ":" in name


def _unknown(name: str) -> ConfigError:
    near = difflib.get_close_matches(name, REWARDS, n=1)
    known = f"known: {', '.join(sorted(REWARDS))}, module:function"
    return ConfigError(f"unknown reward {name!r}", f"did you mean {near[0]!r}?" if near else known)


def _one(title: str, term: Term) -> Reward:
    if not _is_known(term.name):
        raise _unknown(term.name)
    make = function_reward if ":" in term.name else REWARDS[term.name]
    try:
        made = make(term.name, **term.options) if make is function_reward else make(**term.options)
    except TypeError as error:
        text = str(error).replace(f"{make.__name__}() ", "")
        raise ConfigError(f"reward {term.name}: {text}") from error
    return Reward(title, made.rule if isinstance(made, Reward) else made)


def _combined(parts: Sequence[tuple[float, Reward]]) -> Rule:
    """The weighted sum; a response that one of them does not judge has no reward."""

    def judge(responses: list[str], columns: Columns) -> Sequence[Any]:
        totals: list[Any] = [0.0] * len(responses)
        for weight, reward in parts:
            judged = reward.judge_rows(responses, columns)
            for row, (value, reason) in enumerate(zip(judged.rewards, judged.reasons, strict=True)):
                if totals[row] is None or isinstance(totals[row], NotJudged):
                    continue
                if value is not None:
                    totals[row] += weight * value
                else:
                    totals[row] = None if reason == NOT_JUDGED else NotJudged(f"{reward.name}: {reason}")
        return totals

    return judge
