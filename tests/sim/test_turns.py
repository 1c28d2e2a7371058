"""Machines that differ: replicas have turns by what they pass, and a step takes what its stages pass together."""

from __future__ import annotations

import msgspec
import pytest
from tests.sim.test_full_lines import FULL, undisturbed

from shoal.core import messages as m
from shoal.sim.context import Values
from shoal.sim.delivery import Delivery
from shoal.sim.lines import Ranges
from shoal.sim.swarm import Swarm

UNLIKE = msgspec.structs.replace(
    FULL,
    name="unlike_machines",
    steps=(5, 5),
    spread=2.0,
    lines=Ranges(up_Bps=(2e7, 4e7), wider=(1.0, 1.5), boundary=(0.05, 0.1), gradient_s=(0.05, 0.2)),
)


def later_s(seed: int) -> float:
    """Seconds of the steps after the first, in which nothing is measured."""
    case = undisturbed(seed, UNLIKE)
    swarm = Swarm(msgspec.structs.replace(case, settings=msgspec.structs.replace(case.settings, spot_checks=0.0)))
    outcome = swarm.run()
    assert outcome.committed == 5 and not outcome.violations, outcome
    times_s = swarm.watch.commits.times_s
    return times_s[-1] - times_s[0]


def test_where_replicas_differ_in_speed_turns_by_pace_make_steps_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machines take 0.72 to 1.38 times the usual time for a hop; 73 s for 83."""
    by_pace_s = later_s(9)
    monkeypatch.setattr("shoal.core.leader.rules.lines.turns_of", lambda lines, *_: dict.fromkeys(lines, m.TURNS))
    assert by_pace_s < 0.96 * later_s(9)


@pytest.mark.parametrize("boasts", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_peer_that_says_it_is_quick_slows_the_others_little(boasts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stage lost its other replicas, since it needed none: steps were 2.65 and 2.36 times as long."""
    honest_s, carry = later_s(9), Delivery.carry

    def boasting(
        self: Delivery, source: m.Peer, target: m.Peer, message: m.Message, values: Values, *, honest: bool = True
    ) -> None:
        if isinstance(message, m.Heartbeat) and source.startswith(f"p{boasts}."):
            message = msgspec.structs.replace(message, rate=1e6)
        carry(self, source, target, message, values, honest=honest)

    monkeypatch.setattr(Delivery, "carry", boasting)
    assert later_s(9) < 1.3 * honest_s
