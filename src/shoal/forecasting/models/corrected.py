"""The step-time model of larger fleets and long horizons: sums over stages (sums.py), corrected by plays of the run's own compositions.

Who serves what is known without a step's exact seconds: a rehearsal with sums gives the compositions, and for how long each is there.
Some of them, spread evenly over that time, are played (samples.py). What a play takes over the sum is fitted: of a composition by how many
machines it has, how many stages are about as thin as the thinnest, and which that is; of a death by the slower rest of its step and by
what that machine had done of it; of an entry by the quicker rest. So errors are around zero where this run is, whatever single plays do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec
import numpy as np

from shoal.forecasting.job import Job
from shoal.forecasting.models.samples import Change, Sample, planned, sample
from shoal.forecasting.models.step_time import Composition, StepModel, StepTime
from shoal.forecasting.models.sums import Sums
from shoal.planner.costs.arrays import Floats

KEPT = 256  # compositions
RIDGE = 1.0  # of slopes of features with a deviation of 1: of few samples they are held back
THIN = 6  # a stage that passes a tenth more than the thinnest counts a bit more than half as much


class Fit(msgspec.Struct, frozen=True, eq=False):
    """A ridge regression: the mean, and what each feature adds."""

    mean: float
    centre: Floats
    slopes: Floats

    def __call__(self, features: Sequence[float] | Floats) -> float:
        return self.mean + float((np.asarray(features) - self.centre) @ self.slopes)


def fitted(features: Sequence[Sequence[float] | Floats], values: Sequence[float]) -> Fit:
    """To values with these features. A feature that all have alike adds nothing."""
    table, wanted = np.array(features, float), np.array(values, float)
    centre, mean = table.mean(axis=0), float(wanted.mean())
    deviation = table.std(axis=0)
    scale = np.where(deviation > 1e-12, deviation, np.inf)
    table = (table - centre) / scale
    slopes = np.linalg.solve(table.T @ table + RIDGE * np.eye(table.shape[1]), table.T @ (wanted - mean))
    return Fit(mean, centre, slopes / scale)


class Corrected(StepModel):
    """Sums over stages with factors, deaths and entries that are fitted to plays of `compositions`."""

    def __init__(
        self, job: Job, compositions: Sequence[Composition], tell: Callable[[int], None] = lambda played: None
    ) -> None:
        """`compositions`: that are played, beside the planned one. `tell`: is called with how many have been."""
        self._job, self._sums = job, Sums(job)
        self._known: dict[bytes, StepTime | None] = {}
        self._stage_of = np.array(job.stage_of)
        self._seats = int((self._stage_of >= 0).sum())
        summed = self._sums.of(self._stage_of, job.microbatches)
        first, later = planned(job)
        self._first, self._as_planned = (self._times(summed, *self._ratios(one)) for one in (first, later))
        more = self._as_planned.microbatches_s / summed.microbatches_s
        samples = list[Sample]()
        for number, composition in enumerate(compositions):
            about_s = self._sums.of(composition, job.microbatches).microbatches_s * more
            samples.append(sample(job, composition, about_s, number))
            tell(number + 1)
        self._microbatches, self._averaging = self._of_compositions(samples or [later])
        self._joined = fmean(one.joined for one in samples) if samples else 1.0
        self._death, self._entry = (self._of_changes(samples, enters) for enters in (False, True))

    def __call__(self, composition: Composition) -> StepTime | None:
        return self._as_planned if np.array_equal(composition, self._stage_of) else self._fitted(composition)

    def first(self, composition: Composition) -> StepTime | None:
        return self._first if np.array_equal(composition, self._stage_of) else self._fitted(composition)

    def with_death(
        self, composition: Composition, slot: int, at_s: float, evicted_s: float, first: bool = False
    ) -> float | None:
        before = (self.first if first else self)(composition)
        if self._death is None or before is None:
            return None
        features = self._death_features(composition, slot, at_s / before.microbatches_s)
        return max(before.microbatches_s + sum(features) + self._death(features), evicted_s) if features else None

    def with_entry(self, composition: Composition, slots: Sequence[int], at_s: float) -> float | None:
        before = self(_without(composition, slots))
        if self._entry is None or before is None:
            return None
        features = self._entry_features(composition, slots, at_s / before.microbatches_s)
        return max(before.microbatches_s - sum(features) + self._entry(features), at_s) if features else None

    def with_joiners(self, composition: Composition, joiners: tuple[int, ...]) -> tuple[float, ...] | None:
        time = self(composition) if any(joiners) else None
        if time is None:
            return None
        more_s = (self._joined - 1) * (time.averaging_s - self._job.round_s)
        return tuple(time.averaging_s + count * more_s for count in joiners)

    def _fitted(self, composition: Composition) -> StepTime | None:
        """Kept: most steps have the composition of the one before."""
        key = composition.tobytes()
        if key not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            time = self._sums(composition)
            self._known[key] = time and self._by_features(composition, time)
        return self._known[key]

    def _by_features(self, composition: Composition, time: StepTime) -> StepTime:
        features = self._features(composition, time)
        return self._times(time, self._microbatches(features), self._averaging(features))

    def _times(self, time: StepTime, microbatches: float, averaging: float) -> StepTime:
        """Logarithms of factors of both."""
        round_s, microbatches_s = self._job.round_s, time.microbatches_s * math.exp(microbatches)
        return msgspec.structs.replace(
            time,
            microbatches_s=microbatches_s,
            averaging_s=(time.averaging_s - round_s) * math.exp(averaging) + round_s,
            compute_s=min(time.compute_s, microbatches_s),
        )

    # ------------------------------------------------------------------------------------------------------- features

    def _features(self, composition: Composition, time: StepTime) -> Floats:
        """How many machines of the planned, how many stages are about as thin as the thinnest, and which that is."""
        rates = np.array(time.stage_rates)
        members = math.log((composition >= 0).sum() / self._seats)
        thin = math.log(((rates.min() / rates) ** THIN).sum())
        return np.array([members, thin, *(np.arange(1, len(rates)) == rates.argmin())])

    def _death_features(self, composition: Composition, slot: int, passed: float) -> tuple[float, ...]:
        """Seconds by which the rest of the step is slower without it, and that its replica had worked for. (): where it is the last."""
        before, after = self._fitted(composition), self._fitted(_without(composition, [slot]))
        if before is None or after is None:
            return ()
        return _slower(composition, slot, passed, before.microbatches_s, after.microbatches_s)

    def _entry_features(self, composition: Composition, slots: Sequence[int], passed: float) -> tuple[float, ...]:
        """Seconds by which the rest of the step is shorter with them."""
        before, after = self._fitted(_without(composition, slots)), self._fitted(composition)
        if before is None or after is None:
            return ()
        return ((1 - min(passed, 1.0)) * (before.microbatches_s - after.microbatches_s),)

    # ----------------------------------------------------------------------------------------------------------- fits

    def _of_compositions(self, samples: Sequence[Sample]) -> tuple[Fit, Fit]:
        features = [self._features(one.fleet, self._sums.of(one.fleet, self._job.microbatches)) for one in samples]
        ratios = [self._ratios(one) for one in samples]
        microbatches, averaging = ([each[part] for each in ratios] for part in (0, 1))
        return fitted(features, microbatches), fitted(features, averaging)

    def _ratios(self, played: Sample) -> tuple[float, float]:
        """Logarithms of played seconds over summed ones: of microbatches, and of averaging."""
        time = self._sums.of(played.composition, played.microbatches)
        averaging_s = time.averaging_s - self._job.round_s
        return (
            math.log(played.microbatches_s / time.microbatches_s),
            math.log(played.averaging_s / averaging_s) if averaging_s > 0 < played.averaging_s else 0.0,
        )

    def _played_features(self, one: Sample, change: Change) -> tuple[float, ...]:
        """Of a fleet that was thinned, seconds of the machines that were played, by its own factor."""
        if one.microbatches == self._job.microbatches:
            if change.enters:
                return self._entry_features(change.composition, [change.slot], change.passed)
            return self._death_features(change.composition, change.slot, change.passed)
        factor = one.microbatches_s / self._sums.of(one.composition, one.microbatches).microbatches_s
        whole, others = (
            factor * self._sums.of(each, one.microbatches).microbatches_s
            for each in (change.composition, _without(change.composition, [change.slot]))
        )
        features = _slower(change.composition, change.slot, change.passed, whole, others)
        return features[:1] if change.enters else features

    def _of_changes(self, samples: Sequence[Sample], enters: bool) -> Fit | None:
        """Of seconds by which a step with a change is longer than by its features. None: no such change was played."""
        features, seconds = [], []
        for one in samples:
            change = one.change
            if change is None or change.enters != enters:
                continue
            known = self._played_features(one, change)
            features.append(known)
            seconds.append(change.longer_s + (sum(known) if enters else -sum(known)))
        return fitted(features, seconds) if seconds else None


def _slower(composition: Composition, slot: int, passed: float, with_s: float, without_s: float) -> tuple[float, float]:
    """Seconds by which the rest of a step is slower without the machine on that slot, and that it had worked for."""
    passed = min(passed, 1.0)
    share = 1 / int((composition == composition[slot]).sum())
    return (1 - passed) * (without_s - with_s), share * passed * with_s


def _without(composition: Composition, slots: Sequence[int]) -> Composition:
    others = composition.copy()
    others[list(slots)] = -1
    return others
