"""Seats devices at stages: memory first, then so that every stage passes as many microbatches; then swapped while that helps."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from shoal import units
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.inputs.profile import consecutive, spans
from shoal.planner.strategy.pricing import Option, lacks_bytes, placed
from shoal.planner.strategy.problem import Problem, stages_text

SHIFTED = 0.3  # of the moves of a search with uneven stages move a block instead of a device
GAPS = 3  # of line rate, and of speed: as many smaller fleets are tried


class Refusal(msgspec.Struct, frozen=True):
    """Why a number of stages cannot be; `lacks_bytes` of memory, infinite when it is something else."""

    text: str
    lacks_bytes: float = math.inf


def fleets(cluster: Cluster) -> list[tuple[int, ...]]:
    """All devices first; then without the narrowest lines, without the slowest devices, wherever there is a gap to leave
    out: a peer that holds everybody up in averaging can cost more than it computes."""
    devices = range(len(cluster.devices))
    widest = np.where(np.eye(len(devices), dtype=bool), 0.0, cluster.bandwidth_Bps).max(axis=1)
    line = [min(d.up_Bps or math.inf, d.down_Bps or math.inf, float(widest[i])) for i, d in enumerate(cluster.devices)]
    fleets_by_gap: list[tuple[int, ...]] = [tuple(devices)]
    for value in (line, [device.flops for device in cluster.devices]):
        levels = sorted(set(value))
        gaps = sorted(range(1, len(levels)), key=lambda k: (-levels[k] / levels[k - 1], k))[:GAPS]
        fleets_by_gap += [tuple(i for i in devices if value[i] >= levels[k]) for k in sorted(gaps)]
    return list(dict.fromkeys(fleets_by_gap))


def seated(problem: Problem, stages: int, fleet: tuple[int, ...]) -> Option | Refusal:
    """Every device of the fleet at a stage it can hold, so that all stages pass about as much; or why that cannot be."""
    blocks, devices = problem.shape.layers, problem.cluster.devices
    if not 1 <= stages <= min(blocks, len(fleet)):
        text = f"{stages_text(stages)} of a model of {blocks} blocks on {len(fleet)} devices; each needs a block and a device"
        return Refusal(text)
    cut = spans(blocks, stages)
    work = [problem.profile.stage(span) for span in cut]
    stage_of = [-1] * len(devices)
    rate = [0.0] * stages
    by_memory = sorted(fleet, key=lambda i: (-(devices[i].memory_bytes or math.inf), -devices[i].flops, i))
    hungry = sorted(range(stages), key=lambda s: (-work[s].parameters, -work[s].activation_bytes, s))
    for stage, device in zip(hungry, by_memory, strict=False):
        lacks = lacks_bytes(problem, cut[stage], devices[device])
        if lacks > 0:
            text = (
                f"{stages_text(stages)}: stage {stage} fits no device left; {devices[device].name} lacks {units.size(lacks)};"
                " more stages, devices or memory, or a smaller microbatch"
            )
            return Refusal(text + ("" if problem.swapping else ", or --swap"), lacks)
        stage_of[device], rate[stage] = stage, devices[device].flops
    _fill(problem, cut, [device for device in fleet if stage_of[device] < 0], stage_of, rate)
    if problem.uneven:
        other = _balanced(problem, cut, rate)
        if all(lacks_bytes(problem, other[s], devices[d]) <= 0 for d, s in enumerate(stage_of) if s >= 0):
            cut = other
    return placed(problem, cut, tuple(stage_of))


def _fill(problem: Problem, cut: tuple[range, ...], left: list[int], stage_of: list[int], rate: list[float]) -> None:
    """Seats the devices that are left, the fastest first, each where least FLOP/s serve the stage's work so far."""
    devices = problem.cluster.devices
    flops = [4 * problem.profile.stage(span).flops or 1.0 for span in cut]
    for device in sorted(left, key=lambda i: (-devices[i].flops, i)):
        fits = [s for s, span in enumerate(cut) if lacks_bytes(problem, span, devices[device]) <= 0]
        if fits:
            stage = min(fits, key=lambda s: (rate[s] / flops[s], s))
            stage_of[device] = stage
            rate[stage] += devices[device].flops


def improved(problem: Problem, best: Option, rng: np.random.Generator, budget: int) -> Option:
    """Devices swapped and moved between stages while the rough step gets shorter."""
    devices = problem.cluster.devices
    alike = len({(d.flops, d.memory_bytes, d.up_Bps, d.down_Bps) for d in devices}) == 1
    if alike and _uniform(problem.cluster):
        return best  # every swap is the same placement, and `seated` has balanced the counts
    for _ in range(budget):
        shifts = problem.uneven and best.stages > 1 and rng.random() < SHIFTED
        best = _shifted(problem, best, rng) if shifts else _exchanged(problem, best, rng)
    return best


def _exchanged(problem: Problem, best: Option, rng: np.random.Generator) -> Option:
    """Two devices swapped, or one moved to the stage of another, if the rough step gets shorter by that."""
    devices, stage_of = problem.cluster.devices, list(best.seats.stage_of)
    one, two = (int(i) for i in rng.choice(len(devices), size=2, replace=False))
    if stage_of[one] == stage_of[two]:
        return best
    if rng.random() < 0.7 or (stage_of[one] >= 0 and stage_of.count(stage_of[one]) == 1):
        stage_of[one], stage_of[two] = stage_of[two], stage_of[one]
    else:
        stage_of[one] = stage_of[two]  # which may be left out
    if any(stage_of[d] >= 0 and lacks_bytes(problem, best.cut[stage_of[d]], devices[d]) > 0 for d in (one, two)):
        return best
    other = placed(problem, best.cut, tuple(stage_of))
    return other if other.rough_s < best.rough_s * (1 - 1e-9) else best


def _shifted(problem: Problem, best: Option, rng: np.random.Generator) -> Option:
    """One block moved over a border between two stages, if the rough step gets shorter by that."""
    border, up = int(rng.integers(1, best.stages)), bool(rng.integers(2))
    ends = [span.stop for span in best.cut]
    ends[border - 1] += 1 if up else -1
    cut = tuple(range(first, end) for first, end in zip([0, *ends], ends, strict=False))
    devices, stage_of = problem.cluster.devices, best.seats.stage_of
    if not all(cut) or any(
        lacks_bytes(problem, cut[stage], devices[d]) > 0
        for d, stage in enumerate(stage_of)
        if stage in (border - 1, border)
    ):
        return best
    other = placed(problem, cut, stage_of)
    return other if other.rough_s < best.rough_s * (1 - 1e-9) else best


def _balanced(problem: Problem, cut: tuple[range, ...], rate: list[float]) -> tuple[range, ...]:
    """Blocks given out one by one, each to the stage that stays the quickest with it."""
    parts = problem.profile.parts
    first, block, head = parts[0].flops, parts[1].flops, parts[-1].flops
    stages = len(cut)
    counts = [1] * stages
    extra = [(first if s == 0 else 0.0) + (head if s == stages - 1 else 0.0) for s in range(stages)]
    for _ in range(problem.shape.layers - stages):
        stage = min(range(stages), key=lambda s: (((counts[s] + 1) * block + extra[s]) / rate[s], s))
        counts[stage] += 1
    return consecutive(counts)


def _uniform(cluster: Cluster) -> bool:
    off = ~np.eye(len(cluster.devices), dtype=bool)
    return all(bool((m[off] == m[off][0]).all()) for m in (cluster.delay_s, cluster.bandwidth_Bps) if off.any())
