"""A played step in which replicas have no room: whoever is told Busy waits or asks another one, and each hop is done once all the same."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from tests.planner.test_deaths import COUNT, SPREAD, lines, seats

from shoal.core.trainer.microbatch import Hop, Microbatch
from shoal.planner.prediction.deaths import Death, PlayWithDeath
from shoal.planner.prediction.detours import PlayWithDetours
from shoal.planner.prediction.entries import PlayWithEntry
from shoal.planner.prediction.play import Play
from shoal.planner.prediction.seats import Seats
from shoal.planner.prediction.step import predict

STAGE_OF = (0, 0, 0, 1, 1, 1)
SLOW = 5


def full(limit: int, stage_of: tuple[int, ...] = STAGE_OF) -> Seats:
    """All microbatches of a step are on their way at once, and one replica of the last stage takes three times as long as the others."""
    given = seats(stage_of)
    slow = tuple(3 * one if device == SLOW else one for device, one in enumerate(given.backward_s))
    return msgspec.structs.replace(given, backward_s=slow, inflight=COUNT, queue_limit=limit)


def done(play: Play, stages: int = 2) -> bool:
    """Each hop is, once; forwards that went elsewhere were not begun before."""
    hops = Counter((bar.stage, bar.microbatch, bar.forward) for bar in play.bars)
    return set(hops.values()) == {1} and len(hops) == COUNT * (2 * stages - 1)


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_no_more_hops_wait_at_a_replica_than_it_has_room_for(limit: int) -> None:
    waiting, declined = list[int](), list[str]()

    class Watched(PlayWithDetours):
        def _arrived(self, owner: int, m: Microbatch, now: float) -> None:
            super()._arrived(owner, m, now)
            waiting.append(max(sum(forward for forward, *_ in one.queue) for one in self._servers.values()))

        def _declined(self, owner: int, m: Microbatch, hop: Hop, wait_s: float, now: float) -> None:
            declined.append(hop.peer)
            super()._declined(owner, m, hop, wait_s, now)

    play = Watched(full(limit), lines(6), np.random.default_rng(0), SPREAD)
    start = play.run(COUNT, 0.0)
    assert done(play) and declined
    play.bars.clear()
    play.run(COUNT, start)
    # Those whose tensors were on their way do not count until they could run
    assert done(play) and limit <= max(waiting) <= 2 * limit


def test_with_room_for_all_it_is_the_usual_play() -> None:
    shape = full(COUNT)
    usual, other = (kind(shape, lines(6), np.random.default_rng(0), SPREAD) for kind in (Play, PlayWithDetours))
    assert usual.run(COUNT, usual.run(COUNT, 0.0)) == other.run(COUNT, other.run(COUNT, 0.0))


def test_a_prediction_knows_of_it_where_delays_spread() -> None:
    """With little room owners drive less at once."""
    room, none = (
        [predict(full(limit), lines(6), np.random.default_rng(0), spread).microbatches_s for spread in (SPREAD, 0.0)]
        for limit in (COUNT, 1)
    )
    assert none[0] > 1.03 * room[0] and none[1] == room[1]


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_with_a_death_and_with_an_entry_each_hop_is_booked_once_too(at: float) -> None:
    dies = PlayWithDeath(full(2), lines(6), np.random.default_rng(1), SPREAD)
    start = dies.run(COUNT, dies.run(COUNT, 0.0))
    step_s = dies.run(COUNT, start) - start
    start += step_s
    death = Death(4, at * step_s, at * step_s + 1.0)
    assert dies.through(COUNT, start, death) > start + step_s
    booked = dies._booked
    assert sorted(booked) == [(index, stage) for index in range(COUNT) for stage in (0, 1)]
    assert 4 not in booked.values()
    comes = PlayWithEntry(full(2), lines(6), np.random.default_rng(1), SPREAD, [4])
    start = comes.run(COUNT, comes.run(COUNT, 0.0))
    comes.bars.clear()
    comes.through(COUNT, start, at * step_s)
    assert done(comes)


@pytest.mark.parametrize("seed", range(24))
def test_whoever_dies_where_queues_are_full_leaves_each_hop_to_be_booked_once(seed: int) -> None:
    """Seed 6 did not end: hops that found the others busy went to the dead, and each that was refused sent all of them again."""
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(2, 5))
    peers = stages * int(rng.integers(2, 4))
    own_s = tuple(float(each) for each in rng.uniform(0.1, 1.5, peers))
    shape = msgspec.structs.replace(
        seats(tuple(device % stages for device in range(peers))),
        backward_s=own_s,
        forward_s=tuple(seconds / 2 for seconds in own_s),
        inflight=int(rng.integers(1, COUNT)),
        queue_limit=int(rng.integers(1, 5)),
        turns=tuple(int(each) for each in rng.integers(1, 9, peers)) if seed % 2 else (),
    )
    play = PlayWithDeath(shape, lines(peers, float(rng.choice([3e6, 25e6]))), np.random.default_rng(seed), SPREAD)
    start = play.run(COUNT, play.run(COUNT, 0.0))
    ends = play.run(COUNT, start)
    at_s, victim = float(rng.random()) * (ends - start), int(rng.integers(peers))
    play.through(COUNT, ends, Death(victim, at_s, at_s + float(rng.choice([0.2, 2.0, 6.0]))))
    booked = play._booked
    assert sorted(booked) == [(index, stage) for index in range(COUNT) for stage in range(stages)]
    assert victim not in booked.values()
