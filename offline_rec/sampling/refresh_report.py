"""What a refresh came to."""

from dataclasses import asdict, dataclass
from typing import Any

from offline_rec.sampling.verify_samples import Verification


@dataclass(frozen=True)
class RefreshReport:
    """What a refresh came to: `responses` == `kept` + `duplicate` + `rejected`.

    `duplicate` rows were in the dataset before, `rejected` ones are in its rejects with a reason. `unjudged`
    ones have no reward.
    """

    policy: str
    version: int
    prompts: int
    responses: int
    kept: int
    duplicate: int
    rejected: int
    unjudged: int
    mean_reward: float | None
    tokens: int
    seconds: float
    batch: str | None
    verified: Verification

    def facts(self) -> dict[str, Any]:
        """Nested dicts of numbers and text."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report as text."""
        told = self.verified
        shown = [
            f"{self.policy} version {self.version}: {self.responses} responses to {self.prompts} "
            f"prompts, {self.kept} kept, {self.duplicate} duplicate, {self.rejected} rejected",
            f"verified: log-probs of {told.responses} responses differ by {told.mean_difference:.2g} on "
            "average from a forward pass of the model",
        ]
        if self.mean_reward is not None:
            shown.append(f"mean reward {self.mean_reward:.4g}, {self.unjudged} not judged")
        return shown
