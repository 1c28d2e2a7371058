"""What a plan may choose beside places: how tensors travel, and how many steps are made between averagings. For `shoal plan`.

Both move fewer bytes and both change what is learned: a code leaves something out of every tensor, and local steps (DiLoCo, as
in ATOM's runs of whole models) average parameters that went apart. So nothing is chosen that the configuration does
not have already, unless `plan.allow` names it. What is allowed is priced by planning the whole run with it, one thing after
another: boundary tensors, then averaging, then local steps; each is taken when tokens per second grow by GAIN, and the plan
says what each would give in seconds and bytes. Left to others: the numbers themselves (strategy.py, step.py, codec.py).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal import codec
from shoal.planner.strategy.plan import Choice, Plan
from shoal.planner.strategy.problem import Problem

GAIN = 1.05  # what a lossy choice must give: less is within what the prediction is off by
LOCAL_STEPS = (2, 4, 8, 16, 32, 64)
ENOUGH = 0.95  # of the best rate: the fewest local steps that reach so much of it are taken
BACK = ("bf16", "int8")  # gradients of boundary tensors and averages have no int4 (config/sections/network.py)

Decide = Callable[[Problem], Plan]


def choose(problem: Problem, allow: tuple[str, ...], decide: Decide, peers_divide: Callable[[int], bool]) -> Plan:
    """The plan as configured, or with what is allowed and pays; every option that was priced is in `choices`.

    `peers_divide(peers)`: can a local step's batch be shared out to so many? The problem has the configured travel and local
    steps, from which each option differs in one thing."""
    compared: list[Choice] = []
    best, configured = decide(problem), problem.travel
    codes: list[str] = [how for how in ("bf16", "int8", "int4") if how in allow]
    backwards = [how for how in codes if how in BACK]
    boundary = []
    for how in codes:
        back = how if how in BACK else backwards[-1] if backwards else configured.gradients
        boundary.append(msgspec.structs.replace(configured, activations=how, gradients=back))
    problem, best = _step(problem, best, "boundary", boundary, decide, compared)
    problem, best = _step(problem, best, "averaging", _averaging(problem, codes), decide, compared)
    if "local_steps" in allow:
        travel = msgspec.structs.replace(configured, averaging=problem.travel.averaging)  # one stage has no boundaries
        local, plan = _local(msgspec.structs.replace(problem, travel=travel), best, decide, peers_divide, compared)
        if plan is not best:  # and what is left of averaging may be encoded
            problem, best = _step(local, plan, "averaging", _averaging(local, codes), decide, compared)
    return msgspec.structs.replace(best, choices=tuple(compared))


def _averaging(problem: Problem, codes: list[str]) -> list[codec.Travel]:
    return [msgspec.structs.replace(problem.travel, averaging=how) for how in codes if how in BACK]


def _step(
    problem: Problem, best: Plan, what: str, travels: list[codec.Travel], decide: Decide, compared: list[Choice]
) -> tuple[Problem, Plan]:
    """The one of these ways to travel that gives most, if it gives enough."""
    priced = [(problem, best)]
    for travel in travels:
        if travel != problem.travel:
            other = msgspec.structs.replace(problem, travel=travel)
            priced.append((other, decide(other)))
    chosen = max(priced, key=lambda entry: tokens_per_s(entry[1]))
    if tokens_per_s(chosen[1]) < GAIN * tokens_per_s(best):
        chosen = priced[0]
    if len(priced) > 1:
        compared += [_choice(what, _name(what, other.travel), plan, other is chosen[0]) for other, plan in priced]
    return chosen


def _local(
    problem: Problem, best: Plan, decide: Decide, peers_divide: Callable[[int], bool], compared: list[Choice]
) -> tuple[Problem, Plan]:
    """With the fewest local steps that bring nearly all that more of them would; the plan itself when that gives too little."""
    if problem.emulated_s or problem.local_steps > 1 or not peers_divide(len(problem.cluster.devices)):
        return problem, best
    priced = [(problem, best)]
    for steps in LOCAL_STEPS:
        work = msgspec.structs.replace(problem.work, microbatches=steps * problem.work.microbatches)
        other = msgspec.structs.replace(problem, work=work, local_steps=steps)
        try:
            plan = decide(other)
        except ValueError:  # the whole model, which every peer must hold for them, fits on none
            break
        if peers_divide(len(plan.seats)):
            priced.append((other, plan))
    most = max(tokens_per_s(plan) for _, plan in priced)
    chosen = next(entry for entry in priced if tokens_per_s(entry[1]) >= ENOUGH * most)
    if tokens_per_s(chosen[1]) < GAIN * tokens_per_s(best):
        chosen = priced[0]
    compared += [_choice("local steps", str(other.local_steps), plan, other is chosen[0]) for other, plan in priced]
    return chosen


def chosen(problem: Problem, plan: Plan) -> Problem:
    """The problem with what a plan made or read for it has chosen."""
    now, work = problem.travel, problem.work
    travel = codec.Travel(
        plan.activations or now.activations,
        plan.gradients or now.gradients,
        plan.averaging or now.averaging,
        now.narrow,
    )
    local_steps = plan.local_steps or problem.local_steps
    sequences = plan.microbatch or work.sequences
    microbatches = work.microbatches * work.sequences * local_steps // (sequences * problem.local_steps)
    inflight = work.inflight or plan.inflight  # a number that the configuration names stays
    work = msgspec.structs.replace(work, sequences=sequences, microbatches=microbatches, inflight=inflight)
    return msgspec.structs.replace(problem, travel=travel, work=work, local_steps=local_steps)


def tokens_per_s(plan: Plan) -> float:
    assert plan.predicted is not None, "a new plan has its numbers"
    return plan.predicted.tokens_per_s


def _name(what: str, travel: codec.Travel) -> str:
    return travel.averaging if what == "averaging" else f"{travel.activations} there, {travel.gradients} back"


def _choice(what: str, how: str, plan: Plan, taken: bool) -> Choice:
    assert plan.predicted is not None
    predicted = plan.predicted
    return Choice(what, how, predicted.step_s, predicted.tokens_per_s, predicted.sent_bytes, predicted.codec_s, taken)
