"""Our search for a placement: swaps of two devices, taken or refused by annealing on the true cost.

dtfm.py's local search never looks at the cost it serves; its population collapses; and both stall where many placements
cost the same. Here every candidate is priced along a path that anneals with the placement (swaps.py, compiled), and a second
term, small and fading, prefers on a plateau what is about to become cheaper: mean instead of largest exchange, mean instead
of largest hop.

A chain hardly ever changes what is coarse about a placement, which regions its blocks of stages are of, so that is chosen
first: of many placements in blocks (blocks.py) and greedy.py's rules the best begin chains, and after a part of their way
those with the best placements go on. Why not parallel tempering, or hotter and longer chains:
docs/log/2026-11-22-placements-of-64-devices.md.

What counts as an evaluation: as many matchings as pricing one placement takes from scratch, S (S - 1) / 2, which is what the
published algorithm pays for each of its children. A swap changes at most four hops of the path, so that on eight stages
an evaluation pays for seven candidates or more. Candidates refused by a bound alone are not counted (as the gains inside the
published algorithm's local search are not), but there are at most PROPOSALS of them for each evaluation of the budget. What a
chain ends with is priced with its best path.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shoal.planner.costs.arrays import Ints
from shoal.planner.costs.communication import Cost, Model
from shoal.planner.search import blocks
from shoal.planner.search.greedy import starts
from shoal.planner.search.placements import Best, Found, exhaustive

if TYPE_CHECKING:
    from shoal.planner.search.swaps import Chain

EXHAUSTIVE_MOST = 2000  # placements up to which all are priced
PROPOSALS = 200  # candidates per evaluation of the budget
AT_ONCE = 256  # candidates between two looks at the clock of the annealing
# Tuned on networks 101 to 106 of benchmarks/schedulers.py, which measures on others:
DRAWN, DRAWN_MOST = 0.07, 1000  # of the budget prices placements in blocks, and so many at most
CHAINS, KEPT = 6, 2  # that begin, and that go on
BEGUN = 0.4  # of a chain's way, until it is told which go on
LEAST = 20  # evaluations per chain that begins; with fewer there are fewer
# Temperature at the start and the end, of the best start's cost; few stages of many start warmer
WARM, COLD = 6e-3, 1.5e-4
COOLING = 3.0  # a chain's last proposals make e^-3 as many matchings as its first
GUIDE, GUIDE_END = 1.0, 0.02  # weight of the second term at the start and the end


class Stretch(NamedTuple):
    """Part of a chain's way from warm (0) to cold (1), and what it may take."""

    since: float
    until: float
    evaluations: int
    proposals: float
    scale_s: float  # what temperatures are parts of


def anneal(model: Model, rng: np.random.Generator, budget: int) -> Found:
    """The best placement within `budget` evaluations; fewer when it is proven that none is better."""
    if model.stages == 1 or _count(model) <= min(EXHAUSTIVE_MOST, budget):
        return exhaustive(model)
    best = Best(model)
    chains = _begun(model, rng, best, budget)
    scale_s = best.total_s
    proposals = PROPOSALS * (budget - best.evaluations) / (len(chains) * BEGUN + KEPT * (1 - BEGUN))  # of a whole way
    begun = len(chains) * _spent(BEGUN)
    until = best.evaluations + round((budget - best.evaluations) * begun / (begun + KEPT * (1 - _spent(BEGUN))))
    for number, chain in enumerate(chains):
        allowed = (until - best.evaluations) // (len(chains) - number)
        _advance(model, rng, best, chain, Stretch(0.0, BEGUN, allowed, proposals * BEGUN, scale_s))
    chains = sorted(chains, key=lambda chain: _guided_s(chain, BEGUN))[:KEPT]
    for number, chain in enumerate(chains):
        allowed = (budget - best.evaluations) // (len(chains) - number)
        _advance(model, rng, best, chain, Stretch(BEGUN, 1.0, allowed, proposals * (1 - BEGUN), scale_s))
    return best.found()


def _begun(model: Model, rng: np.random.Generator, best: Best, budget: int) -> list[Chain]:
    """Chains from the cheapest rules and draws: half from the cheapest of all, half from those of other divisions into blocks."""
    from shoal.planner.search import swaps  # numba: half a second that only searches pay

    rules = [((), groups) for groups in starts(model)[:budget]]
    drawn = (blocks.draw(model, rng) for _ in range(min(DRAWN_MOST, int(DRAWN * budget))))
    priced: list[tuple[Cost, tuple[int, ...], Ints]] = []
    for lengths, groups in itertools.chain(rules, drawn):
        cost = model.cost(groups)
        best.see(groups, cost.total_s)
        priced.append((cost, lengths, groups))
        if best.proven:
            return []
    priced.sort(key=lambda each: each[0].total_s)
    many = min(CHAINS, (budget - best.evaluations) // LEAST)
    chosen = priced[: (many + 1) // 2]
    for each in priced:
        if len(chosen) < many and all(each[1] != lengths for _, lengths, _ in chosen):
            chosen.append(each)
    begun = [swaps.chain(model.share, model.hop, groups, np.array(cost.order)) for cost, _, groups in chosen]
    best.evaluations += math.ceil(sum(chain.tally[1] for chain in begun) / _whole(model))
    return begun


def _advance(model: Model, rng: np.random.Generator, best: Best, chain: Chain, stretch: Stretch) -> None:
    """A chain cools from one part of its way to another."""
    from shoal.planner.search import swaps  # as above

    budget, first = stretch.evaluations - 1, best.evaluations  # its end is priced from scratch
    if best.proven or budget * _whole(model) < model.stages:
        return
    matchings, proposed, start_s = float(chain.tally[1]), 0, float(chain.tally[0])
    chain.tally[2] = matchings + budget * _whole(model)
    low, high = _spent(stretch.since), _spent(stretch.until)
    warm = WARM * max(1.0, math.sqrt(model.size / model.stages))
    while not best.proven:
        part = (chain.tally[1] + model.stages - 1 - matchings) / (chain.tally[2] - matchings)
        way = proposed / stretch.proposals
        if part > 1 or way > 1:
            break
        at = max(_reached(low + (high - low) * float(part)), stretch.since + (stretch.until - stretch.since) * way)
        heat_s = stretch.scale_s * warm * (COLD / warm) ** at
        swaps.advance(model.share, model.hop, chain, rng.random((AT_ONCE, swaps.DRAWS)), heat_s, _guide(at))
        proposed += AT_ONCE
        best.evaluations = first + math.ceil((chain.tally[1] - matchings) / _whole(model))
        best.see(chain.best_groups, float(chain.tally[0]), 0)
    if chain.tally[0] < start_s:
        best.see(chain.best_groups, model.cost(chain.best_groups).total_s)  # along its best path it may cost less


def _spent(at: float) -> float:
    """Which part of its matchings a chain has made at this part of its way: a warm one makes more for each proposal."""
    return (1 - math.exp(-COOLING * at)) / (1 - math.exp(-COOLING))


def _reached(part: float) -> float:
    """The other way round."""
    return -math.log(1 - part * (1 - math.exp(-COOLING))) / COOLING


def _guide(at: float) -> float:
    """Weight of the second term at this part of the way."""
    return float(GUIDE * (GUIDE_END / GUIDE) ** at)


def _guided_s(chain: Chain, at: float) -> float:
    """What swaps.py anneals on, for a chain as it stands."""
    exchanges, guide = chain.sums.max(axis=1), _guide(at)
    hops_s = chain.links.sum() + guide * chain.means.sum()
    return float(exchanges.max() + guide * exchanges.mean() + 2 * hops_s)


def _whole(model: Model) -> float:
    """Matchings of an evaluation."""
    return model.stages * (model.stages - 1) / 2


def _count(model: Model) -> float:
    """How many placements there are."""
    count = 1.0
    for stage in range(model.stages):
        for device in range(model.size):
            count *= (model.devices - stage * model.size - device) / (device + 1)
        count /= stage + 1
    return count
