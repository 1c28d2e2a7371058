"""How long a step takes with given machines at given stages, for thousands of compositions: the step-time models of a forecast.

A model is a function of who serves what. `Played` is the planner's own prediction, which plays the step (planner/prediction). `Aggregated`
computes it in arrays: a replica passes as many microbatches per second as its compute, uplink and downlink allow, a stage the sum of its
replicas' (each gets the share that fills it, which is the max-min fair one), the pipeline what its thinnest stage does or what its owners
can have on their way; its two factors are what playing gives over it, of the planned fleet and of half of it: with more replicas that many
owners ask, each for few microbatches, shares are less even, and a factor of a smaller fleet says too little of a larger one.

Another way to train (GPipe, a static pipeline) is another StepModel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from statistics import fmean
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.core.allreduce.layout import row_lengths
from shoal.core.leader.rules.lines import believed
from shoal.core.messages import TURNS, Add, Apply, Cut, Fetch, Gather
from shoal.forecasting.job import Job
from shoal.planner.costs.arrays import Floats
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.averaging import averaging, averaging_ends
from shoal.planner.prediction.deaths import Death, PlayWithDeath
from shoal.planner.prediction.entries import PlayWithEntry
from shoal.planner.prediction.play import LONGEST, Play
from shoal.planner.prediction.seats import Seats, handed_bytes, line_rate, paced, request_bytes, thinned
from shoal.planner.prediction.step import Step, predict
from shoal.sim.network import LATE
from shoal.sim.tasks.pace import SECONDS

PLAYED_MOST = 32  # machines of a fleet whose steps are all played
FITTED_MOST = 128  # machines of a fleet that sums are compared with; a larger one is thinned to so many
FEW = 0.5  # of the planned machines: the smaller fleet that they are compared with
# Of each composition: single plays differ by 3 % in who is asked first, and their mean from every message by 1 %
PLAYS = 3
WARM = 3  # steps before one in which a machine dies
# Into as many moments a step is cut for deaths, and so many seconds is the time until it is noticed apart: what is between two is the same
MOMENTS, NOTICED_S = 16, 0.1
FEW_PLAYS = 2  # of larger fleets, for which one takes seconds
# The simulated network's delays are up to 1.2 times as long (sim/network.py): what is stated is their mean
MEAN_LATE = 1 + LATE / 2
APPLIED = SECONDS[Apply] / sum(SECONDS[kind] for kind in (Fetch, Cut, Add, Gather, Apply))  # of a round's own tasks
SPREAD = (MEAN_LATE - 1) / MEAN_LATE  # around that mean; without it machines that are all alike are played in lockstep
Composition = npt.NDArray[np.int64]  # by slot: the stage that its machine serves, -1: none


class StepTime(msgspec.Struct, frozen=True):
    """Of one step with one composition."""

    microbatches_s: float
    averaging_s: float
    agreeing_s: float
    compute_s: float  # of microbatches_s: what the busiest stage computes; the rest is the network's
    stage_rates: tuple[float, ...]  # microbatches per second that each stage could pass
    # Of averaging_s, by stage, until all its replicas have all sums, and have applied them; (): all of it
    exchange_s: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        return self.microbatches_s + self.averaging_s + self.agreeing_s


class StepModel(Protocol):
    """What a model does not say is None."""

    def __call__(self, composition: Composition) -> StepTime | None:
        """None: a stage has nobody."""
        ...

    def first(self, composition: Composition) -> StepTime | None:
        """Of a run's first step, before anything is measured."""
        return self(composition)

    def with_death(
        self, composition: Composition, slot: int, at_s: float, evicted_s: float, first: bool = False
    ) -> float | None:
        """Seconds of the microbatches of a step, or of a run's first, in which the machine on that slot, one of the composition's, dies and
        is evicted so long after it has begun."""
        return None

    def with_entry(self, composition: Composition, slots: Sequence[int], at_s: float) -> float | None:
        """The same of one in which the machines on these slots of the composition begin to serve so long after it has begun."""
        return None

    def with_joiners(self, composition: Composition, joiners: tuple[int, ...]) -> tuple[float, ...] | None:
        """`exchange_s` of a round whose sums so many joiners of each stage get, too; None without any."""
        return None


class Rates:
    """What single replicas can do, by kind and stage: microbatches per second by compute alone, and with their lines."""

    def __init__(self, job: Job) -> None:
        seats, machines = job.seats, job.machines
        self.kind_of = np.array(machines.kind_of)
        handed_on, handed = (np.array(each) for each in handed_bytes(seats))
        requests = np.array(request_bytes(seats))
        up_Bps, down_Bps = (
            np.array([[getattr(device, name) or math.inf] for device in machines.kinds])
            for name in ("up_Bps", "down_Bps")
        )
        self.compute = 1.0 / job.hop_s
        self.line_s = np.maximum(handed_on[None, :] / up_Bps, (handed + requests)[None, :] / down_Bps)
        self.replica = 1.0 / np.maximum(job.hop_s, self.line_s)
        self.line_Bps = np.minimum(up_Bps, down_Bps)[:, 0]

    def of_stages(self, table: Floats, composition: Composition, stages: int) -> Floats:
        """The sums of `table` over each stage's replicas."""
        slots = np.flatnonzero(composition >= 0)
        at = composition[slots]
        return np.bincount(at, table[self.kind_of[slots], at], minlength=stages).astype(np.float64)


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
        plays = [Play(seats, cluster, np.random.default_rng(seed), SPREAD) for seed in range(PLAYS)]
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
        seats, step, microbatches_s = _plays(seats, cluster)
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


def _plays(seats: Seats, cluster: Cluster) -> tuple[Seats, Step, float]:
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


def trip_s(job: Job) -> float:
    """One microbatch through all stages and back, where nothing waits: planned replicas, usual lines and delays."""
    rates, kind_of, seats = Rates(job), np.array(job.machines.kind_of), job.seats
    members = seats.members
    compute_s = sum(float(job.hop_s[kind_of[seats.replicas(stage)], stage].mean()) for stage in range(job.stages))
    if job.stages == 1 and not seats.routes:  # owners serve themselves
        return compute_s
    moved_bytes = sum(request_bytes(seats)) + (seats.stages - 1) * (seats.boundary_bytes + seats.back_bytes)
    line_s = float(np.mean(1.0 / rates.line_Bps[kind_of[members]]))
    return compute_s + 2 * (2 * job.stages - 1) * job.delay_s + moved_bytes * line_s


def seats_of(job: Job, kinds: list[int], stage_of: tuple[int, ...]) -> Seats:
    """Devices of these kinds at these stages, wired as they run without a plan's routes."""
    at = list(zip(kinds, (max(stage, 0) for stage in stage_of), strict=True))
    seats = msgspec.structs.replace(
        job.seats,
        stage_of=stage_of,
        forward_s=tuple(float(job.forward_s[one]) for one in at),
        backward_s=tuple(float(job.backward_s[one]) for one in at),
        routes=(),
        line_rates=(),
    )
    return measured(seats, job, kinds)


def measured(seats: Seats, job: Job, kinds: Sequence[int]) -> Seats:
    """With shares of a round by the lines of these kinds, as the leader measures and believes them where no plan states them: even
    shares would take up to half as long again as a run does."""
    rates = seats.line_rates
    if not rates:
        members, lines = seats.members, [line_rate(job.machines.kinds[kind]) for kind in kinds]
        known = dict(zip(members, believed([lines[device] for device in members]), strict=True))
        rates = tuple(known.get(device, 0) for device in range(len(kinds)))
    applied_s = APPLIED * job.round_s + seats.updating_s
    return paced(msgspec.structs.replace(seats, line_rates=rates, applied_s=applied_s), rates)


class Aggregated(StepModel):
    """By sums over stages; see above."""

    def __init__(self, job: Job) -> None:
        self._job, self._rates = job, Rates(job)
        seats = job.seats
        self._messages_s = np.maximum(job.machines.delay_s, job.machines.delay_s.T)
        self._moved_bytes = sum(request_bytes(seats)) + (seats.stages - 1) * (seats.boundary_bytes + seats.back_bytes)
        self._planned = sum(stage >= 0 for stage in job.stage_of)
        # Of microbatches and of averaging, with FEW of the planned machines and with all of them
        self.factors = ((1.0, 1.0), (1.0, 1.0))
        self.factors = self._fitted()

    def __call__(self, composition: Composition) -> StepTime | None:
        job, rates = self._job, self._rates
        stage_rates = rates.of_stages(rates.replica, composition, job.stages)
        if not stage_rates.min() > 0:
            return None
        return self._step(composition, job.microbatches, stage_rates)

    def _step(self, composition: Composition, microbatches: int, stage_rates: Floats) -> StepTime:
        job, rates = self._job, self._rates
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
        few, all_ = self.factors
        more = min(max((counts.sum() / self._planned - FEW) / (1 - FEW), 0.0), 1.0)
        of_microbatches, of_averaging = (float(low + more * (high - low)) for low, high in zip(few, all_, strict=True))
        microbatches_s *= of_microbatches
        return StepTime(
            microbatches_s,
            self._averaging_s(composition) * of_averaging + job.round_s,
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
        job, worst_s = self._job, 0.0
        for stage, nbytes in enumerate(job.seats.gradient_bytes):
            kinds = self._rates.kind_of[composition == stage]
            if len(kinds) < 2:
                continue
            present = np.unique(kinds)
            links_Bps = job.machines.bandwidth_Bps[np.ix_(present, present)]
            # 0: the only machine of its kind has no link to another of it
            pair_Bps = float(links_Bps[links_Bps > 0].min())
            delay_s = float(job.machines.delay_s[np.ix_(present, present)].max())
            line_Bps = float(self._rates.line_Bps[present].min())
            rows = row_lengths(len(kinds))
            held, seconds = nbytes, 0.0
            for among in (rows[0], len(rows)) if len(rows) > 1 else rows:
                seconds += max(held / among / pair_Bps, held * (1 - 1 / among) / line_Bps) + delay_s
                held /= among
            worst_s = max(worst_s, 2 * seconds)
        return worst_s + job.seats.round_work_s

    def _fitted(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """What playing gives over the sums, for half of the planned fleet and for all of it, or for a fleet of the same stages and
        shares of kinds that is small enough to play."""
        job = self._job
        slots = thinned(job.stage_of, job.stages, FITTED_MOST)
        microbatches = max(1, round(job.microbatches * len(slots) / self._planned))
        few = thinned(job.stage_of, job.stages, round(FEW * len(slots)))
        return self._over(few, microbatches), self._over(slots, microbatches)

    def _over(self, slots: list[int], microbatches: int) -> tuple[float, float]:
        """Of the machines on these slots, which share so many microbatches."""
        job = self._job
        kinds = [job.machines.kind_of[slot] for slot in slots]
        seats = msgspec.structs.replace(
            seats_of(job, kinds, tuple(job.stage_of[slot] for slot in slots)), microbatches=microbatches, leader=0
        )
        machines = job.machines.cluster(slots)
        _, _, microbatches_s = _plays(seats, machines)
        composition = np.full(len(job.stage_of), -1)
        composition[slots] = seats.stage_of
        stage_rates = self._rates.of_stages(self._rates.replica, composition, job.stages)
        rough = self._step(composition, microbatches, stage_rates)
        averaging_s = averaging(seats, machines)[0] + seats.round_work_s
        return (
            microbatches_s / rough.microbatches_s,
            averaging_s / rough_s if (rough_s := rough.averaging_s - job.round_s) > 0 else 1.0,
        )


class Delayed(StepModel):
    """A model's steps with delayed updates: a step's round runs beside the next step's microbatches, on the same lines."""

    def __init__(self, job: Job, model: Aggregated) -> None:
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


def model_of(job: Job, changes: int) -> StepModel:
    """`changes`: how many compositions the whole forecast may ask for. Few of a small fleet are played."""
    if len(job.stage_of) <= PLAYED_MOST and changes <= PLAYS_MOST:
        return Played(job)
    return Delayed(job, Aggregated(job)) if job.seats.staleness else Aggregated(job)


PLAYS_MOST = 300  # a composition takes 0.1 to 1 s
