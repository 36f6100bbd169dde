"""What ends a run before its last step: a policy that drifts too far, updates that are not finite."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data_tools.errors import DataError


@dataclass(frozen=True)
class DriftGuard:
    """Bounds on how far the policy may move from the anchor of its ratios.

    `max_kl`: KL divergence in nats per token (the k3 estimate). `min_ess`: effective sample size of the
    sequence ratios as a share of the responses. A value that cannot be measured is no reason to stop.
    """

    max_kl: float | None = None
    min_ess: float | None = None

    def reason(self, values: Mapping[str, float | None], where: str) -> str | None:
        """Why the run must stop, if `kl` or `ess` of `values` breaks a bound."""
        kl, ess = values.get("kl"), values.get("ess")
        if self.max_kl is not None and kl is not None and kl > self.max_kl:
            return f"KL to the anchor {kl:.4g} on {where} exceeds max_kl {self.max_kl:g}"
        if self.min_ess is not None and ess is not None and ess < self.min_ess:
            return f"effective sample share {ess:.4g} on {where} is below min_ess {self.min_ess:g}"
        return None


@dataclass
class NonFiniteGuard:
    """Counts the updates that were skipped because the loss or the gradient was not finite."""

    max_in_row: int
    in_row: int = 0
    total: int = 0

    def check(self, step: int, loss: float, grad_norm: float, rows: Sequence[str]) -> bool:
        """Whether this update was skipped; `DataError` that names rows after `max_in_row` in a row."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_row = 0
            return False
        self.in_row += 1
        self.total += 1
        if self.in_row >= self.max_in_row:
            raise DataError(
                f"step {step}: the loss or its gradient was not finite {self.in_row} times in a row; "
                f"rows of the last one: {', '.join(rows)}",
                "look at these rows with `rec sql`, or begin a new run with a lower lr",
            )
        return True

    def check_all(self, steps: int) -> None:
        """Raise DataError where all updates of a run that ends after `steps` were skipped."""
        if steps and self.total == steps:
            raise DataError(
                f"the loss or its gradient was not finite at any of {steps} steps: the policy is as it was",
                "the rows are in metrics.jsonl as bad_rows; look at their rewards, weights and log-probs",
            )
