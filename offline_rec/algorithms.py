"""The table of algorithms: shaping preset, objective preset and what they need of the data. No torch here.

A row is data. A new algorithm is a new row, of parts that exist; a new part is a function and its entry in
`objectives.parts`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data_tools.errors import ConfigError
from offline_rec.objectives.composition import Composition, nearest
from offline_rec.objectives.parts import PARAMETERS, Scope

REC = "arXiv 2509.24203; Trinity-RFT rec_policy_loss.py"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row of the table.

    `formula`: the coefficient of grad log pi per token, with A the advantage, r = pi/mu the ratio of a token,
    s the geometric mean of the ratios of a response, R their product, d = log R. `shaping`: fields of
    `data_tools.Shaping` that differ from its defaults. `data_needs`: what the shaping needs; `needs` adds
    what the objective needs.
    """

    name: str
    summary: str
    formula: str
    source: str
    composition: Composition = field(default_factory=Composition)
    shaping: Mapping[str, Any] = field(default_factory=dict)
    data_needs: frozenset[str] = frozenset({"reward", "group"})

    @property
    def scope(self) -> Scope:
        """What must be seen at once to know a coefficient."""
        return self.composition.scope

    @property
    def needs(self) -> frozenset[str]:
        """`reward`, `group` (two responses or more to a prompt), `behavior_logprobs`, `reference`, `expert`.

        With `expert`, behaviour log-probs are needed on the other rows only.
        """
        return self.data_needs | self.composition.needs

    @property
    def defaults(self) -> dict[str, float]:
        """The parameters of the objective and their values; a KL term is absent at `kl_coef` 0."""
        return {name: value for name, value in self.composition.parameters.items() if name != "kl_coef"}


_STD = {"scale": "std"}
_GSPO_BAND = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
_IMITATION = {"advantage": "1", "keep": "reward > 0"}
_REWARD = frozenset({"reward"})

_ROWS = [
    Algorithm(
        "reinforce",
        "Group-relative REINFORCE: nothing holds it back, so it collapses on a fixed log.",
        "A",
        "arXiv 2509.24203",
    ),
    Algorithm(
        "rec-oneside-nois",
        "REINFORCE with the one-sided keep-mask of a PPO clip and no importance weight.",
        "A [A>=0: r <= 1+epsilon_high; A<0: r >= 1-epsilon_low]",
        REC,
        Composition("one-side"),
    ),
    Algorithm(
        "rec-oneside-is",
        "The same with the ratio as importance weight: the gradient of a PPO clip.",
        "A r [A>=0: r <= 1+epsilon_high; A<0: r >= 1-epsilon_low]",
        REC,
        Composition("one-side", "ratio"),
    ),
    Algorithm(
        "rec-twoside-nois",
        "REINFORCE on tokens within the band, whatever the sign of the advantage.",
        "A [1-epsilon_low <= r <= 1+epsilon_high]",
        REC,
        Composition("two-side"),
    ),
    Algorithm(
        "rec-twoside-is",
        "The two-sided mask with the ratio as importance weight.",
        "A r [1-epsilon_low <= r <= 1+epsilon_high]",
        REC,
        Composition("two-side", "ratio"),
    ),
    Algorithm(
        "rec-ring-nois",
        "The two-sided mask, and far outside of it the updates that lead back.",
        "A [band, or A>=0: r <= 1-outer_low; A<0: r >= 1+outer_high]",
        REC,
        Composition("ring"),
    ),
    Algorithm(
        "rec-ring-is",
        "The ring mask with the ratio as importance weight.",
        "A r [band, or A>=0: r <= 1-outer_low; A<0: r >= 1+outer_high]",
        REC,
        Composition("ring", "ratio"),
    ),
    Algorithm(
        "rec-gspo-nois",
        "The one-sided mask on whole responses, by the geometric mean of their ratios.",
        "A [A>=0: s <= 1+epsilon_high; A<0: s >= 1-epsilon_low] / length",
        REC,
        Composition("sequence-one-side", reduction="sequence-mean", changes=_GSPO_BAND),
    ),
    Algorithm(
        "rec-gspo-is",
        "The same with the geometric mean as importance weight.",
        "A s [A>=0: s <= 1+epsilon_high; A<0: s >= 1-epsilon_low] / length",
        REC,
        Composition("sequence-one-side", "sequence-ratio", reduction="sequence-mean", changes=_GSPO_BAND),
    ),
    Algorithm(
        "grpo",
        "PPO clip on advantages divided by the group's deviation; mean over tokens, then responses.",
        "A r [one-sided band] / length",
        "arXiv 2402.03300; verl core_algos.py",
        Composition("one-side", "ratio", reduction="sequence-mean"),
        _STD,
    ),
    Algorithm(
        "dr-grpo",
        "GRPO without its two biases: no deviation, a constant length.",
        "A r [one-sided band] / length constant",
        "arXiv 2503.20783; TRL loss_type dr_grpo",
        Composition("one-side", "ratio", reduction="constant"),
    ),
    Algorithm(
        "dapo",
        "Clip-higher, token mean, groups of equal rewards left out. Its penalty on overlong responses belongs"
        " into the reward: reward + least(0, greatest(-1, (16384 - n_tokens) / 4096)).",
        "A r [one-sided band]",
        "arXiv 2503.14476; verl recipe/dapo",
        Composition("one-side", "ratio", changes={"epsilon_high": 0.28}),
        {**_STD, "drop": "zero-variance"},
    ),
    Algorithm(
        "gspo",
        "Clip and weight whole responses by the geometric mean of their ratios. The band is tight: widen it"
        " on old logs.",
        "A s [A>=0: s <= 1+epsilon_high; A<0: s >= 1-epsilon_low] / length",
        "arXiv 2507.18071; verl core_algos.py gspo",
        Composition("sequence-one-side", "sequence-ratio", reduction="sequence-mean", changes=_GSPO_BAND),
        _STD,
    ),
    Algorithm(
        "gmpo",
        "Weight a response by the geometric mean of ratios that are clipped first.",
        "A exp(mean clipped log r) [A>=0: log r <= log_clip_high; A<0: log r >= -log_clip_low] / length",
        "arXiv 2507.20673; verl core_algos.py geo_mean",
        Composition("log-one-side", "clipped-sequence-ratio", reduction="sequence-mean"),
        _STD,
    ),
    Algorithm(
        "cispo",
        "Clip the importance weight instead of the gradient: every token keeps one.",
        "A clip(r, 1-epsilon_low, 1+epsilon_high)",
        "arXiv 2506.13585; Trinity-RFT cispo_policy_loss.py",
        Composition(importance="clipped-ratio", changes={"epsilon_low": 1.0, "epsilon_high": 0.28}),
        _STD,
    ),
    Algorithm(
        "topr",
        "Imitate what was rewarded, taper off what was punished. Rewards must be signed: 0/1 rewards need a"
        " baseline such as 0.5.",
        "A clip(R, positive_low, positive_high) if A>0 else A clip(R, negative_low, negative_high); / length",
        "arXiv 2503.14286",
        Composition(importance="tapered-response-ratio", reduction="sequence-mean"),
        {"baseline": "none"},
        _REWARD,
    ),
    Algorithm(
        "tis",
        "REINFORCE with importance weights truncated at a cap.",
        "A min(r, cap)",
        "verl rollout_corr_helper.py; TRL vllm_importance_sampling_mode",
        Composition(importance="truncated-ratio"),
    ),
    Algorithm(
        "sapo",
        "A soft gate in the place of the clip; verl's form, whose gate is differentiated.",
        "A r 4 q (1-q) / length, q = sigmoid(tau (r-1)), tau = tau_positive if A>0 else tau_negative",
        "arXiv 2511.20347; verl core_algos.py sapo",
        Composition(importance="soft-gate", reduction="sequence-mean"),
        _STD,
    ),
    Algorithm(
        "m2po",
        "A PPO clip whose bounds hold the second moment of the log-ratios of harmful tokens within a budget.",
        "A r [A>=0: log r <= max(t, log(1+floor_high)); A<0: log r >= min(-t, log(1-floor_low))],"
        " t: mean over harmful tokens of min((log r)^2, t^2) = budget",
        "arXiv 2510.01161; Infini-AI-Lab/M2PO core_algos.py",
        Composition("second-moment", "ratio"),
        _STD,
    ),
    Algorithm(
        "opmd",
        "REINFORCE with half the squared log-ratio of the whole response as penalty (Kimi k1.5).",
        "A - tau d",
        "arXiv 2501.12599",
        Composition(regulariser="response-squared", reduction="sequence-sum"),
    ),
    Algorithm(
        "opmd-token",
        "REINFORCE with the squared log-ratio of every token as penalty: penalty (log r)^2, no factor 1/2.",
        "A - 2 penalty log r",
        f"{REC} (regularizer k2)",
        Composition(regulariser="token-squared"),
    ),
    Algorithm(
        "opmd-pairwise",
        "The pairwise loss on a fixed anchor: REINFORCE with a penalty on log-ratios about the group's mean.",
        "A - tau (d - group mean of d)",
        "arXiv 2509.24203",
        Composition(regulariser="pairwise-squared", reduction="sequence-sum"),
    ),
    Algorithm(
        "asymre",
        "REINFORCE with the baseline lowered: imitation of the data joins in. Needs no log-probs at all.",
        "A, baseline = group mean - 0.1",
        "arXiv 2506.20520; Trinity-RFT asymre_advantage.py",
        shaping={"shift": -0.1},
    ),
    Algorithm(
        "red-drop",
        "Failures beyond the number of successes are dropped at random, the baseline taken over the rest.",
        "A",
        "arXiv 2509.24203; Trinity-RFT rec_advantage.py",
        shaping={"drop": "balance"},
    ),
    Algorithm(
        "red-weight",
        "Every response weighted by exp(A / T), T = 1.",
        "exp(A) A",
        "arXiv 2509.24203; Trinity-RFT rec_advantage.py",
        shaping={"weight": "red_weight(1)"},
    ),
    Algorithm(
        "red-weight-adaptive",
        "REC-OneSide-NoIS, weighted by exp(A / T) once the kept advantages are negative on average.",
        "A exp(A/T) [one-sided band], T: sum of A exp(A/T) over the step = 0, T >= min_temperature",
        "arXiv 2606.20002",
        Composition("one-side", "negative-drift"),
    ),
    Algorithm(
        "dro",
        "Regression of the reward on the log-ratio to the reference; the group mean stands for the value.",
        "A - tau d_ref",
        "arXiv 2405.19107",
        Composition(regulariser="reference-squared", reduction="sequence-sum", changes={"tau": 1.0}),
        data_needs=_REWARD,
    ),
    Algorithm(
        "raft",
        "Rejection sampling: imitate the responses with a positive reward.",
        "1 where reward > 0",
        "arXiv 2304.06767",
        shaping=_IMITATION,
        data_needs=_REWARD,
    ),
    Algorithm(
        "sft",
        "Imitate every response, judged or not.",
        "1",
        "maximum likelihood",
        shaping={"advantage": "1", "unrewarded": "keep"},
        data_needs=frozenset(),
    ),
    Algorithm(
        "dft",
        "Imitate the responses with a positive reward, each token weighted by its own probability.",
        "pi where reward > 0",
        "arXiv 2508.05629; yongliang-wu/DFT fsdp_dft_trainer.py",
        Composition(importance="probability"),
        _IMITATION,
        _REWARD,
    ),
    Algorithm(
        "luffy",
        "GRPO without clip on sampled rows; on expert rows the shaped probability p / (p + gamma), which"
        " needs no mu.",
        "A gamma pi / (pi + gamma)^2 on expert rows, A r elsewhere; / length constant",
        "arXiv 2504.14945; ElliottYan/LUFFY mix_core_alg.py",
        Composition(importance="expert-mixture", reduction="constant", changes={"length": 8192}),
        {"baseline": "coalesce(avg(reward) FILTER (NOT expert) OVER (PARTITION BY group_key), group_mean)"},
    ),
]

ALGORITHMS: Mapping[str, Algorithm] = {row.name: row for row in _ROWS}


def algorithm(name: str) -> Algorithm:
    """The row of that name; `ConfigError` names the nearest one."""
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {name!r}", nearest(name, ALGORITHMS))
    return ALGORITHMS[name]


def describe() -> list[dict[str, str]]:
    """The table as text, a dict a row: name, summary, formula, reduction, defaults, scope, needs, ..."""
    return [
        {
            "name": row.name,
            "summary": row.summary,
            "formula": row.formula,
            "reduction": row.composition.reduction,
            "defaults": ", ".join(f"{key} {value:g}" for key, value in row.defaults.items()),
            "scope": row.scope,
            "needs": ", ".join(sorted(row.needs)),
            "shaping": ", ".join(f"{key} {value}" for key, value in row.shaping.items()),
            "source": row.source,
        }
        for row in ALGORITHMS.values()
    ]


def markdown() -> str:
    """`docs/algorithms.md`: a section for every algorithm, and the parameters at the end."""
    lines = []
    for row in describe():
        lines += [f"### {row['name']}", "", row["summary"], "", "```", row["formula"], "```", ""]
        facts = ("reduction", "defaults", "scope", "needs", "shaping", "source")
        lines += [f"- {fact}: {row[fact]}" for fact in facts if row[fact]] + [""]
    lines += ["## Parameters", "", "| name | default | range | meaning |", "|---|---|---|---|"]
    for name, parameter in PARAMETERS.items():
        lines.append(f"| {name} | {parameter.default:g} | {parameter.range} | {parameter.meaning} |")
    return "\n".join(lines) + "\n"
