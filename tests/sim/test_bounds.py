"""Bounded parts in a swarm: whoever brings a part a hundred times as long is evicted before it is committed, and nobody else ever is."""

from __future__ import annotations

import msgspec
import pytest

from shoal.sim.faults.hostile import Hostile
from shoal.sim.faults.removals import WatchedSwarm
from shoal.sim.scenarios.catalogue import SCENARIOS, load
from shoal.sim.scenarios.drawing import draw
from shoal.sim.scenarios.scenario import Case, Happenings, Messages
from shoal.sim.swarm import Swarm
from shoal.sim.tasks.oddities import LONG

QUIET = {"messages": Messages(), "happenings": Happenings(), "save_every": (0, 0)}
SMALL = {"stages": (3, 3), "steps": (8, 8), "microbatches": (9, 9), "step_s": 1.0, "spot_checks": (0.0,)}
AFTER_S = 3.0  # the first step has no reference


def a_case(robust: str, staleness: int = 0, seed: int = 0, spot_checks: float = 0.0) -> Case:
    """Three replicas of each stage; one of them lies once there is a reference."""
    scenario = msgspec.structs.replace(SCENARIOS["strangers"], peers=(9, 9), staleness=staleness, **QUIET, **SMALL)
    case = draw(scenario, seed)
    settings = msgspec.structs.replace(case.settings, robust=robust, spot_checks=spot_checks)
    return msgspec.structs.replace(case, settings=settings, hostile=(Hostile(2, "member", ("long",), AFTER_S),))


def committed(swarm: Swarm) -> list[tuple[object, ...]]:
    """All that was ever added to a gradient that was applied."""
    known, world = swarm.watch.commits.known, swarm.context.world
    sums = [world.reduced[digest] for last in known.values() for digest in last.digests]
    return [one for reduced in sums for chunk in reduced.chunks for one in chunk]


@pytest.mark.parametrize("seed", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("staleness", [0, 1])
def test_who_brings_a_part_that_is_too_long_is_evicted_before_it_is_committed(staleness: int, seed: int) -> None:
    swarm = Swarm(a_case("clip", staleness, seed))
    outcome = swarm.run()
    assert outcome.evicted and not outcome.wronged and not outcome.violations
    assert not [one for one in committed(swarm) if one[5:] == (LONG,)]


def test_without_bounds_it_stays_and_counts_a_hundred_times() -> None:
    swarm = Swarm(a_case("none"))
    outcome = swarm.run()
    assert not outcome.evicted and [one for one in committed(swarm) if one[5:] == (LONG,)]


def test_audits_beside_bounds_convict_nobody_who_is_honest() -> None:
    case = msgspec.structs.replace(a_case("clip", spot_checks=1.0), hostile=())
    swarm = Swarm(case)
    assert swarm.watch.trusting and not swarm.run().violations


@pytest.mark.parametrize("seed", [0, 1, 3, 5])
def test_kills_joins_and_lost_messages_make_no_honest_part_too_long(seed: int) -> None:
    case = draw(load("chaos"), seed)
    case = msgspec.structs.replace(case, settings=msgspec.structs.replace(case.settings, robust="clip"))
    swarm = WatchedSwarm(case)
    outcome = swarm.run()
    assert not outcome.violations
    assert not [one for one in swarm.removed if "run.robust" in one.why]
