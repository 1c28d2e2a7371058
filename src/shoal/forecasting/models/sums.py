"""The step-time model of large fleets and long horizons: sums over stages, for thousands of compositions.

A replica passes as many microbatches per second as its compute, uplink and downlink allow, a stage the sum of its
replicas' (each gets the share that fills it, which is the max-min fair one), the pipeline what its thinnest stage does or what its owners
can have on their way. What playing takes over it is corrected.py's.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from shoal.core.allreduce.layout import row_lengths
from shoal.forecasting.job import Job
from shoal.forecasting.models.step_time import Composition, Rates, StepModel, StepTime
from shoal.planner.costs.arrays import Floats, Ints
from shoal.planner.prediction.seats import request_bytes


class Sums(StepModel):
    """See above."""

    def __init__(self, job: Job) -> None:
        self._job, self._rates = job, Rates(job)
        seats = job.seats
        self._messages_s = np.maximum(job.machines.delay_s, job.machines.delay_s.T)
        self._moved_bytes = sum(request_bytes(seats)) + (seats.stages - 1) * (seats.boundary_bytes + seats.back_bytes)
        self._exchanges_s: dict[tuple[float, bytes, int], float] = {}

    def __call__(self, composition: Composition) -> StepTime | None:
        job, rates = self._job, self._rates
        stage_rates = rates.of_stages(rates.replica, composition, job.stages)
        if not stage_rates.min() > 0:
            return None
        return self.of(composition, job.microbatches)

    def of(self, composition: Composition, microbatches: int) -> StepTime:
        job, rates = self._job, self._rates
        stage_rates = rates.of_stages(rates.replica, composition, job.stages)
        members = composition >= 0
        counts = np.bincount(rates.kind_of[members], minlength=len(job.machines.kinds)).astype(float)
        weights = counts / counts.sum()
        delay_s = float(weights @ self._messages_s @ weights)
        microbatches_s = max(
            microbatches / float(stage_rates.min()), self._trips_s(composition, microbatches, weights, delay_s)
        )
        there = counts > 0
        farthest_s = float(self._messages_s[np.ix_(there, there)].max(axis=1) @ weights[there])
        compute = rates.of_stages(rates.compute, composition, job.stages)
        return StepTime(
            microbatches_s,
            self._averaging_s(composition) + job.round_s,
            4 * farthest_s + 2 * delay_s if counts.sum() > 1 else 0.0,
            min(microbatches / float(compute.min()), microbatches_s),
            tuple(stage_rates.tolist()),
        )

    def _trips_s(self, composition: Composition, microbatches: int, weights: Floats, delay_s: float) -> float:
        """What an owner has on its way at once limits it: trips through all stages, one after the other."""
        job, stages = self._job, self._job.stages
        members = np.flatnonzero(composition >= 0)
        at = composition[members]
        own_s = job.hop_s[self._rates.kind_of[members], at]
        compute_s = float((np.bincount(at, own_s, minlength=stages) / np.bincount(at, minlength=stages)).sum())
        line_s = float(np.mean(1.0 / self._rates.line_Bps[self._rates.kind_of[members]]))
        trip_s = compute_s + 2 * (2 * stages - 1) * delay_s + self._moved_bytes * line_s
        return math.ceil(microbatches / len(members)) / job.seats.most_inflight * trip_s

    def _averaging_s(self, composition: Composition) -> float:
        """The slowest stage's reduce-scatter and all-gather, at even shares on its narrowest line."""
        job, kinds = self._job, len(self._job.machines.kinds)
        slots = np.flatnonzero(composition >= 0)
        at = composition[slots] * kinds + self._rates.kind_of[slots]
        counts = np.bincount(at, minlength=job.stages * kinds).reshape(job.stages, kinds)
        worst_s = 0.0
        # Stages of a large fleet differ in few ways: of 10,000 machines at 312 stages this took most of a forecast
        for nbytes, there, replicas in zip(
            job.seats.gradient_bytes, counts > 0, counts.sum(axis=1).tolist(), strict=True
        ):
            if replicas > 1:
                key = nbytes, there.tobytes(), replicas
                if key not in self._exchanges_s:
                    self._exchanges_s[key] = self._exchange_s(nbytes, np.flatnonzero(there), replicas)
                worst_s = max(worst_s, self._exchanges_s[key])
        return worst_s + job.seats.round_work_s

    def _exchange_s(self, nbytes: float, present: Ints, replicas: int) -> float:
        """Of one stage's gradient, among so many machines of these kinds."""
        machines = self._job.machines
        links_Bps = machines.bandwidth_Bps[np.ix_(present, present)]
        # 0: the only machine of its kind has no link to another of it
        pair_Bps = float(links_Bps[links_Bps > 0].min())
        delay_s = float(machines.delay_s[np.ix_(present, present)].max())
        line_Bps = float(self._rates.line_Bps[present].min())
        rows = row_lengths(replicas)
        held, seconds = nbytes, 0.0
        for among in (rows[0], len(rows)) if len(rows) > 1 else rows:
            seconds += max(held / among / pair_Bps, held * (1 - 1 / among) / line_Bps) + delay_s
            held /= among
        return 2 * seconds


class Delayed(StepModel):
    """A model's steps with delayed updates: a step's round runs beside the next step's microbatches, on the same lines."""

    def __init__(self, job: Job, model: StepModel) -> None:
        self._job, self._model, self._rates = job, model, Rates(job)

    def __call__(self, composition: Composition) -> StepTime | None:
        step = self._model(composition)
        if step is None:
            return None
        beside_s = max(step.averaging_s + step.agreeing_s, step.averaging_s + self._line_s(composition, step))
        return msgspec.structs.replace(
            step, averaging_s=max(beside_s - step.microbatches_s, 0.0), agreeing_s=step.agreeing_s / 2
        )

    def _line_s(self, composition: Composition, step: StepTime) -> float:
        """Seconds that the busiest line carries the step's microbatches."""
        slots = np.flatnonzero(composition >= 0)
        kinds, at = self._rates.kind_of[slots], composition[slots]
        shares = self._rates.replica[kinds, at] / np.array(step.stage_rates)[at]
        return float((self._job.microbatches * shares * self._rates.line_s[kinds, at]).max())
