"""Three new keys at once, in a whole swarm: together they add a third of a stage's microbatches at most, until their probation is over."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from shoal.core.messages import Member
from shoal.core.names import THIRD, key_of
from shoal.core.trainer.routing import Routes
from shoal.sim.scenarios.catalogue import SCENARIOS
from shoal.sim.scenarios.drawing import draw
from shoal.sim.swarm import Swarm

SEEDS = (0, 1, 5, 2, 4, 3)
LONG = (4, 3)


def shares(seed: int) -> Iterator[tuple[int, int, int]]:
    """Of each step and stage with new and old replicas: microbatches that new keys have added, how many the step has, and new replicas."""
    swarm = Swarm(draw(SCENARIOS["sybils"], seed))
    outcome = swarm.run()
    assert not outcome.violations, str(outcome.violations[0])[:1000]
    count = swarm.settings.microbatches
    for view in swarm.context.watch.views():
        last = view.last
        new = {one.key for one in view.newcomers}
        for group in last.groups if last is not None and view.step == last.step + 1 else ():
            listed = [(key_of(share.peer) in new, len(share.indices)) for share in group]
            theirs = [indices for young, indices in listed if young]
            if theirs and not all(young for young, _ in listed):
                yield sum(theirs), count, sum(indices > 0 for indices in theirs)


@cache
def usual_shares(seed: int) -> list[tuple[int, int, int]]:
    return list(shares(seed))


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed in LONG else ()) for seed in SEEDS])
def test_sybils_add_a_third_at_most(seed: int) -> None:
    for added, count, _ in usual_shares(seed):
        assert added <= -(-count // THIRD)


@pytest.mark.slow
def test_they_get_something_and_would_get_more_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(serving >= 2 and added >= 2 for seed in SEEDS for added, _, serving in usual_shares(seed))
    really = Routes.on_view

    def nobody_is_new(self: Routes, members: tuple[Member, ...], now: float, new_keys: object, begins: bool) -> None:
        really(self, members, now, (), begins)

    monkeypatch.setattr(Routes, "on_view", nobody_is_new)
    assert any(added > -(-count // THIRD) for seed in SEEDS for added, count, _ in shares(seed))
