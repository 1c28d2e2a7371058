"""Chooses how to run: how many stages, which blocks and devices each gets, resident or swapping; and says why.

One idea joins the three papers. A peer moves V(S) = 2 T (S-1) d a + 2 (N/S) q / H bytes per step (T tokens per peer and step,
d hidden size, a and q bytes per boundary and gradient value, N parameters, H steps between averagings), which is least at
S* = sqrt(N q / (H T d a)): S = 1 is ATOM, more is SWARM or DT-FM. The search starts there and prices its neighbours, and
every number of stages a run may have when those are few, by step.py: memory first, then seconds.
Devices are seated so that every stage passes as many microbatches, then moved and swapped while that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

import msgspec
import numpy as np

from shoal import codec, units
from shoal.core.allreduce.layout import owned, row_lengths
from shoal.planner.inputs import memory
from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.inputs.profile import BACKWARD, FORWARD, Profile, Shape, Work, profile, spans
from shoal.planner.prediction import wiring
from shoal.planner.prediction.step import Seats, Step, hop_s, predict, rough_s, weighted
from shoal.planner.strategy.plan import PeerPlan, Plan, Prediction, StagePlan

SIZES = (0.25, 0.5, 1, 2, 4)  # of the configured microbatch
PLAYED = 4  # numbers of stages whose step is played, the best by the rough formula
GAPS = 3  # of line width, and of speed: as many smaller fleets are tried
EVERY = 12  # up to so many blocks or devices every number of stages is looked at
GRADIENT_BYTES = 4  # sums travel as fp32
WIRED_PEERS = 256  # more are wired stochastically: a table of routes would be as long as the run is wide
WIRED = 1  # options, the best ones, whose step is also played with planned wiring
PLANNED_GAIN = (
    1.03  # planned wiring must be so many times as fast: the stochastic one adapts to what the plan does not know
)
ALIKE = 0.05  # by so much a model's size by formula may differ from what was counted
Wiring = Literal["best", "planned", "stochastic"]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run, and on what."""

    shape: Shape
    work: Work
    cluster: Cluster
    emulated_s: float = 0.0  # a forward takes this long at every stage, whatever the model: for labs
    emulated_bytes: float = 0.0  # of a boundary tensor then
    emulated_gradient_bytes: float = 1024.0  # that every stage averages then
    wiring: Wiring = "best"
    uneven: bool = False  # stages may differ in their number of blocks by more than one
    swapping: bool = False  # a stage may be larger than its device
    travel: codec.Travel = codec.Travel()
    counted: Profile | None = (
        None  # of the model itself, with `counted_sequences` in a microbatch; else by formula from its shape
    )
    counted_sequences: int = 1
    staleness: int = 0  # train.staleness: averaging beside the next step's microbatches
    moments: str = "float32"  # train.moments
    store_limits: memory.StoreLimits = memory.StoreLimits()
    local_steps: int = 1  # between two averagings; `work` holds the microbatches of all of them

    @property
    def optimizer(self) -> memory.Optimizer:
        return memory.Optimizer(self.moments, self.staleness)

    def kept_bytes(self, span: range, microbatches: float) -> float:
        """Of one that serves so many microbatches of a stage, at most; see memory.py."""
        there_bytes, inner, last = self.profile.boundary_bytes, span.start > 0, span.stop == self.shape.layers
        return self.store_limits.kept_bytes(microbatches, inner, last, there_bytes, self.returned_bytes)

    @property
    def profile(self) -> Profile:
        """With boundary tensors as large as they are when they travel and are kept."""
        made = profile(self.shape, self.work)
        if self.counted is not None:
            made = _sized(self.counted, self.work.sequences / self.counted_sequences)
        return msgspec.structs.replace(made, boundary_bytes=self._boundary_bytes(self.travel.activations))

    @property
    def returned_bytes(self) -> float:
        """Of a boundary tensor's gradient."""
        return self._boundary_bytes(self.travel.gradients)

    @property
    def boundary_values(self) -> float:
        if self.emulated_s:
            return self.emulated_bytes / 4
        return self.work.microbatch_tokens * self.shape.hidden / self.travel.narrow

    def _boundary_bytes(self, how: str) -> float:
        return self.boundary_values * codec.bytes_per_value(how, 4 if self.emulated_s else self.work.value_bytes)

    def codec_s(self, stage: int, stages: int, backward: bool) -> float:
        """Of one hop: what comes is decoded, what goes is encoded. Nothing comes encoded to the first stage's forward."""
        values, how = self.boundary_values, self.travel
        seconds = codec.decode_s(how.activations, values) if stage else 0.0
        if not backward:
            return seconds + (codec.encode_s(how.activations, values) if stage < stages - 1 else 0.0)
        seconds += codec.decode_s(how.gradients, values) if stage < stages - 1 else 0.0
        return seconds + (codec.encode_s(how.gradients, values) if stage else 0.0)

    def averaging_codec_s(self, gradient_bytes: float, replicas: int, owned: float = 0.0) -> float:
        """Of one replica in a round: its parts, its row's if there are several, and its own sum are encoded; what it added up,
        what it left out and the whole sum are decoded. `owned`: its share of the gradient; 0: an even one."""
        if replicas < 2:
            return 0.0
        values, how = gradient_bytes / codec.bytes_per_value(self.travel.averaging, 4), self.travel.averaging
        rows = row_lengths(replicas)
        of_row = 1 / rows[0] if len(rows) > 1 else 0.0
        own = owned or 1 / replicas
        encoded, added = 1 + of_row + own, replicas * own + of_row
        return codec.encode_s(how, values * encoded) + codec.decode_s(how, values * (added + encoded + 1))


@cache
def _sized(counted: Profile, factor: float) -> Profile:
    return counted.of_size(factor)


class Option(msgspec.Struct, frozen=True):
    """One number of stages, seated and priced."""

    cut: tuple[range, ...]
    seats: Seats
    swaps: tuple[bool, ...]  # by stage
    rough_s: float
    step: Step | None = None

    @property
    def stages(self) -> int:
        return len(self.cut)


class Refusal(msgspec.Struct, frozen=True):
    """Why a number of stages cannot be; `lacks_bytes` of memory, infinite when it is something else."""

    text: str
    lacks_bytes: float = math.inf


def best_stages(problem: Problem, local_steps: int = 1) -> float:
    """S* of the formula above."""
    made, work = problem.profile, problem.work
    tokens = work.step_tokens / len(problem.cluster.devices)
    moved_bytes = local_steps * tokens * made.boundary_bytes / work.microbatch_tokens
    return math.sqrt(made.parameters * codec.bytes_per_value(problem.travel.averaging, GRADIENT_BYTES) / moved_bytes)


def decide(problem: Problem, rng: np.random.Generator, budget: int = 400, stages: int | None = None) -> Plan:
    """The plan with the shortest predicted step. `budget` placements are priced roughly for each number of stages."""
    if problem.local_steps > 1:
        if stages not in (None, 1):
            raise ValueError(
                f"{stages_text(stages or 0)}: local steps need the whole model on every peer; try --stages 1"
            )
        stages = 1
    wanted = [stages] if stages is not None else candidates(problem)
    options: list[Option] = []
    refusals: list[Refusal] = []
    for count in wanted:
        tried = [seated(problem, count, fleet) for fleet in fleets(problem.cluster)]
        possible = [found for found in tried if isinstance(found, Option)]
        if possible:
            options.append(improved(problem, min(possible, key=lambda option: option.rough_s), rng, budget))
        elif isinstance(tried[0], Refusal):
            refusals.append(tried[0])
    if not options:
        raise ValueError(min(refusals, key=lambda refusal: refusal.lacks_bytes).text)
    ranked = sorted(options, key=lambda option: (option.rough_s, option.stages))[:PLAYED]
    played = [_played(problem, _weighted(problem, option), rng) for option in ranked]
    played.sort(key=_step_s)
    played[:WIRED] = [_wired(problem, option, rng) for option in played[:WIRED]]
    played.sort(key=_step_s)
    return _plan(problem, played, refusals)


def decide_sizes(
    problem: Problem, rng: Callable[[], np.random.Generator], budget: int = 400, stages: int | None = None
) -> Plan:
    """The same with the size of microbatches free: the configured one, and halves and doubles of it that divide the step.

    A device's FLOP/s are taken to be the same at every size; where small ones are slower, a probe at that size would say so."""
    work, found = problem.work, []
    sequences = work.microbatches * work.sequences
    for size in sorted({round(work.sequences * factor) for factor in SIZES}):
        if size < 1 or sequences % size:
            continue
        changed = msgspec.structs.replace(work, sequences=size, microbatches=sequences // size)
        try:
            found.append(decide(msgspec.structs.replace(problem, work=changed), rng(), budget, stages))
        except ValueError as error:  # such as: too large a microbatch for the memory
            refused = error
    if not found:
        raise refused
    best = min(found, key=lambda plan: plan.predicted.step_s if plan.predicted else math.inf)
    others = [
        f"microbatches of {plan.microbatch}: {plan.predicted.step_s:.3g} s a step, {stages_text(len(plan.stages))}"
        for plan in found
        if plan is not best and plan.predicted is not None
    ]
    return msgspec.structs.replace(best, runners_up=(*best.runners_up, *others))


def _played(problem: Problem, option: Option, rng: np.random.Generator) -> Option:
    return msgspec.structs.replace(option, step=predict(option.seats, problem.cluster, rng))


def _step_s(option: Option) -> tuple[float, int]:
    return option.step.step_s if option.step else math.inf, option.stages


def _weighted(problem: Problem, option: Option) -> Option:
    return msgspec.structs.replace(option, seats=_owning(problem, weighted(option.seats, problem.cluster)))


def _owning(problem: Problem, seats: Seats) -> Seats:
    """With the seconds that who owns most encodes and decodes."""
    if not seats.widths:
        return seats
    codec_s = 0.0
    for stage, nbytes in enumerate(seats.gradient_bytes):
        group = seats.replicas(stage)
        shares = owned([seats.widths[device] for device in group])
        most = max(shares) / sum(shares) if shares else 0.0
        codec_s = max(codec_s, problem.averaging_codec_s(nbytes, len(group), most))
    return msgspec.structs.replace(seats, averaging_codec_s=codec_s)


def _wired(problem: Problem, option: Option, rng: np.random.Generator) -> Option:
    """With planned wiring, where that is asked for or pays."""
    if problem.wiring == "stochastic" or problem.local_steps > 1 or len(option.seats.members) > WIRED_PEERS:
        return option
    routes = wiring.planned(option.seats, problem.cluster)
    wired = [
        _played(problem, msgspec.structs.replace(option, seats=msgspec.structs.replace(option.seats, routes=ways)), rng)
        for ways in dict.fromkeys((routes, wiring.matched(option.seats, problem.cluster, routes)))
    ]
    other = min(wired, key=_step_s)
    pays = _step_s(other)[0] * PLANNED_GAIN < _step_s(option)[0]
    return other if pays or problem.wiring == "planned" else option


def candidates(problem: Problem) -> list[int]:
    """Numbers of stages worth pricing: all when there are few, else the neighbours of S* and a ladder."""
    most = min(problem.shape.layers, len(problem.cluster.devices))
    if most <= EVERY:
        return list(range(1, most + 1))
    near = round(best_stages(problem))
    ladder = {round(most ** (k / 8)) for k in range(9)}
    return sorted(s for s in ladder | set(range(near - 2, near + 3)) if 1 <= s <= most)


# --------------------------------------------------------------------------------------------------------- seating


def fleets(cluster: Cluster) -> list[tuple[int, ...]]:
    """All devices first; then without the narrowest lines, without the slowest devices, wherever there is a gap to leave
    out: a peer that holds everybody up in averaging can cost more than it computes."""
    devices = range(len(cluster.devices))
    widest = np.where(np.eye(len(devices), dtype=bool), 0.0, cluster.bandwidth_Bps).max(axis=1)
    line = [min(d.up_Bps or math.inf, d.down_Bps or math.inf, float(widest[i])) for i, d in enumerate(cluster.devices)]
    found: list[tuple[int, ...]] = [tuple(devices)]
    for value in (line, [device.flops for device in cluster.devices]):
        levels = sorted(set(value))
        gaps = sorted(range(1, len(levels)), key=lambda k: (-levels[k] / levels[k - 1], k))[:GAPS]
        found += [tuple(i for i in devices if value[i] >= levels[k]) for k in sorted(gaps)]
    return list(dict.fromkeys(found))


def seated(problem: Problem, stages: int, fleet: tuple[int, ...]) -> Option | Refusal:
    """Every device of the fleet at a stage it can hold, so that all stages pass about as much; or why that cannot be."""
    blocks, devices = problem.shape.layers, problem.cluster.devices
    if not 1 <= stages <= min(blocks, len(fleet)):
        text = f"{stages_text(stages)} of a model of {blocks} blocks on {len(fleet)} devices; each needs a block and a device"
        return Refusal(text)
    cut = spans(blocks, stages)
    work = [problem.profile.stage(span) for span in cut]
    flops = [4 * stage.flops or 1.0 for stage in work]
    stage_of = [-1] * len(devices)
    rate = [0.0] * stages
    by_memory = sorted(fleet, key=lambda i: (-(devices[i].memory_bytes or math.inf), -devices[i].flops, i))
    hungry = sorted(range(stages), key=lambda s: (-work[s].parameters, -work[s].activation_bytes, s))
    for stage, device in zip(hungry, by_memory, strict=False):
        lacks = _lacks(problem, cut[stage], devices[device])
        if lacks > 0:
            text = (
                f"{stages_text(stages)}: stage {stage} fits no device left; {devices[device].name} lacks {units.size(lacks)};"
                " more stages, devices or memory, or a smaller microbatch"
            )
            return Refusal(text + ("" if problem.swapping else ", or --swap"), lacks)
        stage_of[device], rate[stage] = stage, devices[device].flops
    left = sorted((i for i in fleet if stage_of[i] < 0), key=lambda i: (-devices[i].flops, i))
    for device in left:
        fits = [s for s in range(stages) if _lacks(problem, cut[s], devices[device]) <= 0]
        if fits:
            stage = min(fits, key=lambda s: (rate[s] / flops[s], s))
            stage_of[device] = stage
            rate[stage] += devices[device].flops
    if problem.uneven:
        other = _balanced(problem, cut, rate)
        if all(_lacks(problem, other[s], devices[d]) <= 0 for d, s in enumerate(stage_of) if s >= 0):
            cut = other
    return placed(problem, cut, tuple(stage_of))


def improved(problem: Problem, best: Option, rng: np.random.Generator, budget: int) -> Option:
    """Devices swapped and moved between stages while the rough step gets shorter."""
    devices = problem.cluster.devices
    alike = len({(d.flops, d.memory_bytes, d.up_Bps, d.down_Bps) for d in devices}) == 1
    if alike and _uniform(problem.cluster):
        return best  # every swap is the same placement, and `seated` has balanced the counts
    for _ in range(budget):
        stage_of = list(best.seats.stage_of)
        one, two = (int(i) for i in rng.choice(len(devices), size=2, replace=False))
        if stage_of[one] == stage_of[two]:
            continue
        if rng.random() < 0.7 or (stage_of[one] >= 0 and stage_of.count(stage_of[one]) == 1):
            stage_of[one], stage_of[two] = stage_of[two], stage_of[one]
        else:
            stage_of[one] = stage_of[two]  # which may be left out
        if any(stage_of[d] >= 0 and _lacks(problem, best.cut[stage_of[d]], devices[d]) > 0 for d in (one, two)):
            continue
        other = placed(problem, best.cut, tuple(stage_of))
        if other.rough_s < best.rough_s * (1 - 1e-9):
            best = other
    return best


def placed(problem: Problem, cut: tuple[range, ...], stage_of: tuple[int, ...]) -> Option:
    """Those blocks on those devices, roughly priced; -1 is left out."""
    made, devices = problem.profile, problem.cluster.devices
    work = [made.stage(span) for span in cut]
    swaps = tuple(
        any(_lacks_resident(problem, span, devices[d]) > 0 for d, own in enumerate(stage_of) if own == s)
        for s, span in enumerate(cut)
    )

    def seconds(device: int, direction: float) -> float:
        stage = stage_of[device]
        codec_s = problem.codec_s(stage, len(cut), direction == BACKWARD) if stage >= 0 else 0.0
        if problem.emulated_s:
            return problem.emulated_s * (1.0 if direction == FORWARD else 2.0) + codec_s  # executor/emulated.py
        if stage < 0:
            return 0.0
        compute_s = direction * work[stage].flops / devices[device].flops + codec_s
        if not swaps[stage]:
            return compute_s
        # One microbatch at a time: every part is loaded for it, and its gradient stored after a backward.
        moved = work[stage].parameters * (problem.work.value_bytes + (4 if direction == BACKWARD else 0))
        return max(compute_s, moved / devices[device].host_Bps)

    every = range(len(devices))
    average_ratio = codec.bytes_per_value(problem.travel.averaging, 4) / 4
    gradient_bytes = tuple(
        (problem.emulated_gradient_bytes if problem.emulated_s else stage.parameters * GRADIENT_BYTES) * average_ratio
        for stage in work
    )
    seats = Seats(
        stage_of,
        tuple(seconds(d, FORWARD) for d in every),
        tuple(seconds(d, BACKWARD) for d in every),
        gradient_bytes,
        made.boundary_bytes,
        made.tokens_bytes,
        problem.work.microbatches,
        problem.work.inflight,
        returned_bytes=problem.returned_bytes,
        averaging_codec_s=max(
            problem.averaging_codec_s(nbytes, stage_of.count(stage)) for stage, nbytes in enumerate(gradient_bytes)
        ),
        staleness=problem.staleness,
    )
    return Option(cut, seats, swaps, rough_s(seats, problem.cluster))


def as_planned(problem: Problem, plan: Plan) -> Seats:
    """Who serves what and what that takes, by a plan made or written for the problem."""
    place = {device.name: number for number, device in enumerate(problem.cluster.devices)}
    stage_of = [-1] * len(place)
    for number, stage in enumerate(plan.stages):
        for peer in stage.peers:
            stage_of[place[peer]] = number
    cut = tuple(range(stage.first, stage.end) for stage in plan.stages)
    seats = placed(problem, cut, tuple(stage_of)).seats
    order = seats.seated  # a plan's widths and routes speak of seats, Seats of devices
    if plan.widths:
        width = dict(zip(order, plan.widths, strict=True))
        widths = tuple(width.get(device, 0) for device in range(len(place)))
        seats = _owning(problem, msgspec.structs.replace(seats, widths=widths))
    if not plan.routes:
        return seats
    ways = {
        order[owner]: tuple(tuple(order[seat] for seat in turns) for turns in by_stage)
        for owner, by_stage in enumerate(plan.routes)
    }
    return msgspec.structs.replace(seats, routes=tuple(ways.get(device, ()) for device in range(len(place))))


def of_another_model(problem: Problem, plan: Plan) -> list[str]:
    """What shows that a plan was made for a model with as many blocks but of another size, in words."""
    return of_another_size(plan, as_planned(problem, plan).gradient_bytes)


def gradient_bytes(made: Profile, span: range, how: str) -> float:
    """What the replicas of these blocks average, encoded as `how`."""
    return made.stage(span).parameters * codec.bytes_per_value(how, GRADIENT_BYTES)


def of_another_size(plan: Plan, by_stage: Sequence[float]) -> list[str]:
    """By the bytes of gradients that its stages average, against those of the model at hand. Nothing for a plan written by hand,
    which need not state them."""
    found = []
    for number, (stage, here_bytes) in enumerate(zip(plan.stages, by_stage, strict=True)):
        if stage.gradient_bytes and not math.isclose(stage.gradient_bytes, here_bytes, rel_tol=ALIKE):
            found.append(
                f"stage {number} averages {units.size(stage.gradient_bytes)} of gradients in the plan, and blocks {stage.first} to"
                f" {stage.end - 1} of this model have {units.size(here_bytes)}: the plan is for another model; plan anew"
            )
    return found


def _balanced(problem: Problem, cut: tuple[range, ...], rate: list[float]) -> tuple[range, ...]:
    """Blocks given out one by one, each to the stage that stays the quickest with it."""
    made = problem.profile
    first, block, head = made.parts[0].flops, made.parts[1].flops, made.parts[-1].flops
    stages = len(cut)
    counts = [1] * stages
    extra = [(first if s == 0 else 0.0) + (head if s == stages - 1 else 0.0) for s in range(stages)]
    for _ in range(problem.shape.layers - stages):
        stage = min(range(stages), key=lambda s: (((counts[s] + 1) * block + extra[s]) / rate[s], s))
        counts[stage] += 1
    ends = [sum(counts[: s + 1]) for s in range(stages)]
    return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))


def _lacks(problem: Problem, span: range, device: Device) -> float:
    resident = _lacks_resident(problem, span, device)
    if resident <= 0 or not problem.swapping:
        return resident
    made = problem.profile
    need = memory.swapping(made.stage(span), made.boundary_bytes, problem.work.value_bytes, problem.optimizer)
    return min(resident, memory.lacking(_keeping(problem, span, need), device))


def _lacks_resident(problem: Problem, span: range, device: Device) -> float:
    if problem.emulated_s:
        return 0.0
    made = problem.profile
    need = memory.resident(made.stage(span), made.boundary_bytes, problem.work.value_bytes, problem.optimizer)
    return memory.lacking(_keeping(problem, span, need), device)


def _keeping(problem: Problem, span: range, need: memory.Need) -> memory.Need:
    """With what it keeps of an even share of the microbatches: who else serves that stage is not known yet."""
    stages = problem.shape.layers / len(span)
    share = min(problem.work.microbatches * stages / len(problem.cluster.devices), problem.work.microbatches)
    return msgspec.structs.replace(need, kept_bytes=problem.kept_bytes(span, share))


def _uniform(cluster: Cluster) -> bool:
    off = ~np.eye(len(cluster.devices), dtype=bool)
    return all(bool((m[off] == m[off][0]).all()) for m in (cluster.delay_s, cluster.bandwidth_Bps) if off.any())


# ----------------------------------------------------------------------------------------------------------- telling


def _plan(problem: Problem, played: list[Option], refusals: list[Refusal]) -> Plan:
    best, devices = played[0], problem.cluster.devices
    seats, made = best.seats, problem.profile
    stages = []
    for number, span in enumerate(best.cut):
        group = seats.replicas(number)
        what = made.stage(span), made.boundary_bytes, problem.work.value_bytes, problem.optimizer
        need = memory.swapping(*what) if best.swaps[number] else memory.resident(*what)
        rates = [1 / hop_s(seats, d) for d in group]
        kept_bytes = problem.kept_bytes(span, math.ceil(seats.microbatches * max(rates) / sum(rates)))
        need = msgspec.structs.replace(need, kept_bytes=kept_bytes)
        memory_bytes = max(memory.peak(need, devices[d]) for d in group)
        last = number == best.stages - 1
        slowest_s = max(seats.backward_s[d] + (0.0 if last else seats.forward_s[d]) for d in group)
        names = tuple(devices[d].name for d in group)
        kind = "swapping" if best.swaps[number] else "resident"
        gradient_bytes = seats.gradient_bytes[number]
        stages.append(
            StagePlan(span.start, span.stop, names, kind, memory_bytes, slowest_s, gradient_bytes, kept_bytes)
        )
    left_out = tuple(devices[d].name for d, stage in enumerate(seats.stage_of) if stage < 0)
    runners_up = tuple(
        f"{stages_text(option.stages)}: {option.step.step_s:.3g} s a step ({option.step.bottleneck})"
        for option in played[1:]
        if option.step is not None
    )
    return Plan(
        problem.shape.layers,
        tuple(stages),
        left_out,
        _reason(problem, played, refusals),
        _told(problem, best),
        runners_up,
        _peers(problem, best, tuple(stage.memory_bytes for stage in stages)),
        _seat_routes(seats),
        tuple(seats.widths[device] for device in seats.seated) if seats.widths else (),
        problem.work.sequences,
        problem.work.inflight,
        made.boundary_bytes,
        problem.travel.activations,
        problem.travel.gradients,
        problem.travel.averaging,
        problem.local_steps,
    )


def _peers(problem: Problem, option: Option, memory_bytes: tuple[float, ...]) -> tuple[PeerPlan, ...]:
    """By seat."""
    seats, step = option.seats, option.step
    assert step is not None, "only played options are told"
    return tuple(
        PeerPlan(
            problem.cluster.devices[device].name,
            seats.forward_s[device],
            seats.backward_s[device],
            step.compute_busy[device],
            step.up_busy[device],
            step.down_busy[device],
            step.sent_bytes[device],
            memory_bytes[seats.stage_of[device]],
        )
        for device in seats.seated
    )


def _seat_routes(seats: Seats) -> tuple[tuple[tuple[int, ...], ...], ...]:
    seat_of = {device: seat for seat, device in enumerate(seats.seated)}
    if not seats.routes:
        return ()
    return tuple(
        tuple(tuple(seat_of[device] for device in turns) for turns in seats.routes[owner]) for owner in seats.seated
    )


def _told(problem: Problem, option: Option) -> Prediction:
    step = option.step
    assert step is not None, "only played options are told"
    devices = problem.cluster.devices
    price = 24 * sum(devices[d].price_per_h for d, stage in enumerate(option.seats.stage_of) if stage >= 0)
    return Prediction(
        step.step_s,
        problem.work.step_tokens / step.step_s,
        step.microbatches_s,
        step.averaging_s,
        step.agreeing_s,
        max(step.sent_bytes),
        step.bottleneck,
        price,
        basis(problem),
        _codec_s(problem, option),
    )


def _codec_s(problem: Problem, option: Option) -> float:
    """Of a step, on the busiest peer's processor."""
    seats, most_s = option.seats, 0.0
    for stage in range(option.stages):
        rates = [1 / hop_s(seats, device) for device in seats.replicas(stage)]
        once_s = problem.codec_s(stage, option.stages, True)
        once_s += problem.codec_s(stage, option.stages, False) if stage < option.stages - 1 else 0.0
        most_s = max(most_s, seats.microbatches * max(rates) / sum(rates) * once_s)
    return most_s + seats.averaging_codec_s


def basis(problem: Problem) -> str:
    """Where the figures come from that all others are computed from."""
    if problem.emulated_s:
        return "seconds of an emulated model"
    devices = problem.cluster.devices
    measured = sum(device.basis.startswith("measured") for device in devices)
    speeds = (
        "measured" if measured == len(devices) else f"measured on {measured}, else stated" if measured else "stated"
    )
    return f"{problem.profile.basis}; FLOP/s {speeds}"


def likeness(option: Option) -> str:
    """Which paper's way of running this is; the four are corners of one space."""
    if option.stages == 1:
        return "whole models that swap and average: ATOM" if option.swaps[0] else "plain data parallelism"
    wired = "planned routes between stages: DT-FM" if option.seats.routes else "stages wired by measured times: SWARM"
    return wired + (", swapping inside stages as ATOM" if any(option.swaps) else "")


def stages_text(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"


def _reason(problem: Problem, played: list[Option], refusals: list[Refusal]) -> str:
    best = played[0]
    assert best.step is not None
    near = best_stages(problem)
    why = f"{stages_text(best.stages)} ({likeness(best)}): the shortest predicted step; fewest bytes are moved near S* = {near:.1f}"
    if len(played) > 1 and played[1].step is not None:
        more = played[1].step.step_s / best.step.step_s - 1
        why += f"; with {stages_text(played[1].stages)} it is {more:.0%} longer"
    if best.seats.routes:
        why += "; planned wiring: fixed routes are quicker than those chosen by measured times"
    if best.seats.widths:
        why += "; who owns what of a round follows the lines' widths, which differ"
    idle = best.seats.stage_of.count(-1)
    if idle:
        why += f"; {idle} devices are left out, as they would hold the others up or cannot hold a stage"
    if refusals:
        why += f"; not possible: {refusals[0].text}"
    return why


# ---------------------------------------------------------------------------------------------------------- what if


def sensitivities(
    problem: Problem, rng: Callable[[], np.random.Generator], budget: int = 100
) -> list[tuple[str, float, int]]:
    """What doubling each resource would give, best first: its name, the step's seconds and the stages then chosen."""
    cluster, work = problem.cluster, problem.work
    replace = msgspec.structs.replace
    changes = {
        "bandwidth x2": replace(problem, cluster=cluster.scaled(bandwidth=2)),
        "delay / 2": replace(problem, cluster=cluster.scaled(delay=0.5)),
        "memory x2": replace(problem, cluster=cluster.scaled(memory=2)),
        "peers x2": replace(problem, cluster=cluster.of_size(2 * len(cluster.devices))),
        "inflight x2": replace(problem, work=replace(work, inflight=2 * work.inflight)),
    }
    if not problem.emulated_s:
        changes["speed x2"] = replace(problem, cluster=cluster.scaled(flops=2))
    found = []
    for name, changed in changes.items():
        plan = decide(changed, rng(), budget)
        assert plan.predicted is not None
        found.append((name, plan.predicted.step_s, len(plan.stages)))
    return sorted(found, key=lambda entry: (entry[1], entry[0]))
