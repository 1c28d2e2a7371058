"""How many microbatches each owner drives at once, where the configuration leaves that to Shoal (`run.inflight = "auto"`).

Too few leave lines and devices idle while tensors travel. Too many wait at replicas, and of more microbatches between forward and backward
a replica keeps the activations of a smaller share, so that it computes more of them again (pricing.py). A run left to itself follows
bandwidth and delay as each owner measures them (core/trainer/window.py), and knows neither.

Every second of COUNTS is played, then the neighbours of the best; of a large fleet the same stages thinned. (Climbing from one number stays
where two steps differ by chance.) What wins is played once more with all machines, and taken where its step is shorter than the run's own
choice by GAIN: that one adapts to what the plan does not know. No number is tried whose tensors would not fit the activation stores.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.seats import Seats, part_of, thinned
from shoal.planner.strategy.pricing import Option, placed
from shoal.planner.strategy.problem import Problem

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # the largest is window.py's
WITHIN = 1.3  # of the best step: so near must another placement be without any number for one to be searched for it
GAIN = 1.03  # as of planned wiring: what plays of one placement differ by
FEW = 32  # machines of a fleet on which numbers are compared

Seconds = Callable[[Seats, Cluster], float]


def is_free(problem: Problem) -> bool:
    """May it be chosen? Owners of local steps, and of one stage, pass nothing on."""
    return not problem.work.inflight and problem.local_steps == 1


def fixed(problem: Problem, count: int) -> Problem:
    return msgspec.structs.replace(problem, work=msgspec.structs.replace(problem.work, inflight=count))


def repriced(problem: Problem, option: Option, count: int) -> Option:
    """The same placement, owners and routes with so many."""
    other = placed(fixed(problem, count), option.cut, option.seats.stage_of)
    seats = msgspec.structs.replace(
        other.seats,
        line_rates=option.seats.line_rates,
        routes=option.seats.routes,
        averaging_codec_s=option.seats.averaging_codec_s,
    )
    return msgspec.structs.replace(other, seats=seats)


def best(problem: Problem, option: Option, seconds: Seconds) -> Option | None:
    """With the number that makes the shortest step; None where there is nothing to choose. `seconds`: of a played step."""
    fitting = [count for count in COUNTS if _fits(problem, option.stages, count)]
    if not is_free(problem) or option.stages == 1 or not fitting:
        return None
    options = [repriced(problem, option, count) for count in fitting]
    chosen = thinned(option.seats.stage_of, option.stages, FEW)
    few = problem.cluster.chosen(chosen)
    tried = range(0, len(options), 2)
    steps = {at: seconds(part_of(options[at].seats, chosen), few) for at in tried}
    at = min(steps, key=lambda each: (steps[each], each))
    beside = (near for near in (at - 1, at + 1) if near in range(len(options)))
    steps |= {near: seconds(part_of(options[near].seats, chosen), few) for near in beside}
    return options[min(steps, key=lambda each: (steps[each], each))]


def pays(other_s: float, own_s: float) -> bool:
    """Is a step of `other_s` so much shorter than the run's own choice that it is taken?"""
    return other_s * GAIN < own_s


def _fits(problem: Problem, stages: int, count: int) -> bool:
    """As config/derived.py warns: with less room servers answer Busy."""
    tensor_bytes = max(problem.profile.boundary_bytes, problem.returned_bytes)
    kept = min(2 * stages * count, 3 * problem.work.microbatches)
    return kept * tensor_bytes <= problem.store_limits.keep_bytes
