"""Audited steps in a swarm: whoever computes wrongly is evicted before what it has added is committed, and nobody else ever is."""

from __future__ import annotations

import msgspec
import pytest

from shoal.sim.faults.hostile import MADE_UP, Hostile
from shoal.sim.scenarios.catalogue import SCENARIOS
from shoal.sim.scenarios.drawing import draw
from shoal.sim.scenarios.scenario import Case, Happenings, Messages
from shoal.sim.swarm import Swarm
from shoal.sim.tasks.oddities import NOTHING

QUIET = {"messages": Messages(), "happenings": Happenings(), "save_every": (0, 0)}
SMALL = {"stages": (3, 3), "steps": (8, 8), "microbatches": (6, 6), "step_s": 1.0, "spot_checks": (1.0,)}


def a_case(kind: str, peers: int, seed: int = 0) -> Case:
    """Every step is audited; one of them lies from the first step on."""
    scenario = msgspec.structs.replace(SCENARIOS["strangers"], peers=(peers, peers), staleness=0, **QUIET, **SMALL)
    hostile = (Hostile(2 + seed, "member", (kind,), 0.0),) if kind else ()
    return msgspec.structs.replace(draw(scenario, seed), hostile=hostile)


@pytest.mark.parametrize("peers", [6, pytest.param(9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MADE_UP)
def test_who_computes_wrongly_is_evicted_and_nobody_else(kind: str, peers: int) -> None:
    outcome = Swarm(a_case(kind, peers)).run()
    assert outcome.evicted and not outcome.wronged and not outcome.violations


@pytest.mark.parametrize("kind", ["poison", "lazy"])
def test_what_a_liar_has_added_is_never_committed(kind: str) -> None:
    """What others have made of its tensors in that step is."""
    swarm = Swarm(a_case(kind, 9))
    swarm.run()
    world = swarm.context.world
    sums = [world.reduced[digest] for last in swarm.watch.commits.known.values() for digest in last.digests]
    added = [one for reduced in sums for chunk in reduced.chunks for one in chunk]
    assert added and not [one for one in added if one[5:] in (("poison",), (NOTHING,))]


@pytest.mark.parametrize("seed", [0, 1])
def test_where_nobody_lies_an_audit_finds_nothing(seed: int) -> None:
    """A checker reports whatever it says."""
    swarm = Swarm(a_case("", 6, seed))
    assert swarm.watch.trusting and not swarm.run().violations
