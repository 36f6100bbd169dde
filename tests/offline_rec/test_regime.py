"""Which version samples which batch, and when: the plan of a loop against a simulation of its own."""

import itertools

import pytest

from offline_rec.looping.regime import Fit, Refresh, phases, version_of

REGIMES = list(itertools.product((1, 2, 3, 20), (0, 1, 4, 10), (7, 20, 23)))


def versions_by_simulation(steps, interval, lag):
    """Batch by batch: an explorer `lag` batches ahead that takes new weights every `interval` steps."""
    held = 0
    versions = []
    for batch in range(steps):
        trained = max(0, batch - lag)  # updates that are done when this batch is sampled
        if trained - held * interval == interval:
            held += 1
        versions.append(held)
    return versions


@pytest.mark.parametrize(("interval", "lag", "steps"), REGIMES)
def test_batches_are_sampled_by_the_version_that_an_explorer_would_hold(interval, lag, steps):
    found = [version_of(batch, interval=interval, lag=lag) for batch in range(1, steps + 1)]
    assert found == versions_by_simulation(steps, interval, lag)


@pytest.mark.parametrize("replay", [0, 1, 3])
@pytest.mark.parametrize(("interval", "lag", "steps"), REGIMES)
def test_every_batch_is_sampled_once_by_weights_that_exist_and_trained_on_once(interval, lag, steps, replay):
    owner: dict[int, int] = {}
    trained = 0
    for phase in phases(steps=steps, interval=interval, lag=lag, replay=replay):
        if isinstance(phase, Refresh):
            assert phase.updates == trained == phase.version * interval
            for batch in range(phase.first, phase.last + 1):
                assert batch not in owner
                owner[batch] = phase.version
            continue
        assert phase.first == trained + 1
        steps_of_it = range(phase.first, phase.last + 1)
        assert {owner[step] for step in steps_of_it} == {phase.version}
        older = [b for b, v in owner.items() if phase.version - replay <= v < phase.version]
        assert phase.oldest == max(0, phase.version - replay)
        assert phase.batches == len(steps_of_it) + len(older)
        trained = phase.last
    assert trained == steps
    assert owner == {b + 1: v for b, v in enumerate(versions_by_simulation(steps, interval, lag))}


def test_on_policy_alternates_one_batch_and_one_update():
    found = list(phases(steps=2, interval=1, lag=0))
    assert found == [
        Refresh(0, 0, 1, 1),
        Fit(0, 0, 1, 1, batches=1),
        Refresh(1, 1, 2, 2),
        Fit(1, 1, 2, 2, batches=1),
    ]
