"""A played step in the middle of which a newcomer begins to serve: it gets the hops whose requests have not been made, and only these."""

from __future__ import annotations

import msgspec
import numpy as np
from tests.planner.test_deaths import COUNT, SPREAD, lines, seats

from shoal.planner.prediction.entries import PlayWithEntry
from shoal.planner.prediction.play import Play

STAGE_OF = (0, 0, 1, 1, 0)
NEWCOMER = 4  # at the stage that takes longest


def entered(at: float, inflight: int = 2) -> tuple[float, float, int]:
    """The seconds of a step without it and of one that it enters after that part, and the backwards that it did there."""
    shape = msgspec.structs.replace(seats(STAGE_OF), inflight=inflight)
    play = PlayWithEntry(shape, lines(len(STAGE_OF)), np.random.default_rng(0), SPREAD, [NEWCOMER])
    start = play.run(COUNT, play.run(COUNT, 0.0))
    calm_s = play.run(COUNT, start) - start
    start += calm_s
    play.bars.clear()
    seconds = play.through(COUNT, start, at * calm_s) - start
    own = [bar for bar in play.bars if bar.device == NEWCOMER]
    assert all(bar.start_s >= start + at * calm_s for bar in own)
    booked = sorted((bar.stage, bar.microbatch) for bar in play.bars if not bar.forward)
    assert booked == [(stage, index) for stage in (0, 1) for index in range(COUNT)], "each is booked once"
    return calm_s, seconds, sum(not bar.forward for bar in own)


def test_until_it_comes_it_is_the_usual_play_without_it() -> None:
    shape, cluster = seats(STAGE_OF), lines(len(STAGE_OF))
    play = PlayWithEntry(shape, cluster, np.random.default_rng(0), SPREAD, [NEWCOMER])
    without = Play(
        msgspec.structs.replace(shape, stage_of=STAGE_OF[:NEWCOMER]), cluster, np.random.default_rng(0), SPREAD
    )
    assert play.run(COUNT, 0.0) == without.run(COUNT, 0.0)


def test_whoever_comes_at_the_beginning_gets_its_share_and_the_step_is_shorter() -> None:
    calm_s, seconds, hops = entered(0.0)
    assert COUNT / 3 - 3 <= hops <= COUNT / 3 + 3
    assert seconds < 0.9 * calm_s


def test_whoever_comes_later_gets_less() -> None:
    assert entered(0.1)[2] > entered(0.4)[2] > entered(0.9)[2] == 0


def test_of_a_step_that_is_all_on_its_way_it_gets_nothing() -> None:
    """Its share would be a third of what is left."""
    calm_s, seconds, hops = entered(0.4, inflight=COUNT)
    assert hops == 0 and abs(seconds - calm_s) < 0.1 * calm_s
