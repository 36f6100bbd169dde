"""The columns that shaping takes, computes and gives."""

from data_tools.schema import ROLLOUTS, TOKEN_COLUMNS

COLUMNS = (
    *("response_id", "group_key", "file", "file_row", "policy", "policy_version", "staleness", "reward"),
    *("temperature", "logprob_kind", "n_prompt_tokens", "n_tokens", "behavior_logprob", "expert"),
    *("group_mean", "group_std", "group_size", "advantage", "weight", "priority"),
)
"""The columns of the result, a row per kept response."""

ROW_COLUMNS = frozenset(ROLLOUTS.names) - frozenset(TOKEN_COLUMNS) | frozenset(
    ("age_days", "staleness", "split", "file", "file_row")
)
"""The columns of the view `rollouts` that an expression may use."""

WIDE_COLUMNS = frozenset(("prompt", "tools", "response", "response_messages", "extra"))
"""Columns of text without bound, which no sort or join should carry."""

POPULATION = ("group_key", "expert")
STATISTICS = (*POPULATION, "group_size", "group_mean", "group_std", "group_min", "group_max")
ADVANTAGE = (*STATISTICS, "baseline", "advantage")

FIELDS: dict[str, tuple[str, ...]] = {
    "where": (),
    "group_by": (),
    "expert": (),
    "baseline": STATISTICS,
    "scale": STATISTICS,
    "drop": ADVANTAGE,
    "advantage": ADVANTAGE,
    "weight": ADVANTAGE,
    "keep": (*ADVANTAGE, "weight"),
    "priority": (*ADVANTAGE, "weight"),
}
"""The fields that hold SQL in the order in which they apply, each with the computed columns it may use."""
