"""The learning rate: a linear rise, then the shape asked for, with no update spent on a rate of 0."""

import pytest

from offline_rec.training.schedule import learning_rate


def rates(shape, total, warmup):
    return [learning_rate(s, peak=2.0, total=total, warmup=warmup, shape=shape) for s in range(1, total + 1)]


@pytest.mark.parametrize(
    ("shape", "total", "warmup", "expected"),
    [
        ("constant", 4, 0, [2, 2, 2, 2]),
        ("constant", 4, 2, [1, 2, 2, 2]),
        ("linear", 4, 0, [2, 1.5, 1, 0.5]),
        ("linear", 6, 2, [1, 2, 2, 1.5, 1, 0.5]),
        ("cosine", 4, 0, [2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5]),
        ("cosine", 2, 4, [0.5, 1]),
    ],
)
def test_rates_by_hand(shape, total, warmup, expected):
    assert rates(shape, total, warmup) == pytest.approx(expected)
