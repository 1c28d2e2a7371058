"""Which model a forecast asks."""

from __future__ import annotations

from shoal.forecasting.job import Job
from shoal.forecasting.models.played import PLAYED_MOST, Played
from shoal.forecasting.models.step_time import StepModel
from shoal.forecasting.models.sums import Aggregated, Delayed

PLAYS_MOST = 300  # a composition takes 0.1 to 1 s


def model_of(job: Job, changes: int) -> StepModel:
    """`changes`: how many compositions the whole forecast may ask for. Few of a small fleet are played."""
    if len(job.stage_of) <= PLAYED_MOST and changes <= PLAYS_MOST:
        return Played(job)
    return Delayed(job, Aggregated(job)) if job.seats.staleness else Aggregated(job)
