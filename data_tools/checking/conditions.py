"""What can be told from the scalar columns, a condition each: groups, rewards, log-probs, sampling."""

from data_tools.checking.findings import Rule
from data_tools.checking.levels import Condition
from data_tools.collecting.columns import ALIASES

TRUNCATED_SHARE = 0.1
"""Below this share, responses cut at the length limit are the rule, not a finding."""

_FIT = "rec fit {dataset} --model {model} --out RUN"
_COLLECT = "rec collect LOGS --into NEW"
_REWARD_FIELDS = ", ".join(f"extra->>'$.\"{name}\"'" for name in ("reward", *ALIASES["reward"]))

GROUPS = (
    Condition(
        Rule(
            "mixed_group",
            "warning",
            "one group id holds several prompts, so rewards of different tasks are compared",
            f"{_FIT} --group-by prompt_hash",
            "groups",
        ),
        "groups",
        "mixed AND NOT turns",
    ),
    Condition(
        Rule(
            "split_group",
            "warning",
            "one prompt stands under several group ids, and some of these groups are a single response",
            f"{_FIT} --group-by prompt_hash",
            "prompts",
        ),
        "prompts",
        "n_groups > 1 AND smallest = 1",
    ),
    Condition(
        Rule(
            "repeated_prompt",
            "info",
            "one prompt stands under several group ids, each with several responses (epochs, or policies)",
            f"{_FIT} --group-by prompt_hash",
            "prompts",
        ),
        "prompts",
        "n_groups > 1 AND smallest > 1",
    ),
    Condition(
        Rule(
            "single_group",
            "info",
            "the group is a single response: against its own mean it gives no signal",
            f"{_FIT} --baseline shrunk",
            "groups",
        ),
        "groups",
        "n = 1",
    ),
    Condition(
        Rule(
            "ragged_group",
            "info",
            "the group is not of the size that most have",
            'rec sql {dataset} "SELECT n, count(*) AS groups FROM groups GROUP BY n ORDER BY n"',
            "groups",
        ),
        "groups",
        "n <> usual_n AND n > 1",
    ),
    Condition(
        Rule(
            "no_contrast",
            "warning",
            "no group has two rewards that differ, so nothing is better than anything else",
            f"{_FIT} --baseline global",
            "groups",
        ),
        "groups",
        "n_rewarded > 0 AND spread <= 1e-9 * greatest(1, most)",
        least=1.0,
    ),
)

REWARDS = (
    Condition(
        Rule(
            "reward_not_finite",
            "error",
            "the reward is infinite or NaN",
            'rec reward {dataset} --reward RULE --where "NOT isfinite(reward)"',
        ),
        "rows",
        "NOT isfinite(reward)",
    ),
    Condition(
        Rule(
            "reward_unreadable",
            "warning",
            "the log has a reward that is no number; it counts as missing, what was logged is in `extra`",
            f"{_COLLECT} --reward SQL",
        ),
        "rows",
        f"reward IS NULL AND NOT list_contains(flags, 'shared_reward')"
        f" AND coalesce({_REWARD_FIELDS}) IS NOT NULL",
    ),
    Condition(
        Rule(
            "no_rewards",
            "warning",
            "no row has a reward",
            "rec reward {dataset} --reward RULE",
        ),
        "rows",
        "reward IS NULL",
        least=1.0,
    ),
    Condition(
        Rule(
            "missing_reward",
            "info",
            "the row has no reward yet, so it is not learned from",
            'rec reward {dataset} --reward RULE --where "reward IS NULL"',
        ),
        "rows",
        "reward IS NULL AND usual_reward IS NOT NULL",
    ),
    Condition(
        Rule(
            "reward_outlier",
            "warning",
            "the reward is more than ten times as large as that of nearly all rows",
            'rec sql {dataset} "SELECT response_id, reward FROM rollouts ORDER BY abs(reward) DESC LIMIT 20"',
        ),
        "rows",
        "usual_reward > 0 AND isfinite(reward) AND abs(reward) > 10 * usual_reward",
    ),
)

SAMPLING = (
    Condition(
        Rule(
            "unknown_kind",
            "warning",
            "nobody says whether the log-probs are those before or after temperature and top-p, and at these"
            " settings it matters; they count as raw",
            "rec check {dataset} --model MODEL",
        ),
        "rows",
        "logprob_kind = 'unknown' AND (list_contains(flags, 'raw_at_temperature') OR (behavior_logprob IS NOT"
        " NULL AND (temperature IS DISTINCT FROM 1 OR top_p < 1 OR top_k > 0)))",
    ),
    Condition(
        Rule(
            "raw_at_temperature",
            "warning",
            "log-probs from before the temperature are no probabilities of sampling: they are not used",
            f"{_FIT} --anchor start",
        ),
        "rows",
        "logprob_kind = 'raw' AND list_contains(flags, 'raw_at_temperature')",
    ),
    Condition(
        Rule(
            "missing_temperature",
            "warning",
            "processed log-probs without their temperature; it counts as 1",
            f"{_COLLECT} --map temperature=NUMBER",
        ),
        "rows",
        "logprob_kind = 'processed' AND behavior_logprob IS NOT NULL AND temperature IS NULL",
    ),
    Condition(
        Rule(
            "cut_sampling",
            "warning",
            "sampled with top-p or top-k, which ratios do not know: a little off, and the rest never came",
            f"{_FIT} --anchor start",
        ),
        "rows",
        "behavior_logprob IS NOT NULL AND (top_p < 1 OR top_k > 0)",
    ),
    Condition(
        Rule(
            "greedy",
            "warning",
            "temperature 0: the response was not sampled, its log-probs are not used",
            f'{_FIT} --where "temperature IS DISTINCT FROM 0"',
        ),
        "rows",
        "temperature = 0",
    ),
    Condition(
        Rule(
            "no_logprobs",
            "info",
            "no usable log-probs of the policy that sampled",
            f"{_FIT} --anchor start",
        ),
        "rows",
        "behavior_logprob IS NULL",
    ),
    Condition(
        Rule(
            "truncated",
            "warning",
            "cut at the length limit: the reward judges half a response, and there is no end to learn",
            f"{_FIT} --where \"finish_reason IS DISTINCT FROM 'length'\"",
        ),
        "rows",
        "finish_reason = 'length' OR list_contains(flags, 'truncated')",
        least=TRUNCATED_SHARE,
    ),
    Condition(
        Rule(
            "missing_finish_reason",
            "warning",
            "text without token ids and without a finish reason: it is given an end token as if complete",
            f"{_COLLECT} --map finish_reason=SQL",
        ),
        "rows",
        "n_tokens IS NULL AND finish_reason IS NULL AND NOT list_contains(flags, 'truncated')",
    ),
    Condition(
        Rule(
            "empty_response",
            "warning",
            "the response is empty",
            f"{_FIT} --where \"response <> ''\"",
        ),
        "rows",
        "coalesce(response, '') = '' AND response_messages IS NULL AND coalesce(n_tokens, 0) = 0",
    ),
)

POLICIES = (
    Condition(
        Rule(
            "future",
            "warning",
            "sampled more than a day from now: the clock or the unit of time is wrong",
            f"{_COLLECT} --map sampled_at=SQL",
        ),
        "rows",
        "age_days < -1",
    ),
    Condition(
        Rule(
            "no_policy",
            "info",
            "nobody says which policy sampled the response, so its staleness is unknown",
            f"{_COLLECT} --policy NAME --policy-version NUMBER",
        ),
        "rows",
        "policy IS NULL",
    ),
)

CONDITIONS = (*REWARDS, *GROUPS, *SAMPLING, *POLICIES)
