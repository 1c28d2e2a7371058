"""A played step in which a member dies: every microbatch is booked by those who live, at every stage."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.prediction.deaths import Death, PlayWithDeath
from shoal.planner.prediction.play import Play
from shoal.planner.prediction.seats import Seats

SPREAD = 0.05
NOTICED_S = 2.0
COUNT = 30


def lines(peers: int, up_Bps: float = 25e6) -> Cluster:
    devices = tuple(Device(name=f"p{i}", flops=1.0, up_Bps=up_Bps, down_Bps=up_Bps) for i in range(peers))
    return Cluster(devices, np.full((peers, peers), 0.02), np.full((peers, peers), 1e15))


def seats(stage_of: tuple[int, ...]) -> Seats:
    peers, stages = len(stage_of), max(stage_of) + 1
    return Seats(stage_of, (0.2,) * peers, (0.4,) * peers, (0.0,) * stages, 1e6, 4e3, COUNT, 4, leader=0, applied_s=0.1)


def warmed(stage_of: tuple[int, ...], seed: int = 0) -> tuple[PlayWithDeath, float]:
    play = PlayWithDeath(seats(stage_of), lines(len(stage_of)), np.random.default_rng(seed), SPREAD)
    start = 0.0
    for _ in range(2):
        start = play.run(COUNT, start)
    return play, start


def test_without_a_death_it_is_the_usual_play() -> None:
    usual = Play(seats((0, 0, 1, 1)), lines(4), np.random.default_rng(0), SPREAD)
    _, start = warmed((0, 0, 1, 1))
    assert start == usual.run(COUNT, usual.run(COUNT, 0.0))


@pytest.mark.parametrize("stage_of", [(0, 0, 1, 1), (0, 1, 2) * 3, (0, 1, 0, 1, 1, 1)])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 0.97, 1.5])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_what_the_dead_had_booked_is_booked_by_those_who_live(
    stage_of: tuple[int, ...], share: float, victim: int
) -> None:
    play, start = warmed(stage_of)
    calm_s = play.run(COUNT, start) - start
    start += calm_s
    play.bars.clear()
    died_s = share * calm_s
    end_s = play.through(COUNT, start, Death(victim, died_s, died_s + NOTICED_S)) - start
    assert end_s >= died_s + NOTICED_S, "no round begins before it is evicted"
    ran = [bar for bar in play.bars if bar.end_s - start <= died_s or bar.device != victim]
    assert all(bar.start_s - start <= died_s for bar in play.bars if bar.device == victim)
    for stage in range(max(stage_of) + 1):
        living = {bar.microbatch for bar in ran if bar.stage == stage and not bar.forward and bar.device != victim}
        assert living == set(range(COUNT)), (stage, sorted(set(range(COUNT)) - living))
    assert end_s - calm_s < calm_s + NOTICED_S + 2.0, "at worst all of a replica's step again"


def test_a_later_death_costs_more_and_one_of_many_replicas_less() -> None:
    costs_s = {}
    for stage_of in ((0, 1) * 2, (0, 1) * 5):
        for share in (0.1, 0.9):
            play, start = warmed(stage_of)
            calm_s = play.run(COUNT, start) - start
            start, died_s = start + calm_s, share * calm_s
            death = Death(2, died_s, died_s + NOTICED_S)
            costs_s[len(stage_of), share] = play.through(COUNT, start, death) - start - calm_s
    assert costs_s[4, 0.9] > costs_s[10, 0.9] > 0 and costs_s[10, 0.9] > costs_s[10, 0.1]
