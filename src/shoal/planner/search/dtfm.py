"""DT-FM's search for a placement, as published: an evolutionary search whose children are improved by moves of devices.

Paper: arXiv 2206.01288, section 3.3, after Kang and Moon's hybrid genetic algorithm for multiway partitioning (2000).
Claim: searching only for the partition of devices into stages, with matching and path solved exactly inside the cost
(communication.py), finds good plans in a few thousand evaluations. Kept as the baseline that anneal.py has to beat, so it follows
the public program where that differs from the text: one-sided gains, a chain of moves through several stages, the last
cycle of which is never taken.

    `evolve`      population, crossover of five devices, replacement
    `repaired`    sizes made equal again
    `improved`    the local search: cycles of moves, each closed by bringing a device back (moves.py, compiled)

What we changed: the draws come from the generator that is handed in (the program overwrote its seed functions), and
replacement can be the one meant (`Replacement.MEANT`): its misplaced parenthesis compares the child with the first parent
and with 0 or 1 second.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from shoal.planner.costs.arrays import Ints
from shoal.planner.costs.communication import Model
from shoal.planner.search.placements import Best, Found

POPULATION = 100  # the program's
CROSSED = 5  # devices that take the other parent's stage: the program's


class Replacement(Enum):
    PUBLISHED = "published"  # a child that is better than parent 1, or costs at most a second
    MEANT = "meant"  # a child that is better than the worse parent


def evolve(
    model: Model, rng: np.random.Generator, budget: int, replacement: Replacement = Replacement.PUBLISHED
) -> Found:
    """The best placement of `budget` evaluations."""
    best = Best(model)
    labels: list[Ints] = []
    scores: list[float] = []
    for _ in range(min(POPULATION, budget)):
        labels.append(_labels(np.asarray(rng.permutation(model.devices)), model))
        scores.append(_score(model, labels[-1], best))
    while best.evaluations < budget:
        one, two = (int(rng.integers(len(labels))) for _ in range(2))
        child = labels[two].copy()
        crossed = rng.choice(model.devices, size=min(CROSSED, model.devices), replace=False)
        child[crossed] = labels[one][crossed]
        child = improved(repaired(child, model), model)
        score = _score(model, child, best)
        other = scores[two] if replacement is Replacement.MEANT else float(score > scores[two])
        if score <= max(scores[one], other):
            worse = one if scores[one] > scores[two] else two
            labels[worse], scores[worse] = child, score
    return best.found()


def repaired(labels: Ints, model: Model) -> Ints:
    """Equal sizes: in the devices' order, one of too full a stage goes to the first stage with room."""
    labels = labels.copy()
    counts = np.bincount(labels, minlength=model.stages)
    for device, stage in enumerate(labels.tolist()):
        if counts[stage] > model.size:
            room = int(np.argmax(counts < model.size))
            labels[device] = room
            counts[stage] -= 1
            counts[room] += 1
    return labels


def improved(labels: Ints, model: Model) -> Ints:
    """One pass of the local search. The true cost is not consulted: gains look at single links."""
    from shoal.planner.search.moves import cycle  # numba: half a second that only searches pay

    results, totals = [labels], [0.0]
    locked, marked = np.zeros(model.devices, dtype=np.intp), np.zeros(model.stages, dtype=np.intp)
    for _ in range(model.stages):
        closed = results[-1].copy()
        gained = cycle(model.hop, closed, locked, marked)
        if gained < 0:
            break
        results.append(closed)
        totals.append(gained)
        if marked.all():
            break
    chosen, top, total = 0, 0.0, 0.0
    for number in range(1, len(totals)):
        total += totals[number - 1]
        if total > top:
            chosen, top = number - 1, total
    return results[chosen]


def _labels(order: Ints, model: Model) -> Ints:
    labels = np.empty(model.devices, dtype=np.intp)
    labels[order] = np.arange(model.devices) // model.size
    return labels


def _score(model: Model, labels: Ints, best: Best) -> float:
    groups = np.argsort(labels, kind="stable").reshape(model.stages, model.size)
    total_s = float(model.totals_s(groups[None])[0])
    best.see(groups, total_s)
    return total_s
