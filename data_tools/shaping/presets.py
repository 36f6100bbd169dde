"""The named baselines, scales and drop rules, as DuckDB expressions.

They may use `reward`, the statistics of the group, the window `grp` over its rewards, and the parameters of
the shaping in braces. Sums of doubles depend on their order, and that of a parallel scan is not fixed: `ORDER
BY reward` inside the aggregate makes the result the same to the last bit on every run, with any number of
threads and in any order of files.
"""

from data_tools.shaping.fields import Shaping

EQUAL = "1e-9 * greatest(1, abs(group_max))"
"""Rewards of a group that differ by no more than this are equal; the view `groups` draws the same line."""

GROUP_WINDOW = "WINDOW grp AS (PARTITION BY group_key)"

GROUP_STATISTICS = {
    "group_size": "count(*) OVER grp",
    "group_min": "min(reward) OVER grp",
    "group_max": "max(reward) OVER grp",
    "group_mean": "avg(reward ORDER BY reward) OVER grp",
    "group_std": f"CASE WHEN group_max - group_min <= {EQUAL}\n      THEN 0"
    " ELSE stddev_pop(reward ORDER BY reward) OVER grp END",
}

# Ties with the mean count as positive, also where the mean is rounded up.
POSITIVE = (
    "reward >= avg(reward ORDER BY reward) OVER grp\n    - 1e-9 * greatest(1, abs(max(reward) OVER grp))"
)

GLOBAL_MEAN = "avg(reward ORDER BY reward) OVER ()"

BASELINES = {
    "mean": "group_mean",
    # The mean of the others as a correction of the mean: reward - baseline = n / (n - 1) * (reward - mean).
    "loo": "CASE WHEN group_size = 1 THEN reward"
    " ELSE group_mean + (group_mean - reward) / (group_size - 1) END",
    "global": GLOBAL_MEAN,
    "shrunk": f"(group_size * group_mean + {{shrink_k}} * {GLOBAL_MEAN}) / (group_size + {{shrink_k}})",
    # The largest exponent is 0, so that no tau overflows.
    "logavgexp": "group_max + {tau} * ln(avg(exp((reward - group_max) / {tau}) ORDER BY reward) OVER grp)",
    "none": "0",
}

SCALES = {
    "none": "1",
    # A group without spread has nothing to be scaled by; eps alone would blow a shift up a millionfold.
    "std": "CASE WHEN group_std = 0 THEN 1 ELSE group_std + {eps} END",
}

DROPS = {
    "none": "false",
    "zero-variance": "group_std = 0",
    # Comes before the statistics, because they are taken over what it leaves; see statement.py.
    "balance": "NOT positive AND row_number() OVER (\n      PARTITION BY group_key, positive"
    " ORDER BY {draw}, response_id\n    ) > count(*) FILTER (positive) OVER grp",
}

PRESETS: dict[str, dict[str, str]] = {"baseline": BASELINES, "scale": SCALES, "drop": DROPS}


def preset(shaping: Shaping, field: str) -> str | None:
    """Return the expression of the preset that the field names, or None if it is an expression itself."""
    template = PRESETS.get(field, {}).get(str(getattr(shaping, field)).strip())
    if template is None:
        return None
    draw = f"md5('{shaping.seed}:' || response_id)"
    return template.format(
        shrink_k=repr(shaping.shrink_k), tau=repr(shaping.tau), eps=repr(shaping.eps), draw=draw
    )
