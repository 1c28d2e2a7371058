"""A recorded run as a forecast's inputs: its machines, its step, its churn, and what it did itself to compare with.

Each process of the run becomes a machine; one that joined takes the place of one that died. A delay is that of messages without
tensors. A line's rate is how much longer larger tensors took that were alone on it; where they took no longer, it has no limit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import fmean, median

import msgspec
import numpy as np

from shoal.core.leader.rules.removal import DOUBT_BEATS
from shoal.core.messages import Peer, Settings
from shoal.forecasting.churn import Churn, Presence
from shoal.forecasting.forecaster import Run
from shoal.forecasting.job import ENTRY_BEATS, SCAN_BEATS, Job, Patience
from shoal.forecasting.machines import Machines
from shoal.forecasting.models.step_time import StepModel
from shoal.forecasting.recorded import Recorded, Transfer
from shoal.planner.costs.arrays import Floats
from shoal.planner.inputs.cluster import Device
from shoal.planner.prediction.seats import Routing, Seats, WIDEST_Bps

LEAST_STEPS = 5  # committed: the first does not count, and a median of fewer than four says little
LEAST_ALIKE = 3  # tensors of a size on a line, for their median
SPREAD = 2  # the largest over the smallest tensor that a line carried, for its rate to show
UNLIMITED_Bps = 1.25e9  # a line that seems as wide as this limits nothing
STATE_OVER_GRADIENT = 3.0  # a parameter and two moments, of fp32, where no joiner was offered a state


class OwnRun(msgspec.Struct, frozen=True):
    """What the run did, after its first commit."""

    steps: int
    seconds: float
    step_s: float  # median
    microbatches_s: float  # medians of its parts
    averaging_s: float
    agreeing_s: float
    deaths: int
    joins: int


class Fitted(msgspec.Struct, frozen=True, eq=False):
    """`labels`: of the machines, by slot."""

    job: Job
    labels: tuple[str, ...]
    presences: tuple[Presence, ...]  # the run's own, from its first commit on
    churn: Churn
    own: OwnRun


def fitted(recorded: Recorded, commits_s: Mapping[int, float], labels: Mapping[Peer, str], tokens: int) -> Fitted:
    """`commits_s`: when each step was committed. ValueError: the record is too short, or lacks peers."""
    steps = sorted(commits_s)
    if len(steps) < LEAST_STEPS:
        raise ValueError(
            f"a run of {len(steps)} committed steps is too short a record; wanted {LEAST_STEPS} or more, of which the first does not count"
        )
    slot_of, presences = _slots(recorded, commits_s[steps[0]], commits_s[steps[-1]])
    stage_of = _stages(recorded, slot_of)
    job = _job(recorded, slot_of, stage_of, tokens)
    own = _own(recorded, commits_s, presences)
    away = [later.at_s - earlier.at_s for earlier, later in _gaps(presences)]
    machine_s = own.seconds * len(set(slot_of.values())) - sum(away)
    churn = Churn(
        life_s=machine_s / own.deaths if own.deaths else 0.0,
        away_s=fmean(away) if away else 0.0,
        start_s=0.0,
    )
    name = {slot: labels.get(peer, peer[:8]) for peer, slot in reversed(slot_of.items())}
    return Fitted(job, tuple(name[slot] for slot in sorted(name)), presences, churn, own)


def replayed(fit: Fitted, model: StepModel) -> float:
    """Seconds that the forecast takes for as many steps, with the run's own deaths and joins."""
    run = Run(fit.job, model, fit.presences, 0.0, begun=True)  # its first step does not count
    horizon_s = fit.own.seconds
    while run.progress.step < fit.own.steps and horizon_s < 100 * fit.own.seconds:
        run.play(horizon_s, steps=fit.own.steps)
        horizon_s *= 2
    return run.progress.began_s if run.progress.step >= fit.own.steps else math.inf


# -------------------------------------------------------------------------------------------------------------- machines


def _slots(recorded: Recorded, first_s: float, last_s: float) -> tuple[dict[Peer, int], tuple[Presence, ...]]:
    """Which machine each peer is, and when machines come and go, from the first commit on."""
    died = {peer: at for peer, at in recorded.last_s.items() if peer not in recorded.ended and at < last_s}
    late = {peer: recorded.asked_s[peer] for peer in recorded.peers if recorded.asked_s.get(peer, 0.0) > first_s}
    slot_of = {peer: slot for slot, peer in enumerate(peer for peer in recorded.peers if peer not in late)}
    presences = [Presence(0.0, slot, True) for slot in slot_of.values()]
    free: list[int] = []
    events = [(at, 1, peer) for peer, at in late.items()] + [(at, 0, peer) for peer, at in died.items()]
    for at, joins, peer in sorted(events):
        if joins:
            slot_of[peer] = free.pop(0) if free else len(set(slot_of.values()))
            presences.append(Presence(at - first_s, slot_of[peer], True))
        else:
            free.append(slot_of[peer])
            presences.append(Presence(max(at - first_s, 0.0), slot_of[peer], False))
    return slot_of, tuple(sorted(presences, key=lambda one: (one.at_s, not one.joins)))


def _gaps(presences: Iterable[Presence]) -> Iterable[tuple[Presence, Presence]]:
    """A machine's going, and the coming of the one in its place."""
    by_slot: dict[int, list[Presence]] = defaultdict(list)
    for one in presences:
        by_slot[one.slot].append(one)
    return [pair for own in by_slot.values() for pair in pairwise(own) if not pair[0].joins and pair[1].joins]


def _stages(recorded: Recorded, slot_of: dict[Peer, int]) -> tuple[int, ...]:
    """The stage that each machine computed most for; -1: it computed nothing."""
    hops: dict[int, Counter[int]] = defaultdict(Counter)
    for (peer, stage, _), seconds in recorded.hops_s.items():
        hops[slot_of[peer]][stage] += len(seconds)
    stages = tuple(hops[slot].most_common(1)[0][0] if hops[slot] else -1 for slot in range(len(set(slot_of.values()))))
    missing = set(range(recorded.settings.stages)) - set(stages)
    if missing:
        raise ValueError(f"no peer whose trace is here computed stage {min(missing)}; the others' traces are elsewhere")
    return stages


def _job(recorded: Recorded, slot_of: dict[Peer, int], stage_of: tuple[int, ...], tokens: int) -> Job:
    settings, slots = recorded.settings, range(len(stage_of))
    forward_s, backward_s = (_table(recorded, slot_of, stage_of, backward) for backward in (False, True))
    transfers = [(slot_of[one.source], slot_of[one.target], one) for one in recorded.transfers]
    delay_s = _delays(transfers, len(stage_of))
    up_Bps, down_Bps = _rates(transfers, len(stage_of))
    devices = tuple(Device(name=f"m{slot}", flops=1.0, up_Bps=up_Bps[slot], down_Bps=down_Bps[slot]) for slot in slots)
    machines = Machines(devices, tuple(slots), delay_s, np.full_like(delay_s, WIDEST_Bps))
    seats = _seats(recorded, stage_of, forward_s, backward_s)
    beat_s = settings.heartbeat_s
    return Job(
        machines=machines,
        stage_of=stage_of,
        forward_s=forward_s,
        backward_s=backward_s,
        seats=seats,
        state_bytes=tuple(
            recorded.state_bytes.get(stage, STATE_OVER_GRADIENT * nbytes)
            for stage, nbytes in enumerate(seats.gradient_bytes)
        ),
        tokens=tokens,
        save_every=settings.save_every,
        patience=Patience(
            beat_s,
            settings.heartbeat_timeout_s,
            (DOUBT_BEATS + SCAN_BEATS / 2) * beat_s,  # what a process leaves behind are broken connections
            settings.lost_stage_wait_s,
            ENTRY_BEATS * beat_s,
        ),
        settings=settings,
        round_s=median(recorded.rounds_s.values()) if recorded.rounds_s else 0.0,
    )


def _seats(recorded: Recorded, stage_of: tuple[int, ...], forward_s: Floats, backward_s: Floats) -> Seats:
    """Who serves what, and what that takes."""
    settings = recorded.settings
    usual = {what: median(sizes) if sizes else 0.0 for what, sizes in recorded.tensors.items()}
    gradient_bytes = tuple(recorded.gradient_bytes.get(stage, 0.0) for stage in range(settings.stages))
    served = [max(stage, 0) for stage in stage_of]
    return Seats(
        stage_of,
        tuple(float(forward_s[slot, stage]) for slot, stage in enumerate(served)),
        tuple(float(backward_s[slot, stage]) for slot, stage in enumerate(served)),
        gradient_bytes,
        usual["activation"],
        usual["tokens"],
        settings.microbatches,
        settings.inflight,
        returned_bytes=usual["gradient"],
        staleness=settings.staleness,
        routes=_routes(settings, stage_of),
        queue_limit=settings.queue_limit,
    )


def _routes(settings: Settings, stage_of: tuple[int, ...]) -> Routing:
    """The plan's, by machine, where everybody has its seat."""
    slots = range(len(stage_of))
    seated = sorted((slot for slot in slots if stage_of[slot] >= 0), key=lambda slot: (stage_of[slot], slot))
    fits = len(seated) == len(settings.seats) and [stage_of[slot] for slot in seated] == list(settings.seats)
    routes = {
        seated[owner]: tuple(tuple(seated[seat] for seat in turns) for turns in by_stage)
        for owner, by_stage in enumerate(settings.routes if fits else ())
    }
    return tuple(routes.get(slot, ()) for slot in slots) if routes else ()


def _table(recorded: Recorded, slot_of: dict[Peer, int], stage_of: tuple[int, ...], backward: bool) -> Floats:
    """Seconds of a hop by machine and stage: measured, else as the machine's own stage and the stages' medians have it."""
    measured: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (peer, stage, is_backward), seconds in recorded.hops_s.items():
        if is_backward == backward:
            measured[slot_of[peer], stage] += seconds
    own = {key: median(seconds) for key, seconds in measured.items()}
    stages = range(recorded.settings.stages)
    usual = [median([own[key] for key in own if key[1] == stage] or [0.0]) for stage in stages]
    table = np.zeros((len(stage_of), len(stages)))
    for slot, at in enumerate(stage_of):
        speed = own[slot, at] / usual[at] if at >= 0 and (slot, at) in own and usual[at] else 1.0
        for stage in stages:
            table[slot, stage] = own.get((slot, stage), usual[stage] * speed)
    return table


def _delays(transfers: list[tuple[int, int, Transfer]], slots: int) -> Floats:
    """Of messages without tensors, from row to column; of pairs that sent none, the usual one."""
    seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
    for source, target, one in transfers:
        if not one.nbytes:
            seconds[source, target].append(one.arrived_s - one.sent_s)
    usual_s = median([median(each) for each in seconds.values()] or [0.0])
    delays = np.full((slots, slots), usual_s)
    for (source, target), each in seconds.items():
        if source != target:
            delays[source, target] = median(each)
    return delays


def _rates(transfers: list[tuple[int, int, Transfer]], slots: int) -> tuple[list[float], list[float]]:
    """Bytes per second of each machine's uplink and downlink; 0: what it carried took no longer the larger it was."""
    alone = _alone(transfers)
    up, down = ([_rate([one for one in alone if one[end] == slot]) for slot in range(slots)] for end in (0, 1))
    return up, down


def _alone(transfers: list[tuple[int, int, Transfer]]) -> list[tuple[int, int, Transfer]]:
    """Tensors that shared neither end's line with another."""
    free_s: dict[tuple[int, int], float] = defaultdict(lambda: -math.inf)  # until when, by end and machine
    blocked: set[int] = set()
    last: dict[tuple[int, int], int] = {}
    ordered = sorted((each for each in transfers if each[2].nbytes), key=lambda each: each[2].sent_s)
    for number, (source, target, one) in enumerate(ordered):
        for line in ((0, source), (1, target)):
            if one.sent_s < free_s[line]:
                blocked |= {number, last[line]}
            if one.arrived_s >= free_s[line]:
                free_s[line], last[line] = one.arrived_s, number
    return [each for number, each in enumerate(ordered) if number not in blocked]


def _rate(transfers: list[tuple[int, int, Transfer]]) -> float:
    """From how much longer the larger ones took: a line through the medians by size."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for _, _, one in transfers:
        seconds[one.nbytes].append(one.arrived_s - one.sent_s)
    usual = {nbytes: (median(each), len(each)) for nbytes, each in seconds.items() if len(each) >= LEAST_ALIKE}
    if len(usual) < 2 or max(usual) < SPREAD * min(usual):
        return 0.0
    counts = np.sqrt([count for _, count in usual.values()])
    slope = float(np.polyfit(list(usual), [middle_s for middle_s, _ in usual.values()], 1, w=counts)[0])
    return 1 / slope if slope > 1 / UNLIMITED_Bps else 0.0


# --------------------------------------------------------------------------------------------------------------- the run


def _own(recorded: Recorded, commits_s: Mapping[int, float], presences: tuple[Presence, ...]) -> OwnRun:
    steps = sorted(commits_s)
    begins = {step: commits_s[step - 1] for step in steps if step - 1 in commits_s}
    parts = [
        (at.round_s - begins[step], at.reduced_s - at.round_s, commits_s[step] - at.reduced_s)
        for step, at in recorded.parts.items()
        if step in begins
    ]
    microbatches_s, averaging_s, agreeing_s = (
        (median(each) for each in zip(*parts, strict=True)) if parts else (0, 0, 0)
    )
    return OwnRun(
        steps=len(steps) - 1,
        seconds=commits_s[steps[-1]] - commits_s[steps[0]],
        step_s=median(commits_s[step] - begin_s for step, begin_s in begins.items()),
        microbatches_s=microbatches_s,
        averaging_s=averaging_s,
        agreeing_s=agreeing_s,
        deaths=sum(not one.joins for one in presences),
        joins=sum(one.joins and one.at_s > 0 for one in presences),
    )


def changed(job: Job, bandwidth: float = 1.0, delay: float = 1.0, speed: float = 1.0) -> Job:
    """The same on lines so many times as wide, links so many times as long, machines so many times as fast."""
    machines, seats = job.machines, job.seats
    kinds = tuple(
        msgspec.structs.replace(kind, up_Bps=kind.up_Bps * bandwidth, down_Bps=kind.down_Bps * bandwidth)
        for kind in machines.kinds
    )
    return msgspec.structs.replace(
        job,
        machines=msgspec.structs.replace(machines, kinds=kinds, delay_s=machines.delay_s * delay),
        forward_s=job.forward_s / speed,
        backward_s=job.backward_s / speed,
        seats=msgspec.structs.replace(
            seats,
            forward_s=tuple(seconds / speed for seconds in seats.forward_s),
            backward_s=tuple(seconds / speed for seconds in seats.backward_s),
        ),
    )
