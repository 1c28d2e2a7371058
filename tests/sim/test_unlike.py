"""A peer whose optimizer has other bits is evicted with the reason: it does not download its state again for ever."""

from __future__ import annotations

import pytest

from shoal.sim.scenarios.catalogue import SCENARIOS
from shoal.sim.scenarios.drawing import draw
from shoal.sim.swarm import Swarm


# As a joiner that applies what was committed meanwhile; as a member; as the leader
@pytest.mark.parametrize("seed", [12, pytest.param(4, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)])
def test_a_replica_that_differs_again_and_again_is_evicted_and_the_run_goes_on(seed: int) -> None:
    swarm = Swarm(draw(SCENARIOS["unlike"], seed))
    notes = swarm.context.notes = []
    outcome = swarm.run()
    assert not outcome.violations, f"{outcome.violations[0]}\nrerun: shoal simulate unlike seed={seed}"
    evictions = [note for note in notes if "removed:" in note and "3 times by now" in note]
    assert evictions and all("differ" in note or "another state" in note for note in evictions)
