"""Every algorithm's loss as plain loops over responses and tokens, for comparison, without `offline_rec`.

A loss is a differentiable scalar wherever the algorithm has one, so that autograd does the calculus. Where
the paper detaches a weight, the weight is a float here. The parameters are the documented defaults.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Response:
    """The unmasked tokens of one row: log-probs with gradient, everything else plain floats."""

    logp: list[Tensor]
    mu: list[float]
    ref: list[float]
    advantage: float
    weight: float = 1.0
    group: int = 0
    expert: bool = False
    ratio: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.ratio = [math.exp(p.item() - q) for p, q in zip(self.logp, self.mu, strict=True)]

    @property
    def length(self) -> int:
        return len(self.logp)


Batch = list[Response]
Loss = Callable[[Batch], Tensor]


def smaller(a: Tensor, b: Tensor) -> Tensor:
    return a if a.item() <= b.item() else b


def clipped(x: Tensor, low: float, high: float) -> Tensor:
    """x within [low, high] with the gradient of x, ties included; a constant outside."""
    return x if low <= x.item() <= high else torch.tensor(min(max(x.item(), low), high), dtype=x.dtype)


def token_mean(term: Callable[[Response, int], Tensor]) -> Loss:
    def loss(batch: Batch) -> Tensor:
        tokens = sum(y.length for y in batch)
        return sum(y.weight * term(y, t) for y in batch for t in range(y.length)) / tokens

    return loss


def sequence_mean(term: Callable[[Response, int], Tensor]) -> Loss:
    def loss(batch: Batch) -> Tensor:
        return sum(y.weight * sum(term(y, t) for t in range(y.length)) / y.length for y in batch) / len(batch)

    return loss


def constant(length: float, term: Callable[[Response, int], Tensor]) -> Loss:
    def loss(batch: Batch) -> Tensor:
        return sum(y.weight * term(y, t) for y in batch for t in range(y.length)) / (len(batch) * length)

    return loss


def response_mean(term: Callable[[Response], Tensor]) -> Loss:
    """One number a response, averaged over responses."""

    def loss(batch: Batch) -> Tensor:
        return sum(y.weight * term(y) for y in batch) / len(batch)

    return loss


# REINFORCE and the REC family: masks are conditions on floats, ratios are floats.


def reinforce(y: Response, t: int) -> Tensor:
    return -y.advantage * y.logp[t]


def masked(
    condition: Callable[[float, float], bool], *, importance: bool
) -> Callable[[Response, int], Tensor]:
    def term(y: Response, t: int) -> Tensor:
        if not condition(y.ratio[t], y.advantage):
            return 0 * y.logp[t]
        return -y.advantage * (y.ratio[t] if importance else 1.0) * y.logp[t]

    return term


def one_side(rho: float, a: float, low: float = 0.2, high: float = 0.2) -> bool:
    return (a >= 0 and rho <= 1 + high) or (a <= 0 and rho >= 1 - low)


def two_side(rho: float, a: float) -> bool:
    return 0.8 <= rho <= 1.2


def ring(rho: float, a: float) -> bool:
    return two_side(rho, a) or (a >= 0 and rho <= 0.4) or (a <= 0 and rho >= 3.0)


def ppo(low: float, high: float) -> Callable[[Response, int], Tensor]:
    def term(y: Response, t: int) -> Tensor:
        rho = torch.exp(y.logp[t] - y.mu[t])
        return -smaller(rho * y.advantage, clipped(rho, 1 - low, 1 + high) * y.advantage)

    return term


def mean_ratio(y: Response) -> Tensor:
    return torch.exp(sum(p - q for p, q in zip(y.logp, y.mu, strict=True)) / y.length)


def gspo(y: Response) -> Tensor:
    s = mean_ratio(y)
    return -smaller(s * y.advantage, clipped(s, 1 - 3e-4, 1 + 4e-4) * y.advantage)


def rec_gspo_nois(y: Response, t: int) -> Tensor:
    keep = one_side(mean_ratio(y).item(), y.advantage, 3e-4, 4e-4)
    return -y.advantage * keep * y.logp[t]


def gmpo(y: Response) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for p, q in zip(y.logp, y.mu, strict=True):
        drift = p - q
        total = total + (
            clipped(drift, -math.inf, 0.4) if y.advantage >= 0 else clipped(drift, -0.4, math.inf)
        )
    return -y.advantage * torch.exp(total / y.length)


def cispo(y: Response, t: int) -> Tensor:
    return -y.advantage * min(max(y.ratio[t], 0.0), 1.28) * y.logp[t]


def tis(y: Response, t: int) -> Tensor:
    return -y.advantage * min(y.ratio[t], 2.0) * y.logp[t]


def topr(y: Response, t: int) -> Tensor:
    taper = 1.0 if y.advantage > 0 else min(math.prod(y.ratio), 1.0)
    return -y.advantage * taper * y.logp[t]


def sapo(y: Response, t: int) -> Tensor:
    tau = 1.0 if y.advantage > 0 else 1.05
    rho = torch.exp(y.logp[t] - y.mu[t])
    return -y.advantage * 4 / tau / (1 + torch.exp(-tau * (rho - 1)))


def m2po(batch: Batch) -> Tensor:
    """The bound is found by trying every number of unclipped tokens."""
    harmful = []
    for y in batch:
        for rho in y.ratio:
            if (y.advantage > 0 and rho > 1) or (y.advantage < 0 and rho < 1):
                harmful.append(math.log(rho) ** 2)
    level = max_level(sorted(harmful), 0.04)
    low = min(math.exp(-math.sqrt(level)), 0.7)
    high = max(math.exp(math.sqrt(level)), 1.5)
    return token_mean(ppo(1 - low, high - 1))(batch)


def max_level(squares: list[float], budget: float) -> float:
    """The largest t with mean(min(v, t)) <= budget, by halving an interval."""
    if not squares or sum(squares) / len(squares) <= budget:
        return 1e4
    low, high = 0.0, max(squares)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(min(v, middle) for v in squares) / len(squares) <= budget:
            low = middle
        else:
            high = middle
    return low


# Additive regularisers.


def log_ratio(y: Response, other: list[float]) -> Tensor:
    return sum(p - q for p, q in zip(y.logp, other, strict=True))


def opmd(y: Response) -> Tensor:
    return -y.advantage * sum(y.logp) + 0.1 / 2 * log_ratio(y, y.mu) ** 2


def opmd_token(y: Response, t: int) -> Tensor:
    return -y.advantage * y.logp[t] + 0.1 * (y.logp[t] - y.mu[t]) ** 2


def opmd_pairwise(batch: Batch) -> Tensor:
    """The weighted pairwise loss of consistency residuals, divided by 2 tau and the weight of the group.

    Advantages stand for rewards: a constant of the group cancels in every pair. The identity holds for
    advantages that are centred with the same weights.
    """
    tau, total = 0.1, torch.zeros((), dtype=torch.float64)
    for group in sorted({y.group for y in batch}):
        members = [y for y in batch if y.group == group]
        residual = [y.advantage - tau * log_ratio(y, y.mu) for y in members]
        mass = sum(y.weight for y in members)
        for i in range(len(members)):
            for j in range(i):
                pair = members[i].weight * members[j].weight * (residual[i] - residual[j]) ** 2
                total = total + pair / (2 * tau * mass)
    return total / len(batch)


def dro(y: Response) -> Tensor:
    """(r - V - tau log pi/ref)^2 / 2 tau at tau = 1: the gradient of the paper, divided by tau."""
    return (y.advantage - log_ratio(y, y.ref)) ** 2 / 2


# Imitation.


def dft(y: Response, t: int) -> Tensor:
    return -y.advantage * math.exp(y.logp[t].item()) * y.logp[t]


def luffy(y: Response, t: int) -> Tensor:
    if y.expert:
        p = torch.exp(y.logp[t])
        return -y.advantage * p / (p + 0.1)
    return -y.advantage * torch.exp(y.logp[t] - y.mu[t])


def red_weight_adaptive(batch: Batch) -> Tensor:
    """A scan and a bisection for the temperature, over the kept tokens of the step."""
    kept = [(y.weight, y.advantage) for y in batch for rho in y.ratio if one_side(rho, y.advantage)]
    temperature = 0.8

    def balance(temp: float) -> float:
        return sum(w * a * math.exp(a / temp) for w, a in kept)

    if sum(w * a for w, a in kept) >= 0:
        temperature = math.inf
    elif balance(0.8) > 0:
        low, high = 0.8, 1e9
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if balance(middle) > 0 else (low, middle)
        temperature = low

    def term(y: Response, t: int) -> Tensor:
        keep = one_side(y.ratio[t], y.advantage)
        return -y.advantage * math.exp(y.advantage / temperature) * keep * y.logp[t]

    return token_mean(term)(batch)


LOSSES: dict[str, Loss] = {
    "reinforce": token_mean(reinforce),
    "rec-oneside-nois": token_mean(masked(one_side, importance=False)),
    "rec-oneside-is": token_mean(ppo(0.2, 0.2)),
    "rec-twoside-nois": token_mean(masked(two_side, importance=False)),
    "rec-twoside-is": token_mean(masked(two_side, importance=True)),
    "rec-ring-nois": token_mean(masked(ring, importance=False)),
    "rec-ring-is": token_mean(masked(ring, importance=True)),
    "rec-gspo-nois": sequence_mean(rec_gspo_nois),
    "rec-gspo-is": response_mean(gspo),
    "grpo": sequence_mean(ppo(0.2, 0.2)),
    "dr-grpo": constant(3000, ppo(0.2, 0.2)),
    "dapo": token_mean(ppo(0.2, 0.28)),
    "gspo": response_mean(gspo),
    "gmpo": response_mean(gmpo),
    "cispo": token_mean(cispo),
    "topr": sequence_mean(topr),
    "tis": token_mean(tis),
    "sapo": sequence_mean(sapo),
    "m2po": m2po,
    "opmd": response_mean(opmd),
    "opmd-token": token_mean(opmd_token),
    "opmd-pairwise": opmd_pairwise,
    "asymre": token_mean(reinforce),
    "red-drop": token_mean(reinforce),
    "red-weight": token_mean(reinforce),
    "red-weight-adaptive": red_weight_adaptive,
    "dro": response_mean(dro),
    "raft": token_mean(reinforce),
    "sft": token_mean(reinforce),
    "dft": token_mean(dft),
    "luffy": constant(8192, luffy),
}

VALUES: dict[str, Loss] = {
    name: LOSSES[name]
    for name in (
        *("reinforce", "rec-oneside-is", "grpo", "dr-grpo", "dapo", "gspo", "gmpo", "sapo", "m2po", "opmd"),
        *("opmd-token", "luffy"),
    )
}
"""Losses whose value, not only their gradient, is minus the reported scalar objective."""


def kl(batch: Batch, kind: str, beta: float) -> Tensor:
    """Mean over tokens of beta times an estimate of KL(pi || ref)."""
    total = torch.zeros((), dtype=torch.float64)
    for y in batch:
        for p, q in zip(y.logp, y.ref, strict=True):
            drift = p - q
            estimate = drift**2 / 2 if kind == "k2" else torch.exp(-drift) - 1 + drift
            total = total + y.weight * beta * estimate
    return total / sum(y.length for y in batch)
