import math

import pytest
import torch

from offline_rec.objectives import metrics as metric
from offline_rec.objectives.objective import objective
from tests.offline_rec.steps import random_step

NAN = math.nan


def measured():
    """Ratios 3, 1/4 and 1, 4 on rows of advantage 1 and -1; a third row of unknown log-probs."""
    ratios = torch.tensor([[3.0, 0.25], [1.0, 4.0], [NAN, NAN]], dtype=torch.float64)
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]], dtype=torch.float64)
    rule = objective("reinforce")
    seen = rule.signals(
        logprobs,
        logprobs - torch.log(ratios),
        torch.tensor([1.0, -1.0, 0.0]),
        torch.ones(3, 2),
        torch.tensor([1.0, 2.0, 1.0]),
    )
    return seen, torch.tensor([[True, False], [True, True], [False, False]])


def test_means_are_what_a_reader_computes_by_hand():
    seen, kept = measured()
    done = metric.finish(metric.measure(seen, kept))
    expected = {
        "rows": 3,
        "tokens": 6,
        "kept_share": 3 / 6,
        "clip_share": 3 / 6,
        "kept_share_positive": 1 / 2,
        "kept_share_negative": 1,
        "advantage_mean": 0,
        "kept_advantage_mean": (1 - 1 - 1) / 3,
        "weight_mean": 4 / 3,
        "ess_weight": 4**2 / (3 * 6),
        "logprob_mean": -21 / 6,
        "known_ratio_share": 4 / 6,
        "ratio_mean": 8.25 / 4,
        "ratio_above_2_share": 2 / 4,
        "ratio_below_half_share": 1 / 4,
        "log_ratio_second_moment": (math.log(3) ** 2 + 2 * math.log(4) ** 2) / 4,
        "kl_k1": -math.log(3) / 4,
        "kl_k3": (8.25 - 4 - math.log(3)) / 4,
        "ess_token": 8.25**2 / (4 * (9 + 0.25**2 + 1 + 16)),
        "ess_response": (0.75 + 4) ** 2 / (2 * (0.75**2 + 16)),
    }
    assert done == pytest.approx(expected)


def test_facts_of_a_row_are_its_mean_ratio_and_kept_share():
    seen, kept = measured()
    facts = metric.row_facts(seen, kept)
    assert facts["mean_ratio"].tolist() == pytest.approx([1.625, 2.5, NAN], nan_ok=True)
    assert facts["kept_share"].tolist() == [0.5, 1, 0]
    without = metric.row_facts(
        objective("reinforce").signals(seen.logprobs, None, seen.advantages, seen.mask), kept
    )
    assert without["mean_ratio"].isnan().all()


def test_effective_share_is_one_where_the_policy_is_the_behaviour_policy():
    step = random_step(0, weighted=False)
    step.behavior = step.logprobs.clone()
    _, metrics, _ = step.call(objective("rec-oneside-is"))
    done = metric.finish(metrics)
    assert [done[name] for name in ("ess_token", "ess_response", "ratio_mean")] == pytest.approx([1, 1, 1])
    assert [done[name] for name in ("kl_k1", "kl_k3", "clip_share")] == pytest.approx([0, 0, 0])


def test_loss_and_objective_are_reported_as_they_are():
    loss, metrics, _ = random_step(1).call(objective("rec-oneside-is"))
    done = metric.finish(metrics)
    assert done["loss"] == loss.item()
    assert "objective" in done
    _, ring, _ = random_step(1).call(objective("rec-ring-is"))
    assert "objective" not in metric.finish(ring)
