"""Which runs there are: tasks, regimes, algorithms, learning rates and seeds, as data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from typing import Any


@dataclass(frozen=True)
class Effort:
    """How long a run is: updates, prompts an update, responses a prompt; and when the policy is judged."""

    updates: int = 160
    groups: int = 32
    responses: int = 8
    watch_every: int = 20
    interval: int = 20
    lag: int = 10

    def regime(self, name: str) -> dict[str, Any]:
        """The fields of a loop that make a regime."""
        every = {"rounds": self.updates, "steps_per_round": 1}
        return {
            "offline": every | {"offline": True},
            "interval-20": {"rounds": self.updates // self.interval, "steps_per_round": self.interval},
            "lag-10": every | {"lag": self.lag},
            "on-policy": every,
        }[name]


@dataclass(frozen=True)
class Contender:
    """An algorithm: its name in full and in a legend, and the fields of a fit that make it."""

    title: str
    short: str
    fit: Mapping[str, Any] = field(default_factory=dict)


WIDE = {"epsilon_low": 0.6, "epsilon_high": 2.0}

ALGORITHMS: Mapping[str, Contender] = {
    "reinforce": Contender("REINFORCE", "REINFORCE", {"algorithm": "reinforce"}),
    "grpo": Contender("GRPO 0.2/0.2", "GRPO", {"algorithm": "rec-oneside-is", "scale": "std"}),
    "oneside-is": Contender("REC-OneSide-IS 0.2/0.2", "OneSide-IS", {"algorithm": "rec-oneside-is"}),
    "oneside-nois": Contender("REC-OneSide-NoIS 0.2/0.2", "OneSide-NoIS", {"algorithm": "rec-oneside-nois"}),
    "oneside-is-wide": Contender(
        "REC-OneSide-IS 0.6/2.0", "OneSide-IS wide", {"algorithm": "rec-oneside-is", "objective": WIDE}
    ),
    "oneside-nois-wide": Contender(
        "REC-OneSide-NoIS 0.6/2.0", "OneSide-NoIS wide", {"algorithm": "rec-oneside-nois", "objective": WIDE}
    ),
    "twoside-nois": Contender("REC-TwoSide-NoIS 0.2/0.2", "TwoSide-NoIS", {"algorithm": "rec-twoside-nois"}),
    "ring-nois": Contender("REC-Ring-NoIS 0.2/0.2, 0.6/2.0", "Ring-NoIS", {"algorithm": "rec-ring-nois"}),
    "opmd": Contender("OPMD, k2 0.1", "OPMD", {"algorithm": "opmd-token"}),
    "asymre": Contender("AsymRE 0.1", "AsymRE", {"algorithm": "asymre"}),
    "red-drop": Contender("RED-Drop", "RED-Drop", {"algorithm": "red-drop"}),
    "red-weight": Contender("RED-Weight", "RED-Weight", {"algorithm": "red-weight"}),
    "raft": Contender("RAFT: imitate the right ones", "RAFT", {"algorithm": "raft"}),
    "sft": Contender("SFT: imitate all", "SFT", {"algorithm": "sft"}),
    "both": Contender(
        "REC-OneSide-NoIS 0.6/2.0 + RED-Weight",
        "wide + RED-Weight",
        {"algorithm": "rec-oneside-nois", "objective": WIDE, "weight": "red_weight(1)"},
    ),
}
"""GRPO is the paper's, its mean over all tokens. `both`, its two principles in one, is not in the paper."""

REGIMES = ("on-policy", "interval-20", "lag-10", "offline")

RATES = (3e-4, 1e-3)
"""Both are run, and each algorithm is judged by its better one, in a task and regime."""

KEY = (
    "reinforce",
    "grpo",
    "oneside-is",
    "oneside-nois",
    "oneside-nois-wide",
    "asymre",
    "red-drop",
    "red-weight",
)
FRESH = ("reinforce", "grpo", "oneside-nois", "asymre", "red-drop", "red-weight", "raft")
HARD = ("reinforce", "oneside-is", "oneside-nois", "oneside-nois-wide", "red-weight", "raft")

LEFT_OUT = """\
Where every update is on samples of its own weights all ratios are 1: the masks keep everything, importance
weights are 1, and the penalty of OPMD has no gradient, so that REC and OPMD are REINFORCE. On-policy one of
them is run, to see that it is. In the regimes that sample for every update, the dearest ones, one learning
rate is run, the lower, and with the lag of 10 the algorithms that findings are about. The hard task has six
algorithms, two regimes and two seeds."""


@dataclass(frozen=True, order=True)
class Cell:
    """One run; its name is its place in the results."""

    task: str
    regime: str
    algorithm: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}/{self.regime}/{self.algorithm}/{self.lr:g}/{self.seed}"

    def content(self, effort: Effort) -> dict[str, Any]:
        """What its result depends on besides the base policy and the log."""
        return {**asdict(self), **asdict(effort), "fit": dict(ALGORITHMS[self.algorithm].fit)}


@dataclass(frozen=True)
class Block:
    """Cells that are run together: all combinations of these."""

    task: str
    regime: str
    algorithms: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]


SEEDS = (1, 2, 3)

PLAN = (
    Block("addition", "offline", tuple(ALGORITHMS), RATES, SEEDS),
    Block("addition", "interval-20", tuple(ALGORITHMS), RATES, SEEDS),
    Block("parts", "offline", tuple(ALGORITHMS), RATES, SEEDS),
    Block("parts", "interval-20", tuple(ALGORITHMS), RATES, SEEDS),
    Block("chain", "offline", HARD, RATES, SEEDS[:2]),
    Block("chain", "interval-20", HARD, RATES[:1], SEEDS[:2]),
    Block("addition", "lag-10", KEY, RATES[:1], SEEDS),
    Block("parts", "lag-10", KEY, RATES[:1], SEEDS),
    Block("addition", "on-policy", FRESH, RATES[:1], SEEDS),
    Block("parts", "on-policy", FRESH, RATES[:1], SEEDS),
)


def cells(pattern: str = "*") -> list[Cell]:
    """Those whose name matches, all of the first seed first."""
    every = [
        Cell(block.task, block.regime, algorithm, lr, seed)
        for seed in SEEDS
        for block in PLAN
        if seed in block.seeds
        for lr in block.rates
        for algorithm in block.algorithms
    ]
    return [cell for cell in every if fnmatch(cell.name, pattern)]
