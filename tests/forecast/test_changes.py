"""Whoever comes or goes in the middle of a forecast step, which is played with that in it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.forecast.test_forecast import HOUR_S, a_job, always, with_a_narrow_line

from shoal.forecasting.churn import Presence
from shoal.forecasting.crew import EVICTION_DELAYS
from shoal.forecasting.forecaster import Run
from shoal.forecasting.job import Job
from shoal.forecasting.models.played import Played

NEWCOMER = 6  # at the stage that takes longest


def long(inflight: int) -> Job:
    """Steps of some 20 s, of which each owner has so many microbatches on their way; no queue is full."""
    job = a_job(8)
    seats = msgspec.structs.replace(job.seats, microbatches=96, inflight=inflight, queue_limit=96)
    return msgspec.structs.replace(job, seats=seats)


def step_s(job: Job, asks_s: float) -> float:
    """Of a step in which the newcomer asks to join then; all others are there."""
    there = [one for one in always(8) if one.slot != NEWCOMER]
    run = Run(job, Played(job), [*there, Presence(asks_s, NEWCOMER, True)], 0.0, begun=True)
    run.play(HOUR_S, steps=1)
    return run.now


def test_whoever_enters_in_the_middle_of_a_step_gets_what_has_not_been_asked_for() -> None:
    without_s, early_s, late_s = (step_s(long(2), asks_s) for asks_s in (HOUR_S, 1.0, 6.0))
    assert early_s < 0.93 * without_s and early_s < late_s <= without_s


def test_of_a_step_that_is_all_on_its_way_whoever_enters_gets_nothing() -> None:
    """At the rate of all who serve then, the step would be an eighth shorter."""
    job = long(96)
    assert step_s(job, 6.0) == pytest.approx(step_s(job, HOUR_S), rel=0.02)


def test_a_death_in_a_runs_first_step_is_one_of_a_step_in_which_nothing_is_measured() -> None:
    """A narrow line has its turn as often as the others then."""
    job = with_a_narrow_line(2)
    job = msgspec.structs.replace(job, seats=msgspec.structs.replace(job.seats, boundary_bytes=4e7))
    model, planned = Played(job), np.array(job.stage_of)
    calm_s = [step.microbatches_s for step in (model.first(planned), model(planned)) if step is not None]
    noticed_s = 1.0 + job.patience.detection_s + EVICTION_DELAYS * job.delay_s
    deaths_s = [model.with_death(planned, 2, 1.0, noticed_s, first=first) or 0.0 for first in (True, False)]
    assert calm_s[0] > 1.1 * calm_s[1]
    assert deaths_s[0] > 1.1 * deaths_s[1] > calm_s[1]
    run = Run(job, model, always(5, Presence(1.0, 2, False)), 0.0)
    run.play(HOUR_S, steps=1)
    assert run.now > deaths_s[0]
