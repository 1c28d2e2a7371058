"""How long a step takes with given machines at given stages: what a model of it says, and what all models know of a job.

A model is a function of who serves what. Another way to train (GPipe, a static pipeline) is another StepModel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.core.leader.rules.lines import believed
from shoal.core.messages import Add, Apply, Cut, Fetch, Gather
from shoal.forecasting.job import Job
from shoal.planner.costs.arrays import Floats
from shoal.planner.prediction.seats import Seats, handed_bytes, line_rate, paced, request_bytes
from shoal.sim.network import LATE
from shoal.sim.tasks.pace import SECONDS

# The simulated network's delays are up to 1.2 times as long (sim/network.py): what is stated is their mean
MEAN_LATE = 1 + LATE / 2
APPLIED = SECONDS[Apply] / sum(SECONDS[kind] for kind in (Fetch, Cut, Add, Gather, Apply))  # of a round's own tasks
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
