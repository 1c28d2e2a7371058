"""Which model a forecast asks, and the rehearsal that shows it the compositions of its run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shoal.forecasting.churn import Presence
from shoal.forecasting.forecaster import forecast
from shoal.forecasting.job import Job
from shoal.forecasting.models.corrected import Corrected
from shoal.forecasting.models.played import PLAYED_MOST, Played
from shoal.forecasting.models.samples import STEPS, thin
from shoal.forecasting.models.step_time import Composition, StepModel, StepTime
from shoal.forecasting.models.sums import Delayed, Sums

PLAYS_MOST = 300  # a composition takes 0.1 to 1 s
SAMPLES_MOST, SAMPLES_LEAST = 48, 4
HOPS_MOST = 400_000  # in all samples together; one takes some 40 us
REHEARSED = 2000  # times that a step with some composition begins or goes on
Histories = Sequence[Sequence[Presence]]  # by seed


class _Rehearsal(StepModel):
    """Sums, and for how long each composition was there."""

    def __init__(self, job: Job, tell: Callable[[], None]) -> None:
        self._sums, self._tell = Sums(job), tell
        self._now, self.asked = 0.0, 0
        self._time: StepTime | None = None  # with the last of
        self.compositions: list[Composition] = []
        self.seconds: list[float] = []

    def __call__(self, composition: Composition) -> StepTime | None:
        self.asked += 1
        if not self.compositions or not np.array_equal(composition, self.compositions[-1]):
            time = self._sums(composition)
            if time is None:
                return None
            self.compositions.append(composition.copy())
            self.seconds.append(0.0)
            self._time = time
        return self._time

    def play(self, job: Job, history: Sequence[Presence], start_s: float, horizon_s: float) -> None:
        self._now = 0.0
        forecast(job, self, history, start_s, horizon_s, 0, self._reach)

    def _reach(self, now: float) -> None:
        if self.seconds:
            self.seconds[-1] += now - self._now
        self._now = now
        self._tell()


def rehearsed(
    job: Job,
    histories: Histories,
    start_s: float,
    horizon_s: float,
    count: int,
    tell: Callable[[], None] = lambda: None,
) -> list[Composition]:
    """So many of the run's compositions, spread evenly over the time that they are there."""
    rehearsal = _Rehearsal(job, tell)
    for history in histories:
        rehearsal.play(job, history, start_s, horizon_s)
        if rehearsal.asked >= REHEARSED:
            break
    ends_s = np.cumsum(rehearsal.seconds)
    if not rehearsal.seconds or not ends_s[-1]:
        return []
    at = np.searchsorted(ends_s, (np.arange(count) + 0.5) / count * ends_s[-1])
    return [rehearsal.compositions[number] for number in at]


def corrected(
    job: Job,
    histories: Histories,
    start_s: float,
    horizon_s: float,
    most: int = SAMPLES_MOST,
    tell: Callable[[int, int], None] = lambda played, of: None,
) -> StepModel:
    """Sums, corrected by plays of `most` compositions of these histories, fewer where steps are long. `tell`: is called with how many of
    how many are played."""
    _, microbatches = thin(job, np.array(job.stage_of))
    count = min(most, max(SAMPLES_LEAST, HOPS_MOST // (STEPS * microbatches * (2 * job.stages - 1))))
    compositions = rehearsed(job, histories, start_s, horizon_s, count, lambda: tell(0, count))
    model = Corrected(job, compositions, lambda played: tell(played, count))
    return Delayed(job, model) if job.seats.staleness else model


def model_of(
    job: Job,
    histories: Histories,
    start_s: float,
    horizon_s: float,
    tell: Callable[[int, int], None] = lambda played, of: None,
) -> StepModel:
    """Where a small fleet changes rarely, each of its compositions is played. `tell`: as of `corrected`."""
    if len(job.stage_of) <= PLAYED_MOST and sum(map(len, histories)) <= PLAYS_MOST:
        return Played(job)
    return corrected(job, histories, start_s, horizon_s, tell=tell)
