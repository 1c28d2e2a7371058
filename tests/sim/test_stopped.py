"""A peer that stands still is removed within 5 s and is a member again after it goes on, on virtual time, to which a busy machine is
nothing. Real processes: tests/e2e/test_chaos.py."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.core.messages import Peer, View
from shoal.sim.node import Node
from shoal.sim.scenarios.drawing import draw
from shoal.sim.scenarios.scenario import Scenario
from shoal.sim.swarm import Swarm

STOPPED_S = 12.0
NOTICED_S = 5.0
SCENARIO = Scenario(name="stopped", peers=(6, 10), stages=(1, 3), steps=(14, 14))


class Stopping(Swarm):
    """Stops one replica, never the leader, once the first step is committed, and looks for how long it stays a member."""

    stopped_s: float | None = None
    removed_s: float | None = None
    back = False

    def agreed(self, peer: Peer, view: View) -> None:
        super().agreed(peer, view)
        if self.stopped_s is None:
            node = next((node for node in self.nodes.values() if not node.machine.leading and self._others(node)), None)
            if view.last is not None and node is not None:
                self.name, self.stopped_s = node.name, self.kernel.now
                node.condition.away = True
                node.stop()
                self.kernel.after(STOPPED_S, self._continue, node)
            return
        member = self.name in {one.peer for one in view.members}
        if not member and self.removed_s is None:
            self.removed_s = self.kernel.now
        self.back = self.removed_s is not None and member

    def _others(self, node: Node) -> bool:
        return self.injector.spares({node.name})

    def _continue(self, node: Any) -> None:
        node.resume()


# The cheapest of the seeds are quick
@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s in (1, 9) else pytest.mark.slow) for s in range(12)])
def test_a_stopped_peer_is_removed_within_five_seconds_and_comes_back(seed: int) -> None:
    swarm = Stopping(draw(SCENARIO, seed))
    outcome = swarm.run()
    assert not outcome.violations, outcome.violations[0]
    assert swarm.stopped_s is not None and swarm.removed_s is not None
    assert swarm.removed_s - swarm.stopped_s <= NOTICED_S
    assert swarm.back
    assert outcome.committed == 14
