"""What a model tells about a dataset: whose ids and log-probs they are, and whether texts give them again."""

from offline_rec.checking.check import check
from offline_rec.checking.rules import RULES

__all__ = ["RULES", "check"]
