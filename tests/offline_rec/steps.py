"""Random steps of ragged responses in groups, as padded tensors and as the plain rows of `by_hand`."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from offline_rec.objectives.metrics import Metrics
from offline_rec.objectives.objective import Objective
from tests.offline_rec.by_hand import Response


@dataclass
class Step:
    """The arguments of an objective; float64, NaN and rubbish wherever the mask is 0."""

    logprobs: Tensor
    behavior: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    groups: Tensor
    expert: Tensor

    def rows(self, index: Tensor) -> "Step":
        return Step(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def to(self, dtype: torch.dtype) -> "Step":
        tokens = {name: getattr(self, name).to(dtype) for name in ("logprobs", "behavior", "reference")}
        return replace(self, **tokens)

    def call(self, objective: Objective, **more: object) -> tuple[Tensor, Metrics, Tensor]:
        """Loss, metrics, and the gradient with respect to the log-probs."""
        leaf = self.logprobs.detach().clone().requires_grad_()
        loss, metrics = objective(
            leaf,
            self.behavior,
            self.advantages,
            self.mask,
            self.weights,
            reference_logprobs=self.reference,
            groups=self.groups,
            expert=self.expert,
            **more,
        )
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), metrics, gradient

    def by_hand(self) -> tuple[Tensor, list[Response]]:
        """The leaf of the log-probs and the rows that read from it; rows of weight 0 are not there."""
        leaf = self.logprobs.detach().clone().requires_grad_()
        batch = []
        for i in range(len(self.mask)):
            at = [t for t in range(self.mask.shape[1]) if self.mask[i, t]]
            if not at or self.weights[i] == 0:
                continue
            row = Response(
                logp=[leaf[i, t] for t in at],
                mu=[self.behavior[i, t].item() for t in at],
                ref=[self.reference[i, t].item() for t in at],
                advantage=self.advantages[i].item(),
                weight=self.weights[i].item(),
                group=int(self.groups[i]),
                expert=bool(self.expert[i]),
            )
            batch.append(row)
        return leaf, batch


def random_step(
    seed: int, *, rows: int = 9, longest: int = 6, spread: float = 0.5, weighted: bool = True
) -> Step:
    """Groups of two to four rows; log-ratios of that spread, so that every branch of every mask is taken."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    lengths = torch.randint(1, longest + 1, (rows,), generator=rng)
    mask = (torch.arange(longest)[None] < lengths[:, None]).to(torch.uint8)
    mask[:, 1] *= (torch.rand(rows, generator=rng) > 0.3).to(torch.uint8)  # a hole, as tool results leave one
    logprobs = -normal(rows, longest).abs() - 0.05
    behavior = logprobs - spread * normal(rows, longest)
    reference = logprobs - spread * normal(rows, longest)
    groups = torch.arange(rows) // 3 * 7 - 3
    weights = torch.rand(rows, generator=rng, dtype=torch.float64) + 0.2 if weighted else torch.ones(rows)
    weights = weights.double()
    if weighted:
        weights[2] = 0.0
    advantages = centred(normal(rows), weights, groups)
    advantages[rows - 1] = 0.0
    expert = torch.rand(rows, generator=rng) > 0.6
    hidden = mask == 0
    behavior[hidden], reference[hidden], logprobs[hidden] = torch.nan, torch.nan, -1e9
    return Step(logprobs, behavior, reference, advantages, mask, weights, groups, expert)


def centred(rewards: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
    """Rewards minus the weighted mean of their group."""
    result = rewards.clone()
    for group in groups.unique():
        own = groups == group
        result[own] -= (rewards[own] * weights[own]).sum() / weights[own].sum()
    return result
