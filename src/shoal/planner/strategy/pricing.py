"""Prices a placement: what the blocks of a stage take on the devices that serve it, and whether they fit."""

from __future__ import annotations

import math

import msgspec

from shoal import codec
from shoal.core.allreduce.layout import owned
from shoal.core.trainer.window import MOST
from shoal.planner.inputs import memory
from shoal.planner.inputs.cluster import Device
from shoal.planner.inputs.profile import BACKWARD, FORWARD
from shoal.planner.prediction.seats import Seats
from shoal.planner.prediction.step import Step, rough_s
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.problem import GRADIENT_BYTES, Problem


class Option(msgspec.Struct, frozen=True):
    """One number of stages, seated and priced."""

    cut: tuple[range, ...]
    seats: Seats
    swaps: tuple[bool, ...]  # by stage
    kept: tuple[int, ...]  # forwards whose activations a device keeps
    rough_s: float
    step: Step | None = None
    own_s: float = 0.0  # of a step with as many microbatches on their way as owners measure; 0: not compared

    @property
    def stages(self) -> int:
        return len(self.cut)


def _executors(
    problem: Problem, cut: tuple[range, ...], stage_of: tuple[int, ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which stages compute blocks again in their backward pass, and which swap, since one of their devices has too little memory."""
    devices = problem.cluster.devices
    own = [[device for device, own in zip(devices, stage_of, strict=True) if own == s] for s in range(len(cut))]
    needs = [_resident(problem, span) for span in cut]
    checkpoints = (any(memory.checkpoints(need, one) for one in group) for need, group in zip(needs, own, strict=True))
    swaps = (
        any(_lacks_resident(problem, span, one) > 0 for one in group) for span, group in zip(cut, own, strict=True)
    )
    return tuple(checkpoints), tuple(swaps)


def placed(problem: Problem, cut: tuple[range, ...], stage_of: tuple[int, ...]) -> Option:
    """Those blocks on those devices, roughly priced; -1 is left out."""
    profile, devices = problem.profile, problem.cluster.devices
    work = [profile.stage(span) for span in cut]
    checkpoints, swaps = _executors(problem, cut, stage_of)
    every = range(len(devices))
    wanted = [_in_progress(problem, stage_of, stage) for stage in range(len(cut))]
    keeps = [not (swaps[s] or checkpoints[s]) and s < len(cut) - 1 for s in range(len(cut))]
    kept = tuple(
        _kept(problem, cut[s], devices[d], wanted[s]) if s >= 0 and keeps[s] else 0 for d, s in enumerate(stage_of)
    )

    def seconds(device: int, direction: float) -> float:
        """Of one microbatch."""
        stage = stage_of[device]
        codec_s = problem.codec_s(stage, len(cut), direction == BACKWARD) if stage >= 0 else 0.0
        if problem.emulated_s:
            return problem.emulated_s * (1.0 if direction == FORWARD else 2.0) + codec_s  # executor/emulated.py
        if stage < 0:
            return 0.0
        recomputed = FORWARD * (1.0 - kept[device] / wanted[stage])
        flops = work[stage].flops
        if direction == BACKWARD:
            flops = work[stage].back_flops + recomputed * work[stage].again_flops
        if direction == BACKWARD and checkpoints[stage] and not swaps[stage]:
            flops += work[stage].block_flops
        compute_s = flops / devices[device].flops + codec_s
        if not swaps[stage]:
            return compute_s
        # One microbatch at a time: every part is loaded for it, and its gradient stored after a backward.
        moved = work[stage].parameters * (problem.work.value_bytes + (4 if direction == BACKWARD else 0))
        return max(compute_s, moved / devices[device].host_Bps)

    def updating_s(device: int) -> float:
        stage, machine = stage_of[device], devices[device]
        rate = (
            0.0
            if stage < 0 or problem.emulated_s
            else machine.host_update_rate
            if swaps[stage]
            else machine.update_rate
        )
        return work[stage].parameters / rate if rate else 0.0

    value_bytes = codec.bytes_per_value(problem.travel.averaging, 4)
    gradient_bytes = tuple(
        (problem.emulated_gradient_bytes if problem.emulated_s else stage.parameters * GRADIENT_BYTES) * value_bytes / 4
        for stage in work
    )
    seats = Seats(
        stage_of,
        tuple(seconds(d, FORWARD) for d in every),
        tuple(seconds(d, BACKWARD) for d in every),
        gradient_bytes,
        profile.boundary_bytes,
        profile.tokens_bytes,
        problem.work.microbatches,
        problem.work.inflight,
        returned_bytes=problem.returned_bytes,
        value_bytes=value_bytes,
        averaging_codec_s=max(
            problem.averaging_codec_s(nbytes, stage_of.count(stage)) for stage, nbytes in enumerate(gradient_bytes)
        ),
        updating_s=max(map(updating_s, every)),
        staleness=problem.staleness,
    )
    return Option(cut, seats, swaps, kept, rough_s(seats, problem.cluster))


def as_planned(problem: Problem, plan: Plan) -> Seats:
    """Who serves what and what that takes, by a plan made or written for the problem."""
    return option_of(problem, plan).seats


def option_of(problem: Problem, plan: Plan) -> Option:
    """A plan made or written for the problem as an option that is not played yet."""
    place = {device.name: number for number, device in enumerate(problem.cluster.devices)}
    stage_of = [-1] * len(place)
    for number, stage in enumerate(plan.stages):
        for peer in stage.peers:
            stage_of[place[peer]] = number
    cut = tuple(range(stage.first, stage.end) for stage in plan.stages)
    option = placed(problem, cut, tuple(stage_of))
    seats = option.seats
    order = seats.seated  # a plan's line_rates and routes speak of seats, Seats of devices
    if plan.line_rates:
        width = dict(zip(order, plan.line_rates, strict=True))
        line_rates = tuple(width.get(device, 0) for device in range(len(place)))
        seats = owning(problem, msgspec.structs.replace(seats, line_rates=line_rates))
    if plan.routes:
        routes = {
            order[owner]: tuple(tuple(order[seat] for seat in turns) for turns in by_stage)
            for owner, by_stage in enumerate(plan.routes)
        }
        seats = msgspec.structs.replace(seats, routes=tuple(routes.get(device, ()) for device in range(len(place))))
    return msgspec.structs.replace(option, seats=seats)


def owning(problem: Problem, seats: Seats) -> Seats:
    """With the seconds that who owns most encodes and decodes."""
    if not seats.line_rates:
        return seats
    codec_s = 0.0
    for stage, nbytes in enumerate(seats.gradient_bytes):
        group = seats.replicas(stage)
        shares = owned([seats.line_rates[device] for device in group])
        most = max(shares) / sum(shares) if shares else 0.0
        codec_s = max(codec_s, problem.averaging_codec_s(nbytes, len(group), most))
    return msgspec.structs.replace(seats, averaging_codec_s=codec_s)


def lacks_bytes(problem: Problem, span: range, device: Device) -> float:
    resident = _lacks_resident(problem, span, device)
    if resident <= 0 or not problem.swapping or device.cards > 1:
        return resident
    profile = problem.profile
    need = memory.swapping(profile.stage(span), profile.boundary_bytes, problem.work.value_bytes, problem.optimizer)
    return min(resident, memory.lacking(_keeping(problem, span, need), device))


def _lacks_resident(problem: Problem, span: range, device: Device) -> float:
    if problem.emulated_s:
        return 0.0
    return memory.lacking(_resident(problem, span), device)


def _resident(problem: Problem, span: range) -> memory.Need:
    profile = problem.profile
    need = memory.resident(profile.stage(span), profile.boundary_bytes, problem.work.value_bytes, problem.optimizer)
    return _keeping(problem, span, need)


def _in_progress(problem: Problem, stage_of: tuple[int, ...], stage: int) -> int:
    """Microbatches that can be between forward and backward at one replica of the stage."""
    members = sum(own >= 0 for own in stage_of)
    most = min((problem.work.inflight or MOST) * members, problem.work.microbatches)
    return max(1, math.ceil(most / max(1, stage_of.count(stage))))


def _kept(problem: Problem, span: range, device: Device, wanted: int) -> int:
    most = wanted if problem.kept_activations < 0 else min(wanted, problem.kept_activations)
    return memory.kept_activations(_resident(problem, span), device, most)


def _keeping(problem: Problem, span: range, need: memory.Need) -> memory.Need:
    """With what it keeps of an even share of the microbatches: who else serves that stage is not known yet."""
    stages = problem.shape.layers / len(span)
    share = min(problem.work.microbatches * stages / len(problem.cluster.devices), problem.work.microbatches)
    return msgspec.structs.replace(need, kept_bytes=problem.kept_bytes(span, share))
