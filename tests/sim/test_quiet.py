"""Most events leave a peer nothing to settle, and its deadline as it was: what is left out for speed changes no history."""

from __future__ import annotations

import pytest

from shoal.core.messages import Command, Event, Peer
from shoal.core.peer import PeerMachine
from shoal.sim.scenarios.catalogue import load
from shoal.sim.scenarios.drawing import draw
from shoal.sim.swarm import Swarm, simulate

_SLOW = pytest.mark.slow
CASES = (("strangers", 3), *(pytest.param(*one, marks=_SLOW) for one in (("chaos", 7), ("texts", 2), ("lines", 5))))


@pytest.mark.parametrize(("scenario", "seed"), CASES)
def test_a_peer_that_settles_after_every_event_has_the_same_history(
    scenario: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = simulate(scenario, seed).digest
    monkeypatch.setattr(PeerMachine, "_settled", lambda self, now: False)
    assert simulate(scenario, seed).digest == usual


@pytest.mark.parametrize(("scenario", "seed"), CASES)
def test_the_deadline_that_is_kept_is_the_earliest_of_the_parts(scenario: str, seed: int) -> None:
    def look(now: float, peer: Peer, event: Event, commands: list[Command]) -> None:
        machine = swarm.nodes[peer].machine if peer in swarm.nodes else None
        if machine is not None and machine.deadline != machine._soonest():
            stale.append((now, peer, event))

    stale: list[tuple[float, Peer, Event]] = []
    swarm = Swarm(draw(load(scenario), seed), look)
    swarm.run()
    assert not stale
