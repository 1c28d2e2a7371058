"""The step-time model of small fleets and short horizons: each composition is played, as the planner predicts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from statistics import fmean
from typing import TypeVar

import msgspec
import numpy as np

from shoal.core.messages import TURNS
from shoal.forecasting.job import Job
from shoal.forecasting.models.step_time import MEAN_LATE, Composition, Rates, StepModel, StepTime, measured, seats_of
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.averaging import averaging_ends
from shoal.planner.prediction.deaths import Death, PlayWithDeath
from shoal.planner.prediction.detours import PlayWithDetours
from shoal.planner.prediction.entries import PlayWithEntry
from shoal.planner.prediction.play import Play
from shoal.planner.prediction.seats import Seats, paced
from shoal.planner.prediction.step import Step, predict
from shoal.planner.prediction.timed import LONGEST

PLAYED_MOST = 32  # machines of a fleet whose steps are all played
# Of each composition: single plays differ by 3 % in who is asked first, and their mean from every message by 1 %
PLAYS = 3
WARM = 3  # steps before one in which a machine dies
# Into as many moments a step is cut for deaths, and so many seconds is the time until it is noticed apart: what is between two is the same
MOMENTS, NOTICED_S = 16, 0.1
FEW_PLAYS = 2  # of larger fleets, for which one takes seconds
SPREAD = (MEAN_LATE - 1) / MEAN_LATE  # around that mean; without it machines that are all alike are played in lockstep


Place = tuple[bool, int, int]  # of a machine: whether it serves another stage than planned, its stage, its kind


class Played(StepModel):
    """The planner's prediction of each composition, kept: compositions of the same kinds at the same stages are one, where as many of
    them hold their seats. Whoever serves another stage than its seat's owns after the others, and its turns come first: with nine like
    machines and 28 microbatches that order makes a step 7 % longer."""

    def __init__(self, job: Job) -> None:
        self._job, self._rates = job, Rates(job)
        self._known: dict[tuple[Place, ...], StepTime] = {}
        self._seated: dict[tuple[Place, ...], tuple[Seats, Cluster]] = {}  # as those were played
        self._deaths: dict[tuple[tuple[Place, ...], int, Death, bool], float] = {}
        self._entries: dict[tuple[tuple[Place, ...], tuple[int, ...], float], float] = {}
        self._rounds: dict[tuple[tuple[Place, ...], tuple[int, ...]], tuple[float, ...]] = {}
        self._slots_of: list[list[int]] = [[] for _ in job.machines.kinds]
        for slot, kind in enumerate(job.machines.kind_of):
            self._slots_of[kind].append(slot)

    def __call__(self, composition: Composition) -> StepTime | None:
        if set(range(self._job.stages)) - set(composition.tolist()):
            return None
        key = self._key(composition)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._predicted(key, self._as_planned(composition))
        return known

    def _key(self, composition: Composition) -> tuple[Place, ...]:
        return tuple(sorted(self._place(slot, stage) for slot, stage in enumerate(composition.tolist()) if stage >= 0))

    def _as_planned(self, composition: Composition) -> bool:
        """Then devices are slots."""
        return tuple(composition.tolist()) == self._job.stage_of

    def _place(self, slot: int, stage: int) -> Place:
        return stage != self._job.stage_of[slot], stage, self._job.machines.kind_of[slot]

    def with_death(
        self, composition: Composition, slot: int, at_s: float, evicted_s: float, first: bool = False
    ) -> float | None:
        """As of the next of MOMENTS in a step, which are kept."""
        job, alone = self._job, (composition == composition[slot]).sum() < 2
        if alone or not self._plays_changes(composition):
            return None
        key, (device,) = self._devices(composition, [slot])
        first = first and self._as_planned(composition)
        seats, cluster = self._seated[key]
        if first:
            seats = self._unmeasured()
        played_s = self._moment_s(key, at_s)
        notices_s = round((evicted_s - at_s) / NOTICED_S) * NOTICED_S
        death = Death(device, seats.applied_s + played_s, seats.applied_s + played_s + notices_s)
        known = self._deaths.get((key, device, death, first))
        if known is None:
            plays = [PlayWithDeath(seats, cluster, np.random.default_rng(seed), SPREAD) for seed in range(PLAYS)]
            warm = 0 if first else WARM
            known = _warmed(job, plays, lambda play, start: play.through(job.microbatches, start, death), warm)
            self._deaths[key, device, death, first] = known
        return known + (evicted_s - played_s - notices_s)

    def with_entry(self, composition: Composition, slots: Sequence[int], at_s: float) -> float | None:
        """As of the next of MOMENTS in a step, which are kept."""
        job = self._job
        if not self._plays_changes(composition):
            return None
        key, devices = self._devices(composition, slots)
        played_s = self._moment_s(key, at_s)
        known = self._entries.get((key, devices, played_s))
        if known is None:
            seats, cluster = self._seated[key]
            turns = tuple(TURNS if device in devices else each for device, each in enumerate(seats.turns))
            seats = msgspec.structs.replace(seats, turns=turns)  # newcomers are not measured
            rngs = [np.random.default_rng(seed) for seed in range(PLAYS)]
            plays = [PlayWithEntry(seats, cluster, rng, SPREAD, devices) for rng in rngs]
            enters_s = seats.applied_s + played_s
            known = _warmed(job, plays, lambda play, start: play.through(job.microbatches, start, enters_s))
            self._entries[key, devices, played_s] = known
        return known + (at_s - played_s)

    def with_joiners(self, composition: Composition, joiners: tuple[int, ...]) -> tuple[float, ...] | None:
        if not any(joiners) or self(composition) is None:
            return None
        key = self._key(composition)
        known = self._rounds.get((key, joiners))
        if known is None:
            seats, cluster = self._seated[key]
            known = self._rounds[key, joiners] = self._exchange_s(seats, cluster, joiners)
        return known

    def _plays_changes(self, composition: Composition) -> bool:
        """In the middle of a step."""
        job = self._job
        return (
            self(composition) is not None and job.stages > 1 and job.microbatches <= LONGEST and not job.seats.staleness
        )

    def _devices(self, composition: Composition, slots: Sequence[int]) -> tuple[tuple[Place, ...], tuple[int, ...]]:
        """The key of the composition, and of what was played with it the devices on those slots."""
        key = self._key(composition)
        if self._as_planned(composition):
            return key, tuple(slots)
        devices: list[int] = []
        for slot in slots:
            device = key.index(self._place(slot, int(composition[slot])))
            devices.append(next(each for each in range(device, len(key)) if each not in devices))
        return key, tuple(devices)

    def _moment_s(self, key: tuple[Place, ...], at_s: float) -> float:
        moment_s = self._known[key].microbatches_s / MOMENTS
        return max(round(at_s / moment_s), 0) * moment_s

    def first(self, composition: Composition) -> StepTime | None:
        """Owners know no replica yet, the leader no line: turns are even, and so are shares of the round where no tensor has been sent."""
        job, later = self._job, self(composition)
        if later is None or not self._as_planned(composition) or job.microbatches > LONGEST:
            return later
        seats, cluster = self._unmeasured(), job.machines.cluster(list(range(len(composition))))
        plays = [PlayWithDetours(seats, cluster, np.random.default_rng(seed), SPREAD) for seed in range(PLAYS)]
        microbatches_s = _warmed(job, plays, lambda play, start: play.run(job.microbatches, start), warm=0)
        exchange_s = self._exchange_s(seats, cluster)
        return msgspec.structs.replace(
            later,
            microbatches_s=microbatches_s,
            averaging_s=max(exchange_s),
            compute_s=min(later.compute_s, microbatches_s),
            exchange_s=exchange_s,
        )

    def _unmeasured(self) -> Seats:
        """As planned, before anything is measured."""
        job = self._job
        seats = measured(job.seats, job, job.machines.kind_of)
        line_rates = job.seats.line_rates if job.stages == 1 else seats.line_rates
        return msgspec.structs.replace(seats, turns=(), leader=seats.seated[0], line_rates=line_rates)

    def _predicted(self, key: tuple[Place, ...], as_planned: bool) -> StepTime:
        """`as_planned`: every machine has its seat, so the plan's routes and owners hold."""
        job = self._job
        if as_planned:
            slots, seats = list(range(len(job.stage_of))), measured(job.seats, job, job.machines.kind_of)
        else:
            free = [iter(slots) for slots in self._slots_of]
            slots = [next(free[kind]) for _, _, kind in key]
            seats = seats_of(job, [kind for _, _, kind in key], tuple(stage for _, stage, _ in key))
            unseated = tuple(device for device, (moved, _, _) in enumerate(key) if moved)
            seats = msgspec.structs.replace(seats, unseated=unseated)
        seats = msgspec.structs.replace(seats, leader=seats.seated[0])  # the founder has the first seat
        cluster = job.machines.cluster(slots)
        seats, step, microbatches_s = plays_of(seats, cluster)
        self._seated[key] = seats, cluster
        composition = np.full(len(job.stage_of), -1)
        composition[slots] = seats.stage_of
        compute = self._rates.of_stages(self._rates.compute, composition, job.stages)
        rates = self._rates.of_stages(self._rates.replica, composition, job.stages)
        return StepTime(
            microbatches_s,
            step.averaging_s + job.round_s,
            step.agreeing_s,
            min(job.microbatches / float(compute.min()), microbatches_s),
            tuple(rates.tolist()),
            self._exchange_s(seats, cluster),
        )

    def _exchange_s(self, seats: Seats, cluster: Cluster, joiners: tuple[int, ...] = ()) -> tuple[float, ...]:
        ends_s = iter(averaging_ends(seats, cluster, joiners)[0])
        groups = [list(islice(ends_s, len(seats.replicas(stage)))) for stage in range(seats.stages)]
        return tuple(max(group) + seats.round_work_s + self._job.round_s for group in groups)


def plays_of(seats: Seats, cluster: Cluster) -> tuple[Seats, Step, float]:
    """A predicted step, and the seconds of its microbatches as the mean of several; and the seats with turns as far as rates are shown."""
    plays = PLAYS if len(seats.members) <= PLAYED_MOST else FEW_PLAYS
    steps = [predict(seats, cluster, np.random.default_rng(0), SPREAD)]
    shown = paced(seats, seats.line_rates, steps[0].microbatches_s)
    if shown.turns != seats.turns:
        steps.clear()
    steps += [predict(shown, cluster, np.random.default_rng(seed), SPREAD) for seed in range(len(steps), plays)]
    return shown, steps[0], fmean(step.microbatches_s for step in steps)


AnyPlay = TypeVar("AnyPlay", bound=Play)


def _warmed(job: Job, plays: Sequence[AnyPlay], through: Callable[[AnyPlay, float], float], warm: int = WARM) -> float:
    """Seconds of the microbatches of a step that `through` plays from that moment on, after some that warm the wiring up; the mean."""
    seconds = []
    for play in plays:
        start = 0.0
        for _ in range(warm):
            start = play.run(job.microbatches, start)
        seconds.append(through(play, start) - start - play.view_s)
    return fmean(seconds)
