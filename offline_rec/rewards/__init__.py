"""Rewards by name: one interface for judging responses when they are sampled, evaluated or collected.

`get("exact")(["4", "5"], answers=["4", "4"])` is `[1.0, 0.0]`. They live in `data_tools.rewards`, as a
collect judges with them too.
"""

from data_tools.rewards.named import REWARDS, get
from data_tools.rewards.reward import Judgement, Reward

__all__ = ["REWARDS", "Judgement", "Reward", "get"]
