"""Plays of single compositions, each with a death or an entry in the middle of a step: what sums are corrected by (corrected.py)."""

from __future__ import annotations

from statistics import fmean

import msgspec
import numpy as np

from shoal.core.messages import TURNS
from shoal.forecasting.crew import EVICTION_DELAYS
from shoal.forecasting.job import Job
from shoal.forecasting.models.played import PLAYS, SPREAD, WARM, plays_of
from shoal.forecasting.models.step_time import Composition, seats_of
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.averaging import averaging, averaging_ends
from shoal.planner.prediction.deaths import Death, PlayWithDeath
from shoal.planner.prediction.detours import PlayWithDetours
from shoal.planner.prediction.entries import PlayWithEntry
from shoal.planner.prediction.play import Play
from shoal.planner.prediction.seats import Seats, paced, thinned
from shoal.planner.prediction.timed import LONGEST, longest, most_machines, played

# Machines of a sample: a larger fleet is thinned to so many. Of 480 machines at 31 stages 128 have 0.92 to 0.99 of the factor that all
# have, 256 have 0.98: with four machines at a stage, rounded, fewer stages are about as thin as the thinnest
LARGEST = 256
# Or to fewer, so that what is played of a step shows its windows. 256 machines with ten microbatches each had 310 s by four and two of
# each, where 64 to 256 with all ten have 243 to 248
TIMED = 2  # steps, after WARM
STEPS = WARM + TIMED + 1  # of a sample, the last one with its change


class Change(msgspec.Struct, frozen=True, eq=False):
    """A machine that dies or begins to serve in the middle of a step."""

    composition: Composition  # with that machine
    slot: int  # its own
    enters: bool
    passed: float  # the part of the step before it
    longer_s: float  # the step, than one without that change


class Sample(msgspec.Struct, frozen=True, eq=False):
    """Steps of so many microbatches with that composition, as they are played."""

    composition: Composition
    fleet: Composition  # that it stands for: itself, or the larger one that is thinned to it
    microbatches: int
    microbatches_s: float
    averaging_s: float
    joined: float = 1.0  # times as long as without one is a stage's exchange whose sums a joiner gets, too
    change: Change | None = None  # None: there is no stage with two replicas, or a step is too long to be played whole


def sample(job: Job, composition: Composition, about_s: float, number: int) -> Sample:
    """`about_s`: what the composition's microbatches take by sums. Every second number has an entry, the others a death."""
    rng = np.random.default_rng(number)
    whole, microbatches = thin(job, composition)
    slots = np.flatnonzero(whole >= 0)
    spare = [device for device, slot in enumerate(slots) if (whole == whole[slot]).sum() > 1]
    seats, cluster = _seated(job, whole, microbatches, about_s)
    plays_change = bool(spare) and job.stages > 1 and not job.seats.staleness and microbatches <= longest(seats)
    if not plays_change:
        return Sample(
            whole, composition, microbatches, played(seats, cluster, rng, SPREAD)[0], *_averaged(seats, cluster, rng)
        )
    device, passed = spare[int(rng.integers(len(spare)))], float(rng.random())
    slot = int(slots[device])
    if not number % 2:
        play = PlayWithDeath(seats, cluster, rng, SPREAD)
        settled_s, start = _settled(play, microbatches)
        dies_s = seats.applied_s + passed * settled_s
        evicted_s = dies_s + job.patience.detection_s + EVICTION_DELAYS * job.delay_s
        ends_s = play.through(microbatches, start, Death(device, dies_s, evicted_s)) - start - play.view_s
        change = Change(whole, slot, False, passed, ends_s - settled_s)
        return Sample(whole, composition, microbatches, settled_s, *_averaged(seats, cluster, rng), change)
    turns = tuple(TURNS if each == device else known for each, known in enumerate(seats.turns))  # it is not measured
    entry = PlayWithEntry(msgspec.structs.replace(seats, turns=turns), cluster, rng, SPREAD, (device,))
    settled_s, start = _settled(entry, microbatches)
    ends_s = entry.through(microbatches, start, seats.applied_s + passed * settled_s) - start - entry.view_s
    others = whole.copy()
    others[slot] = -1
    change = Change(whole, slot, True, passed, ends_s - settled_s)
    averaged = _averaged(*_seated(job, others, microbatches, about_s), rng)
    fleet = composition if len(slots) < (composition >= 0).sum() else others
    return Sample(others, fleet, microbatches, settled_s, *averaged, change)


def planned(job: Job) -> tuple[Sample, Sample]:
    """A run's first step with all planned machines, and later ones. In the first, owners know no replica yet, and the leader no line where
    no tensor has been sent."""
    whole, microbatches = thin(job, np.array(job.stage_of))
    seats, cluster = _seated(job, whole, microbatches, 0.0)
    seats, _, later_s = plays_of(seats, cluster)
    fleet = np.array(job.stage_of)
    later = Sample(whole, fleet, microbatches, later_s, _averaging_s(seats, cluster))
    if microbatches > longest(seats):
        return later, later
    even = msgspec.structs.replace(seats, turns=())
    if job.stages == 1:
        even = msgspec.structs.replace(even, line_rates=job.seats.line_rates)
    rngs = [np.random.default_rng(number) for number in range(PLAYS if microbatches <= LONGEST else 1)]
    firsts = [PlayWithDetours(even, cluster, rng, SPREAD) for rng in rngs]
    first_s = fmean(play.run(microbatches, 0.0) - play.view_s for play in firsts)
    return Sample(whole, fleet, microbatches, first_s, _averaging_s(even, cluster)), later


def thin(job: Job, composition: Composition) -> tuple[Composition, int]:
    """With so many machines at most, and as many microbatches for each of them."""
    of_each = job.microbatches / int((composition >= 0).sum())
    kept = thinned(tuple(composition.tolist()), job.stages, min(LARGEST, most_machines(job.seats, of_each)))
    whole = np.full_like(composition, -1)
    whole[kept] = composition[kept]
    return whole, max(1, round(of_each * len(kept)))


def _seated(job: Job, composition: Composition, microbatches: int, about_s: float) -> tuple[Seats, Cluster]:
    """Machines that serve another stage than planned hold no seat; the founder has the first one."""
    slots = np.flatnonzero(composition >= 0).tolist()
    stage_of = tuple(composition[slots].tolist())
    seats = seats_of(job, [job.machines.kind_of[slot] for slot in slots], stage_of)
    unseated = tuple(at for at, slot in enumerate(slots) if stage_of[at] != job.stage_of[slot])
    seats = msgspec.structs.replace(seats, unseated=unseated, microbatches=microbatches)
    seats = msgspec.structs.replace(seats, leader=seats.seated[0])
    return paced(seats, seats.line_rates, about_s), job.machines.cluster(slots)


def _settled(play: Play, microbatches: int) -> tuple[float, float]:
    """Seconds of a step's microbatches, and when the next step begins."""
    start = 0.0
    for _ in range(WARM):
        start = play.run(microbatches, start)
    began_s = start
    for _ in range(TIMED):
        start = play.run(microbatches, start)
    return (start - began_s) / TIMED - play.view_s, start


def _averaged(seats: Seats, cluster: Cluster, rng: np.random.Generator) -> tuple[float, float]:
    """Seconds of a round, and what a joiner of one of its stages makes of that stage's exchange."""
    stage = int(rng.integers(seats.stages))
    members = sorted(seats.members, key=lambda device: (seats.stage_of[device], device))  # as averaging_ends has them
    at = [number for number, device in enumerate(members) if seats.stage_of[device] == stage]
    joiners = tuple(int(each == stage) for each in range(seats.stages))
    ends_s = [averaging_ends(seats, cluster, each)[0] for each in ((), joiners)]
    alone_s, joined_s = (max(each[number] for number in at) + seats.round_work_s for each in ends_s)
    return max(ends_s[0]) + seats.round_work_s, joined_s / alone_s if alone_s else 1.0


def _averaging_s(seats: Seats, cluster: Cluster) -> float:
    return averaging(seats, cluster)[0] + seats.round_work_s
