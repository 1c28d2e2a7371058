"""Writes the chosen option as a Plan: its stages, its peers, the prediction, and the reason in words."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from shoal import units
from shoal.planner.inputs import memory
from shoal.planner.prediction.seats import Seats, hop_s
from shoal.planner.strategy.idle import Idle
from shoal.planner.strategy.plan import PeerPlan, Plan, Prediction, StagePlan
from shoal.planner.strategy.pricing import Option
from shoal.planner.strategy.problem import Problem, basis, best_stages, stages_text
from shoal.planner.strategy.seating import Refusal


def described(problem: Problem, played: list[Option], refusals: list[Refusal], idle: list[Idle]) -> Plan:
    """The first of the played options as a Plan; the others are its runners-up. `idle`: the devices that it leaves out."""
    best, devices = played[0], problem.cluster.devices
    seats, profile = best.seats, problem.profile
    stages = tuple(_stage(problem, best, number) for number in range(best.stages))
    left_out = tuple(devices[d].name for d, stage in enumerate(seats.stage_of) if stage < 0)
    runners_up = tuple(
        f"{stages_text(option.stages)}: {option.step.step_s:.3g} s a step ({option.step.bottleneck})"
        for option in played[1:]
        if option.step is not None
    )
    return Plan(
        problem.shape.layers,
        stages,
        left_out,
        _reason(problem, played, refusals, idle),
        _prediction(problem, best),
        runners_up,
        _peers(problem, best, tuple(stage.memory_bytes for stage in stages)),
        _seat_routes(seats),
        tuple(seats.line_rates[device] for device in seats.seated) if seats.line_rates else (),
        problem.work.sequences,
        problem.work.inflight,
        profile.boundary_bytes,
        problem.travel.activations,
        problem.travel.gradients,
        problem.travel.averaging,
        problem.local_steps,
    )


def _stage(problem: Problem, option: Option, number: int) -> StagePlan:
    """One stage: its peers, the memory of the fullest, the seconds of the slowest."""
    seats, profile, span = option.seats, problem.profile, option.cut[number]
    devices, group = problem.cluster.devices, option.seats.replicas(number)
    what = profile.stage(span), profile.boundary_bytes, problem.work.value_bytes, problem.optimizer
    need = memory.swapping(*what) if option.swaps[number] else memory.resident(*what)
    rates = [1 / hop_s(seats, d) for d in group]
    kept_bytes = problem.kept_bytes(span, math.ceil(seats.microbatches * max(rates) / sum(rates)))
    need = msgspec.structs.replace(need, kept_bytes=kept_bytes)
    kept_activations = min((option.kept[d] for d in group if devices[d].cards == 1), default=0)
    memory_bytes = max(memory.peak(need, devices[d]) for d in group) + kept_activations * need.graph_bytes
    last = number == option.stages - 1
    slowest_s = max(seats.backward_s[d] + (0.0 if last else seats.forward_s[d]) for d in group)
    names = tuple(devices[d].name for d in group)
    kind: Literal["swapping", "resident"] = "swapping" if option.swaps[number] else "resident"
    gradient_bytes = seats.gradient_bytes[number]
    checkpointing = any(memory.checkpoints(need, devices[d]) for d in group)
    executor = span.start, span.stop, names, kind, checkpointing
    return StagePlan(*executor, memory_bytes, slowest_s, gradient_bytes, kept_bytes, kept_activations)


def _peers(problem: Problem, option: Option, memory_bytes: tuple[float, ...]) -> tuple[PeerPlan, ...]:
    """By seat."""
    seats, step = option.seats, option.step
    assert step is not None, "only played options become plans"
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
            problem.cluster.devices[device].cards,
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


def _prediction(problem: Problem, option: Option) -> Prediction:
    step = option.step
    assert step is not None, "only played options become plans"
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


def likeness(option: Option) -> str:
    """Which paper's way of running this is; the four are corners of one space."""
    if option.stages == 1:
        return "whole models that swap and average: ATOM" if option.swaps[0] else "plain data parallelism"
    wired = "planned routes between stages: DT-FM" if option.seats.routes else "stages wired by measured times: SWARM"
    return wired + (", swapping inside stages as ATOM" if any(option.swaps) else "")


def _reason(problem: Problem, played: list[Option], refusals: list[Refusal], idle: list[Idle]) -> str:
    best = played[0]
    assert best.step is not None
    near = best_stages(problem)
    why = f"{stages_text(best.stages)} ({likeness(best)}): the shortest predicted step; fewest bytes are moved near S* = {near:.1f}"
    if len(played) > 1 and played[1].step is not None:
        more = played[1].step.step_s / best.step.step_s - 1
        why += f"; with {stages_text(played[1].stages)} it is {more:.0%} longer"
    if best.seats.routes:
        why += "; planned wiring: fixed routes are quicker than those chosen by measured times"
    if best.seats.line_rates:
        why += "; who owns what of a round follows the lines' line_rates, which differ"
    if best.own_s:
        why += (
            f"; {best.seats.inflight} microbatches of each peer at once: with as many as each measures by itself a step would take"
            f" {units.duration(best.own_s)}"
        )
    for group in idle:
        why += f"; {group.text(problem)}"
    if refusals:
        why += f"; not possible: {refusals[0].text}"
    return why
