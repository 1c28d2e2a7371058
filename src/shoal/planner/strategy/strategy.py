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

import msgspec
import numpy as np

from shoal import units
from shoal.planner.prediction import wiring
from shoal.planner.prediction.step import predict, weighted
from shoal.planner.strategy.describing import described
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.pricing import Option, as_planned, owning
from shoal.planner.strategy.problem import Problem, best_stages, stages_text
from shoal.planner.strategy.seating import Refusal, fleets, improved, seated

SIZES = (0.25, 0.5, 1, 2, 4)  # of the configured microbatch
PLAYED = 4  # numbers of stages whose step is played, the best by the rough formula
EVERY = 12  # up to so many blocks or devices every number of stages is looked at
WIRED_PEERS = 256  # more are wired stochastically: a table of routes would be as long as the run is wide
WIRED = 2  # options, the best ones, whose step is also played with planned wiring
PLANNED_GAIN = (
    1.03  # planned wiring must be so many times as fast: the stochastic one adapts to what the plan does not know
)
ALIKE = 0.05  # by so much a model's size by formula may differ from what was counted


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
    return described(problem, played, refusals)


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
    return msgspec.structs.replace(option, seats=owning(problem, weighted(option.seats, problem.cluster)))


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


def of_another_model(problem: Problem, plan: Plan) -> list[str]:
    """What shows that a plan was made for a model with as many blocks but of another size, in words."""
    return of_another_size(plan, as_planned(problem, plan).gradient_bytes)


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
