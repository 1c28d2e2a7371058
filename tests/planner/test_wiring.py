"""Planned wiring: every replica gets what it can pass, near links are taken, and a plan is wired when that is quicker."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.inputs.profile import Shape, Work
from shoal.planner.prediction.seats import Routing, Seats
from shoal.planner.prediction.step import predict
from shoal.planner.prediction.wiring import matched, planned, shares, spread
from shoal.planner.strategy import strategy
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.problem import Problem


def cluster(peers: int, near_Bps: float = 1e9, far_Bps: float = 1e9, line_Bps: float = 1e9) -> Cluster:
    """Even devices on one side, odd ones on the other; every pair across has a link of `far_Bps`."""
    devices = tuple(Device(name=f"p{i}", flops=1.0, up_Bps=line_Bps, down_Bps=line_Bps) for i in range(peers))
    across = np.add.outer(np.arange(peers), np.arange(peers)) % 2 == 1
    return Cluster(devices, np.where(across, 0.08, 0.002), np.where(across, far_Bps, near_Bps))


def seats(stage_of: tuple[int, ...], **changes: object) -> Seats:
    peers, stages = len(stage_of), max(stage_of) + 1
    result = Seats(stage_of, (0.2,) * peers, (0.4,) * peers, (0.0,) * stages, 1e6, 0.0, 24, 4)
    return msgspec.structs.replace(result, **changes)


def served(given: Seats, routes: tuple[tuple[tuple[int, ...], ...], ...]) -> Counter[int]:
    """Microbatches that each device serves in one step, owners going round as core's do."""
    owners, counts = given.seated, Counter[int]()
    for index in range(given.microbatches):
        for turns in routes[owners[index % len(owners)]]:
            counts[turns[index // len(owners) % len(turns)]] += 1
    return counts


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 500), st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12))
def test_shares_add_up_and_are_never_off_by_one_or_more(count: int, weights: list[float]) -> None:
    whole = shares(count, weights)
    assert sum(whole) == count
    assert all(abs(part - count * weight / sum(weights)) < 1 for part, weight in zip(whole, weights, strict=True))


def test_turns_are_spread_and_begin_elsewhere_for_other_owners() -> None:
    assert spread([2, 1, 0]) == [0, 1, 0]
    assert spread([4, 2]) == [0, 1, 0, 0, 1, 0]
    assert Counter(spread([3, 2, 1], 0.5)) == Counter(spread([3, 2, 1]))
    assert spread([2, 2], 0.25) != spread([2, 2])


@pytest.mark.parametrize("stage_of", [(0,) * 6, (0, 0, 1, 1, 2, 2), (0, 1, 1, 1, 1, 0), (0, 1, 2, 3, 0, 1)])
def test_replicas_get_microbatches_in_proportion_to_what_they_can_pass(stage_of: tuple[int, ...]) -> None:
    quick = tuple(0.1 if device == 1 else 0.2 for device in range(6))
    given = seats(stage_of, forward_s=quick, backward_s=tuple(2 * s for s in quick))
    counts = served(given, planned(given, cluster(6)))
    for stage in range(given.stages):
        group = given.replicas(stage)
        speeds = [1 / quick[device] for device in group]
        for device, wanted in zip(group, shares(24, speeds), strict=True):
            assert counts[device] == wanted


def test_near_replicas_are_taken_while_they_have_room() -> None:
    """Two of each side at each stage: every owner stays on its own side."""
    given = seats((0, 0, 0, 0, 1, 1, 1, 1), microbatches=32)
    routes = planned(given, cluster(8, far_Bps=1e6))
    assert all(replica % 2 == owner % 2 for owner in range(8) for turns in routes[owner] for replica in turns)


def test_what_near_replicas_have_no_room_for_goes_far_and_nothing_more() -> None:
    """At stage 1 one of four replicas is on the even side, where three owners have 12 of 32 microbatches: 4 must go far."""
    given = seats((0, 0, 0, 0, 1, 1, 1, 1), microbatches=32)
    sides = cluster(14, far_Bps=1e6).chosen([0, 2, 1, 3, 4, 5, 7, 9])
    even = {0, 1, 4}
    routes = planned(given, sides)
    assert [served(given, routes)[device] for device in range(4, 8)] == [8, 8, 8, 8]
    far = sum((replica in even) != (owner in even) for owner in range(8) for replica in routes[owner][1])
    assert far == 4


def test_far_sides_are_wired_apart_which_is_quicker_than_by_measured_times() -> None:
    given = seats((0, 0, 0, 0, 1, 1, 1, 1), microbatches=32)
    sides = cluster(8, far_Bps=1e6)
    wired = msgspec.structs.replace(given, routes=planned(given, sides))
    by_plan, by_times = (predict(s, sides, np.random.default_rng(0)).step_s for s in (wired, given))
    assert (
        by_plan < by_times
    )  # replicas that take turns leave little to it; 1.4 and 2.7 times as slow at a third and a tenth of the rate


def test_no_more_tensors_go_far_than_must() -> None:
    """Three stages of three equal replicas; one, two and two of them are on the even side. Of 72 microbatches 24 are served there
    at stage 0 and 48 at stages 1 and 2, so 24 must cross once. Near their owners alone more do."""
    given = seats((1, 0, 1, 1, 2, 2, 2, 0, 0), microbatches=72)
    sides = cluster(9, far_Bps=1e6)

    def crossings(routes: Routing) -> int:
        owners, far = given.seated, 0
        for index in range(given.microbatches):
            way = [turns[index // len(owners) % len(turns)] for turns in routes[owners[index % len(owners)]]]
            far += sum(one % 2 != other % 2 for one, other in pairwise(way))
        return far

    by_owners = planned(given, sides)
    by_neighbours = matched(given, sides, by_owners)
    assert crossings(by_neighbours) == 24 < crossings(by_owners)
    assert served(given, by_neighbours) == served(given, by_owners)
    alone = seats((0,) * 9, microbatches=72)
    routes = planned(alone, sides)
    assert matched(alone, sides, routes) is routes


def test_a_device_without_a_seat_has_no_routes_and_is_in_none() -> None:
    given = seats((0, 1, -1, 1))
    routes = planned(given, cluster(4))
    assert routes[2] == () and all(routes[device] for device in (0, 1, 3))
    assert {replica for ways in routes for turns in ways for replica in turns} == {0, 1, 3}


# ------------------------------------------------------------------------------------------------------------- plans

SHAPE = Shape(hidden=256, layers=4, heads=4, kv_heads=4, head_dim=64, intermediate=768, vocabulary=256)
WORK = Work(microbatches=24, sequences=8, tokens=512, value_bytes=4)


def decided(wiring: strategy.Wiring, machines: Cluster) -> Plan:
    devices = tuple(msgspec.structs.replace(device, flops=50e9) for device in machines.devices)
    machines = msgspec.structs.replace(machines, devices=devices)
    given = Problem(shape=SHAPE, work=WORK, cluster=machines, wiring=wiring)
    return strategy.decide(given, np.random.default_rng(0), budget=0, stages=2)


def test_a_plan_says_how_it_is_wired_and_why() -> None:
    sides = cluster(8, far_Bps=1e6).chosen([0, 2, 1, 3, 4, 6, 5, 7])  # each stage has two machines on either side
    assert decided("stochastic", sides).routes == ()
    assert decided("best", sides).routes == (), (
        "at most 8 % are to be won: measured times follow what a plan cannot know"
    )
    best = decided("planned", sides)
    assert len(best.routes) == 8 and "planned wiring: fixed routes are quicker" in best.reason
    stages = list(best.seats.values())
    assert all(stages[seat] == stage for ways in best.routes for stage, turns in enumerate(ways) for seat in turns)
    assert decided("planned", cluster(6)).routes


def test_free_sizes_find_no_longer_step_than_the_configured_one() -> None:
    machines = cluster(6)
    devices = tuple(msgspec.structs.replace(device, flops=50e9) for device in machines.devices)
    given = Problem(shape=SHAPE, work=WORK, cluster=msgspec.structs.replace(machines, devices=devices))
    fixed = strategy.decide(given, np.random.default_rng(0), budget=0, stages=2)
    free = strategy.decide_sizes(given, lambda: np.random.default_rng(0), budget=0, stages=2)
    assert fixed.predicted is not None and free.predicted is not None
    assert free.predicted.step_s <= fixed.predicted.step_s
    assert 192 % free.microbatch == 0 and any(text.startswith("microbatches of 8") for text in free.runners_up) != (
        free.microbatch == 8
    )
