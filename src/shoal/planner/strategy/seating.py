"""Seats devices at stages: memory first, then so that every stage passes as many microbatches; then swapped while that helps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from shoal import units
from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.inputs.profile import BACKWARD, FORWARD, consecutive, spans
from shoal.planner.prediction.seats import handed
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


def seated(problem: Problem, stages: int, fleet: tuple[int, ...], lines: bool = True) -> Option | Refusal:
    """Every device of the fleet at a stage it can hold, so that all stages pass about as much, by compute and `lines` or by compute
    alone; or why that cannot be."""
    blocks, devices = problem.shape.layers, problem.cluster.devices
    if not 1 <= stages <= min(blocks, len(fleet)):
        text = f"{stages_text(stages)} of a model of {blocks} blocks on {len(fleet)} devices; each needs a block and a device"
        return Refusal(text)
    cut = spans(blocks, stages)
    work = [problem.profile.stage(span) for span in cut]
    stage_of = [-1] * len(devices)
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
        stage_of[device] = stage
    _fill(problem, cut, [device for device in fleet if stage_of[device] < 0], stage_of, lines)
    if problem.uneven:
        other = _balanced(problem, cut, stage_of)
        cut = other if _fits(problem, other, tuple(stage_of)) else cut
    return placed(problem, cut, tuple(stage_of))


def _fill(problem: Problem, cut: tuple[range, ...], left: list[int], stage_of: list[int], lines: bool) -> None:
    """Seats the devices that are left, the fastest first, each at the stage that passes the fewest microbatches so far."""
    devices, loads = problem.cluster.devices, _loads(problem, cut, lines)
    passed = _passed(problem, loads, stage_of)
    for device in sorted(left, key=lambda i: (-devices[i].flops, i)):
        fits = [s for s, span in enumerate(cut) if lacks_bytes(problem, span, devices[device]) <= 0]
        if fits:
            stage = min(fits, key=lambda s: (passed[s], s))
            stage_of[device] = stage
            passed[stage] += loads[stage].passes(devices[device])


class _Load(NamedTuple):
    """Of one microbatch at a stage, there and back."""

    flops: float
    sent_bytes: float
    received_bytes: float

    def passes(self, device: Device) -> float:
        """Microbatches that it passes there in a second, as its compute and its line allow."""
        up_s, down_s = (
            self.sent_bytes / (device.up_Bps or math.inf),
            self.received_bytes / (device.down_Bps or math.inf),
        )
        return 1 / max(self.flops / device.flops, up_s, down_s, 1e-12)


def _loads(problem: Problem, cut: tuple[range, ...], lines: bool = True) -> list[_Load]:
    """By stage; without `lines` as if nothing travelled."""
    sent, received = handed(len(cut), problem.profile.boundary_bytes, problem.returned_bytes)
    travels = zip(sent, received, strict=True) if lines else ((0.0, 0.0) for _ in cut)
    return [_Load(_hop_flops(problem, span), *both) for span, both in zip(cut, travels, strict=True)]


def _passed(problem: Problem, loads: list[_Load], stage_of: Sequence[int]) -> list[float]:
    """Microbatches that each stage passes in a second, roughly."""
    passed = [0.0] * len(loads)
    for stage, device in zip(stage_of, problem.cluster.devices, strict=True):
        if stage >= 0:
            passed[stage] += loads[stage].passes(device)
    return passed


def _hop_flops(problem: Problem, span: range) -> float:
    """Of one microbatch at the stage of these blocks, as far as that is known before devices are seated."""
    stage = problem.profile.stage(span)
    if problem.emulated_s:
        return BACKWARD - FORWARD if stage.last else BACKWARD
    return stage.hop_flops(kept=problem.kept_activations != 0)


def improved(problem: Problem, best: Option, rng: np.random.Generator, budget: int) -> Option:
    """Devices swapped and moved between stages while the rough step gets shorter."""
    devices = problem.cluster.devices
    alike = len({(d.flops, d.memory_bytes, d.up_Bps, d.down_Bps) for d in devices}) == 1
    if alike and _uniform(problem.cluster):
        return _recounted(problem, best, budget)
    for _ in range(budget):
        shifts = problem.uneven and best.stages > 1 and rng.random() < SHIFTED
        cut, stage_of = best.cut, best.seats.stage_of
        if shifts:
            cut = _shifted(cut, int(rng.integers(1, best.stages)), bool(rng.integers(2)))
        else:
            stage_of = _exchanged(stage_of, rng)
        if (cut, stage_of) != (best.cut, best.seats.stage_of) and _fits(problem, cut, stage_of):
            other = placed(problem, cut, stage_of)
            best = other if _quicker(other, best) else best
    return best


def _recounted(problem: Problem, best: Option, budget: int) -> Option:
    """Of devices that are all alike only how many a stage has matters, and where the borders are. `seated` has balanced them by
    FLOPs; what a stage takes depends on what it keeps, too, which needs the numbers."""
    tried = 0
    while True:
        for other in _neighbours(problem, best):
            tried += 1
            if tried > budget:
                return best
            if _quicker(other, best):
                best = other
                break
        else:
            return best


def _neighbours(problem: Problem, best: Option) -> Iterator[Option]:
    """With one device more at a slow stage and one less at a quick one; with one block moved over a border; with both."""
    seats = best.seats
    groups = [seats.replicas(stage) for stage in range(best.stages)]
    passed = _passed(problem, _loads(problem, best.cut), seats.stage_of)
    by_rate = sorted(range(best.stages), key=lambda stage: (passed[stage], stage))
    served = [
        tuple(slow if device == groups[quick][-1] else stage for device, stage in enumerate(seats.stage_of))
        for slow, quick in itertools.product(by_rate, reversed(by_rate))
        if slow != quick and len(groups[quick]) > 1
    ]
    borders = itertools.product(range(1, best.stages), (True, False)) if problem.uneven else ()
    cuts = [_shifted(best.cut, border, up) for border, up in borders]
    for cut, stage_of in itertools.chain(
        itertools.product([best.cut], served),
        itertools.product(cuts, [seats.stage_of]),
        itertools.product(cuts, served),
    ):
        if _fits(problem, cut, stage_of):
            yield placed(problem, cut, stage_of)


def _exchanged(stage_of: tuple[int, ...], rng: np.random.Generator) -> tuple[int, ...]:
    """Two devices swapped, or one moved to the stage of another, which may be left out."""
    other = list(stage_of)
    one, two = (int(i) for i in rng.choice(len(other), size=2, replace=False))
    if other[one] == other[two]:
        return stage_of
    if rng.random() < 0.7 or (other[one] >= 0 and other.count(other[one]) == 1):
        other[one], other[two] = other[two], other[one]
    else:
        other[one] = other[two]
    return tuple(other)


def _shifted(cut: tuple[range, ...], border: int, up: bool) -> tuple[range, ...]:
    """One block moved over the border between two stages, of which one may have none left."""
    sizes, moved = [len(span) for span in cut], 1 if up else -1
    return consecutive([*sizes[: border - 1], sizes[border - 1] + moved, sizes[border] - moved, *sizes[border + 1 :]])


def _fits(problem: Problem, cut: tuple[range, ...], stage_of: tuple[int, ...]) -> bool:
    """Whether every stage has a block, and every device memory for its stage."""
    devices = problem.cluster.devices
    return all(cut) and all(lacks_bytes(problem, cut[s], devices[d]) <= 0 for d, s in enumerate(stage_of) if s >= 0)


def _quicker(other: Option, best: Option) -> bool:
    return other.rough_s < best.rough_s * (1 - 1e-9)


def _balanced(problem: Problem, cut: tuple[range, ...], stage_of: list[int]) -> tuple[range, ...]:
    """Blocks given out one by one, each to the stage that stays the quickest with it."""
    blocks, stages = problem.shape.layers, len(cut)
    counts = [1] * stages
    flops = [
        sum(d.flops for d, s in zip(problem.cluster.devices, stage_of, strict=True) if s == own)
        for own in range(stages)
    ]

    def seconds(stage: int, count: int) -> float:
        first = 0 if stage == 0 else blocks - count if stage == stages - 1 else 1
        return _hop_flops(problem, range(first, first + count)) / flops[stage]

    for _ in range(blocks - stages):
        stage = min(range(stages), key=lambda s: (seconds(s, counts[s] + 1), s))
        counts[stage] += 1
    return consecutive(counts)


def _uniform(cluster: Cluster) -> bool:
    off = ~np.eye(len(cluster.devices), dtype=bool)
    return all(bool((m[off] == m[off][0]).all()) for m in (cluster.delay_s, cluster.bandwidth_Bps) if off.any())
