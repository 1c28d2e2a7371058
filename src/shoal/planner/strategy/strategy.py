"""Chooses how to run: how many stages, which blocks and devices each gets, resident or swapping; and says why.

One idea joins the three papers. A peer moves V(S) = 2 T (S-1) d a + 2 (N/S) q / H bytes per step (T tokens per peer and step,
d hidden size, a and q bytes per boundary and gradient value, N parameters, H steps between averagings), which is least at
S* = sqrt(N q / (H T d a)): S = 1 is ATOM, more is SWARM or DT-FM. The search starts there and prices its neighbours, and
every number of stages a run may have when those are few, by step.py: memory first, then seconds. How many microbatches owners drive at
once is searched for each of the best of these (inflight.py), where the configuration names no number.
Devices are seated so that every stage passes as many microbatches, then moved and swapped while that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from shoal import units
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction import wiring
from shoal.planner.prediction.seats import Seats
from shoal.planner.prediction.step import Step, predict, weighted
from shoal.planner.strategy import inflight
from shoal.planner.strategy.choices import chosen
from shoal.planner.strategy.describing import described
from shoal.planner.strategy.idle import employed
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.pricing import Option, as_planned, option_of, owning
from shoal.planner.strategy.problem import Problem, best_stages, stages_text
from shoal.planner.strategy.seating import Refusal, fleets, improved, seated

SIZES = (0.25, 0.5, 1, 2, 4)  # of the configured microbatch
PLAYED = 4  # numbers of stages whose step is played, the best by the rough formula
EVERY = 12  # up to so many blocks or devices every number of stages is looked at
WIRED_PEERS = 256  # more are wired stochastically: a table of routes would be as long as the run is wide
WIRED = 2  # options, the best ones, whose step is also played with planned wiring
# Planned wiring must be so many times as fast: the stochastic one adapts to what the plan does not know
PLANNED_GAIN = 1.03
RELAXATIONS = ("uneven", "swapping")  # fields of a problem that allow more placements
ALIKE = 0.05  # by so much a model's size by formula may differ from what was counted


def decide(
    problem: Problem,
    rng: np.random.Generator,
    budget: int = 400,
    stages: int | None = None,
    known: Plan | None = None,
) -> Plan:
    """The plan with the shortest predicted step. `budget` placements are priced roughly for each number of stages.

    `known`: a plan that can run on these machines. If it has the problem's work and codecs, the search continues from it too, and
    the result is no slower."""
    for device in problem.cluster.devices:
        if problem.work.sequences % device.cards and not problem.emulated_s:
            raise ValueError(
                f"{device.name} has {device.cards} cards, which do not divide a microbatch of {problem.work.sequences} sequences;"
                f" try train.microbatch={device.cards}"
            )
    if problem.local_steps > 1:
        if stages not in (None, 1):
            raise ValueError(
                f"{stages_text(stages or 0)}: local steps need the whole model on every peer; try --stages 1"
            )
        stages = 1
    counts = [stages] if stages is not None else candidates(problem)
    # One seed for every play: the same placement has the same predicted step, whatever was searched before.
    search = _Search(problem, int(rng.integers(1 << 32)), budget, counts, {})
    played, refusals = search.options(_begun(problem, known) if known else [])
    if not played:
        raise ValueError(min(refusals, key=lambda refusal: refusal.lacks_bytes).text)
    search = search.as_with(played[0])
    best, idle = employed(search.problem, played[0], search.completed)
    return described(search.problem, [best, *played[1:]], refusals, idle)


def _begun(problem: Problem, known: Plan) -> list[Option]:
    """The known plan, if it has the problem's work and codecs."""
    alike = chosen(problem, known)
    same = alike == problem or (inflight.is_free(problem) and inflight.fixed(alike, 0) == problem)
    return [option_of(alike, known)] if same else []


class _Search(NamedTuple):
    problem: Problem
    seed: int
    budget: int
    counts: list[int]  # numbers of stages
    known: dict[Seats, Step]  # what was played: problems that lack a relaxation find the same placements again

    def options(self, starts: list[Option]) -> tuple[list[Option], list[Refusal]]:
        """Played options, the best first, and why numbers of stages are impossible. A relaxed problem is searched from the best
        option of each problem that lacks one relaxation, and keeps that option, so relaxing never gives a slower plan."""
        problem, starts = self.problem, [*starts, *self._stricter()]
        roughly: list[Option] = []
        refusals: list[Refusal] = []
        for count in self.counts:
            tried = [seated(problem, count, fleet) for fleet in fleets(problem.cluster)]
            firsts = sorted((option for option in tried if isinstance(option, Option)), key=_rough_s)[:1]
            firsts += [start for start in starts if start.stages == count]
            rng = np.random.default_rng((self.seed, count))
            if firsts:
                bettered = (improved(self.as_with(o).problem, o, rng, self.budget) for o in firsts)
                roughly.append(min(bettered, key=_rough_s))
            elif isinstance(tried[0], Refusal):
                refusals.append(tried[0])
        roughly.sort(key=_rough_s)
        played = self._paced([self._played(_weighted(problem, option)) for option in roughly[:PLAYED]])
        played.sort(key=_step_s)
        played = sorted([*played, *self._by_compute(played[:1])], key=_step_s)
        played[:WIRED] = [self._wired(option) for option in played[:WIRED]]
        played += [start if start.step else self._played(start) for start in starts]
        best_of = {option.stages: option for option in sorted(played, key=_step_s, reverse=True)}
        return sorted(best_of.values(), key=_step_s), refusals

    def _by_compute(self, best: list[Option]) -> list[Option]:
        """As many stages, whose replicas are counted for compute alone. Where all of a step's microbatches are on their way at once,
        lines are full one way after the other, and the rough step, which has both ways at once, widens the wrong stages."""
        fleet = tuple(range(len(self.problem.cluster.devices)))
        others = (seated(self.problem, option.stages, fleet, lines=False) for option in best)
        return self._paced([self._played(_weighted(self.problem, one)) for one in others if isinstance(one, Option)])

    def _stricter(self) -> Iterator[Option]:
        """The best option of each problem that lacks one of the relaxations."""
        for flag in RELAXATIONS:
            if getattr(self.problem, flag):
                stricter = self._replace(problem=msgspec.structs.replace(self.problem, **{flag: False}))
                if options := stricter.options([])[0]:
                    stricter = stricter.as_with(options[0])
                    yield employed(stricter.problem, options[0], stricter.completed)[0]

    def as_with(self, option: Option) -> _Search:
        """With as many microbatches on their way as that option has."""
        return self._replace(problem=inflight.fixed(self.problem, option.seats.inflight))

    def completed(self, option: Option) -> Option:
        """With owners, wiring and its predicted step."""
        return self._wired(self._played(_weighted(self.problem, option)))

    def _played(self, option: Option) -> Option:
        step = self.known.get(option.seats)
        if step is None:
            step = self.known[option.seats] = predict(
                option.seats, self.problem.cluster, np.random.default_rng(self.seed)
            )
        return msgspec.structs.replace(option, step=step)

    def _paced(self, options: list[Option]) -> list[Option]:
        """Those near the best with as many microbatches on their way as pay, where that is free."""
        nearest_s = inflight.WITHIN * min((_step_s(option)[0] for option in options), default=0.0)
        return [self._with_best_number(one) if _step_s(one)[0] <= nearest_s else one for one in options]

    def _with_best_number(self, option: Option) -> Option:
        def seconds(seats: Seats, cluster: Cluster) -> float:
            return predict(seats, cluster, np.random.default_rng(self.seed), settled=1).step_s

        other = None if option.seats.inflight else inflight.best(self.problem, option, seconds)
        if other is None:
            return option
        other, own_s = self._played(other), _step_s(option)[0]
        return msgspec.structs.replace(other, own_s=own_s) if inflight.pays(_step_s(other)[0], own_s) else option

    def _wired(self, option: Option) -> Option:
        """With planned wiring, where that is asked for or pays."""
        problem, seats = self.problem, option.seats
        if problem.wiring == "stochastic" or problem.local_steps > 1 or len(seats.members) > WIRED_PEERS:
            return option
        routes = wiring.planned(seats, problem.cluster)
        wired = [
            self._played(msgspec.structs.replace(option, seats=msgspec.structs.replace(seats, routes=routing)))
            for routing in dict.fromkeys((routes, wiring.matched(seats, problem.cluster, routes)))
        ]
        other = min(wired, key=_step_s)
        pays = _step_s(other)[0] * PLANNED_GAIN < _step_s(option)[0]
        return other if pays or problem.wiring == "planned" else option


def decide_sizes(
    problem: Problem,
    rng: Callable[[], np.random.Generator],
    budget: int = 400,
    stages: int | None = None,
    known: Plan | None = None,
) -> Plan:
    """The same with the size of microbatches free: the configured one, and halves and doubles of it that divide the step.

    A device's FLOP/s are taken to be the same at every size; where small ones are slower, a probe at that size would say so."""
    work = problem.work
    plans: list[Plan] = []
    sequences = work.microbatches * work.sequences
    for size in sorted({round(work.sequences * factor) for factor in SIZES}):
        if size < 1 or sequences % size:
            continue
        changed = msgspec.structs.replace(work, sequences=size, microbatches=sequences // size)
        try:
            plans.append(decide(msgspec.structs.replace(problem, work=changed), rng(), budget, stages, known))
        except ValueError as error:  # such as: too large a microbatch for the memory
            refused = error
    if not plans:
        raise refused
    best = min(plans, key=lambda plan: plan.predicted.step_s if plan.predicted else math.inf)
    others = [
        f"microbatches of {plan.microbatch}: {plan.predicted.step_s:.3g} s a step, {stages_text(len(plan.stages))}"
        for plan in plans
        if plan is not best and plan.predicted is not None
    ]
    return msgspec.structs.replace(best, runners_up=(*best.runners_up, *others))


def _step_s(option: Option) -> tuple[float, int]:
    return option.step.step_s if option.step else math.inf, option.stages


def _rough_s(option: Option) -> tuple[float, int]:
    return option.rough_s, option.stages


def _weighted(problem: Problem, option: Option) -> Option:
    return msgspec.structs.replace(option, seats=owning(problem, weighted(option.seats, problem.cluster)))


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
    differences = []
    for number, (stage, here_bytes) in enumerate(zip(plan.stages, by_stage, strict=True)):
        if stage.gradient_bytes and not math.isclose(stage.gradient_bytes, here_bytes, rel_tol=ALIKE):
            differences.append(
                f"stage {number} averages {units.size(stage.gradient_bytes)} of gradients in the plan, and blocks {stage.first} to"
                f" {stage.end - 1} of this model have {units.size(here_bytes)}: the plan is for another model; plan anew"
            )
    return differences
