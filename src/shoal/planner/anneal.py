"""Our search for a placement: swaps of two devices, taken or refused by annealing on the true cost.

dtfm.py's local search never looks at the cost it serves; its population collapses; and both stall where many placements
cost the same. Here every candidate is priced along a path that anneals with the placement (swaps.py, compiled), chains start from
the best of greedy.py's rules and at random, and a second term, small and fading, prefers on a plateau what is
about to become cheaper: mean instead of largest exchange, mean instead of largest hop.

What counts as an evaluation: as many matchings as pricing one placement takes from scratch, S (S - 1) / 2, which is what the
published algorithm pays for each of its children. A swap changes at most four hops of the path, so that on eight stages
an evaluation pays for seven candidates or more. Candidates refused by a bound alone are not counted (as the gains inside the
published algorithm's local search are not), but there are at most PROPOSALS of them for each evaluation of the budget. What a
chain ends with is priced with its best path.
"""

from __future__ import annotations

import math

import numpy as np

from shoal.planner.cost import Ints, Model
from shoal.planner.greedy import starts
from shoal.planner.search import Best, Found, exhaustive, random_placement

EXHAUSTIVE_MOST = 2000  # placements up to which all are priced
PROPOSALS = 200  # candidates per evaluation of the budget
AT_ONCE = 64  # candidates between two looks at the clock of the annealing
WARM, COLD = 2e-2, 1e-4  # temperature at the start and the end, of the start's cost: tuned on networks 101 to 104
GUIDE, GUIDE_END = 2.0, 0.02  # weight of the second term at the start and the end
CHAIN = 5  # evaluations of a chain per pair of devices, either way: more gain little, and new starts more
POLISH = 0.1  # of the budget: the last chain is cool and starts from the best


def anneal(model: Model, rng: np.random.Generator, budget: int) -> Found:
    """The best placement within `budget` evaluations; fewer when it is proven that none is better."""
    if model.stages == 1 or _count(model) <= min(EXHAUSTIVE_MOST, budget):
        return exhaustive(model)
    best = Best(model)
    for groups in starts(model)[:budget]:
        best.see(groups, model.cost(groups).total_s)
    rule = best.groups
    chains = max(2, round(budget / (CHAIN * model.devices**2)))
    for number in range(chains):  # the second from the rule's placement, the others from anywhere
        until = round(budget * (1 - POLISH) * (number + 1) / chains)
        start = rule if number == 1 else random_placement(model, rng)
        _chain(model, rng, best, start, until, WARM)
    _chain(model, rng, best, best.groups, budget, WARM / 10)
    return best.found()


def _chain(
    model: Model, rng: np.random.Generator, best: Best, groups: Ints, until: int, warm: float
) -> None:  # six values that belong to one chain and are read once
    from shoal.planner import swaps  # numba: half a second that only searches pay

    first = best.evaluations + 2  # its start and its end are priced from scratch
    budget = until - first
    if best.proven or budget <= model.stages:
        return
    state = swaps.chain(model.share, model.hop, groups, np.array(model.cost(groups).order))
    scale_s, proposed = float(state.told[0]), 0
    whole = model.stages * (model.stages - 1) / 2  # matchings of an evaluation
    state.told[2] = budget * whole
    lead_s = np.inf
    while True:
        done = max((state.told[1] + swaps.CHANGED) / state.told[2], proposed / (PROPOSALS * budget))
        if done > 1 or best.proven:
            break
        heat_s = scale_s * warm * (COLD / warm) ** done
        guide = GUIDE * (GUIDE_END / GUIDE) ** done
        swaps.advance(model.share, model.hop, state, rng.random((AT_ONCE, swaps.DRAWS)), heat_s, guide)
        proposed += AT_ONCE
        best.evaluations = first + math.ceil(state.told[1] / whole)
        if state.told[0] < min(lead_s, best.total_s):
            lead_s = float(state.told[0])
            best.see(state.best_groups, lead_s, 0)
    if lead_s < np.inf:
        best.see(state.best_groups, model.cost(state.best_groups).total_s, 0)  # along its best path it may cost less


def _count(model: Model) -> float:
    """How many placements there are."""
    count = 1.0
    for stage in range(model.stages):
        for device in range(model.size):
            count *= (model.devices - stage * model.size - device) / (device + 1)
        count /= stage + 1
    return count
