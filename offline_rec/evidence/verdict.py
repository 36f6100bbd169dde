"""What may be said of a policy from logged responses: `better`, `worse`, `no difference`, or nothing at all.

The rules stand here alone; `docs/ope.md` shows them as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from offline_rec.evidence.diagnostics import Diagnostics
from offline_rec.sampling.evaluate import Interval

Word = Literal["better", "worse", "no difference", "not identifiable"]

LEAST_PROMPTS = 20
LEAST_ESS, LEAST_ESS_SHARE = 50, 0.01
LIMIT_ERRORS, LIMIT_MEAN = 3, 0.05
LARGEST_K, NEARLY_EQUAL = 0.7, 0.9
NEGLIGIBLE = 0.001
"""Share of the standard deviation of rewards below which a gain is none, however surely it is one."""


@dataclass(frozen=True)
class Rule:
    """A reason why nothing can be said: what breaks it as told, why that matters, and how it is told.

    `broken` is asked of the diagnostics; `told` is filled with them.
    """

    code: str
    breaks: str
    why: str
    told: str
    broken: Callable[[Diagnostics], bool]


RULES = (
    Rule(
        "few_prompts",
        f"fewer than {LEAST_PROMPTS} prompts",
        "an interval over prompts needs prompts",
        "{prompts} prompts are too few for an interval",
        lambda d: d.prompts < LEAST_PROMPTS,
    ),
    Rule(
        "overlap",
        f"an effective sample below {LEAST_ESS} responses, or below {LEAST_ESS_SHARE:.0%} of them",
        "the policy does things that the log hardly holds, and a few responses decide alone",
        "overlap too small: {episodes} responses count as {ess:.3g}",
        lambda d: d.ess < max(LEAST_ESS, LEAST_ESS_SHARE * d.episodes),
    ),
    Rule(
        "mean_weight",
        f"a mean weight off 1 by more than {LIMIT_ERRORS} standard errors, and by more than {LIMIT_MEAN}",
        "weights average 1, unless much of what the policy does is not in the log, or the logged log-probs "
        "are not those of sampling",
        "weights average {mean_weight:.3g} (standard error {mean_weight_se:.2g}) and not 1: what the policy "
        "does is missing from the log, or its log-probs are not those of sampling",
        lambda d: abs(d.mean_weight - 1) > max(LIMIT_ERRORS * d.mean_weight_se, LIMIT_MEAN),
    ),
    Rule(
        "tail",
        f"a tail index (Pareto k) above {LARGEST_K}, unless {NEARLY_EQUAL:.0%} of responses are effective",
        "with such a tail the largest weights are yet to come, and no interval knows of them",
        "the weights have too heavy a tail: Pareto k {pareto_k:.2f}",
        lambda d: d.pareto_k is not None and d.pareto_k > LARGEST_K and d.ess_share < NEARLY_EQUAL,
    ),
)
"""Asked in this order; the first that is broken is the reason."""


@dataclass(frozen=True)
class Verdict:
    """A word and the reason for it; `rule` is the code of the broken rule, null where there is none."""

    word: Word
    reason: str
    rule: str | None = None


def judge(diagnostics: Diagnostics, gain: Interval) -> Verdict:
    """The verdict on a policy whose gain over the log has this interval.

    Log-probs of two engines differ in their last digits, which is no difference of policies.
    """
    for rule in RULES:
        if rule.broken(diagnostics):
            return Verdict("not identifiable", rule.told.format(**diagnostics.facts()), rule.code)
    return _side_of_zero(gain, "gain", NEGLIGIBLE * diagnostics.reward_std)


def compare(
    verdicts: Sequence[Verdict], difference: Interval, names: Sequence[str], *, reward_std: float
) -> Verdict:
    """The verdict on the second of two policies against the first, by the interval of their difference."""
    for verdict, name in zip(verdicts, names, strict=True):
        if verdict.word == "not identifiable":
            return Verdict("not identifiable", f"{name} is not: {verdict.reason}", verdict.rule)
    return _side_of_zero(difference, "difference", NEGLIGIBLE * reward_std)


def _side_of_zero(gain: Interval, what: str, least: float) -> Verdict:
    if abs(gain.value) <= least:
        return Verdict("no difference", f"the {what} is negligible: {gain.value:.1g}")
    if gain.low > 0:
        return Verdict("better", f"the interval of the {what} lies above 0")
    if gain.high < 0:
        return Verdict("worse", f"the interval of the {what} lies below 0")
    return Verdict("no difference", f"the interval of the {what} holds 0")
