"""DT-FM's search for a placement, as published: an evolutionary search whose children are improved by moves of devices.

Paper: arXiv 2206.01288, section 3.3, after Kang and Moon's hybrid genetic algorithm for multiway partitioning (2000).
Claim: searching only for the partition of devices into stages, with matching and path solved exactly inside the cost
(cost.py), finds good plans in a few thousand evaluations. Kept as the baseline that anneal.py has to beat, so it follows
the public program where that differs from the text: one-sided gains, a chain of moves through several stages, the last
cycle of which is never taken.

    `evolve`      population, crossover of five devices, replacement
    `repaired`    sizes made equal again
    `improved`    the local search: cycles of moves, each closed by bringing a device back
    `_gains`      mean time to the other stage's devices minus the time to the nearest one of the own stage

What we changed: the draws come from the generator that is handed in (the program overwrote its seed functions), and
replacement can be the one meant (`Replacement.MEANT`): its misplaced parenthesis compares the child with the first parent
and with 0 or 1 second.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

from shoal.planner.cost import Floats, Ints, Model
from shoal.planner.search import Best, Found

POPULATION = 100  # the program's
CROSSED = 5  # devices that take the other parent's stage: the program's

Flags = npt.NDArray[np.bool_]


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
    results, totals = [labels], [0.0]
    locked: Flags = np.zeros(model.devices, dtype=bool)
    marked: Flags = np.zeros(model.stages, dtype=bool)
    for _ in range(model.stages):
        closed = _cycle(results[-1], model, locked, marked)
        if closed is None:
            break
        results.append(closed[0])
        totals.append(closed[1])
        if marked.all():
            break
    chosen, top, total = 0, 0.0, 0.0
    for cycle in range(1, len(totals)):
        total += totals[cycle - 1]
        if total > top:
            chosen, top = cycle - 1, total
    return results[chosen]


def _cycle(labels: Ints, model: Model, locked: Flags, marked: Flags) -> tuple[Ints, float] | None:
    """A chain of moves out of the stage with the highest gain and back into it; None when nothing can move."""
    labels = labels.copy()
    movers, between = _gains(labels, model, locked)
    highest = between.max(axis=1)
    home = stage = int(highest.argmax())
    if movers[home] < 0:
        return None
    moves: list[tuple[int, int]] = []  # (device, the stage it came from)
    gained: list[float] = []
    back: list[float] = []
    for _ in range(model.devices):
        device, target = int(movers[stage]), int(between[stage].argmax())
        if device < 0:
            device, target = moves[-1][0], home
        moves.append((device, stage))
        gained.append(float(highest[stage]))
        back.append(float(between[stage, home]))
        labels[device] = target
        locked[device] = marked[target] = True
        stage = target
        if stage == home:
            break
        movers, between = _gains(labels, model, locked)
        highest = between.max(axis=1)
    best, kept, total = 0.0, 0, 0.0
    for move in range(1, len(moves)):
        total += gained[move - 1]
        if total + back[move] > best:
            best, kept = total + back[move], move
    for device, came_from in reversed(moves[kept + 1 :]):
        labels[device] = came_from
    labels[moves[kept][0]] = home
    return labels, best


def _gains(labels: Ints, model: Model, locked: Flags) -> tuple[Ints, Floats]:
    """Per stage the device that would leave it (-1: none may), and what its move to each other stage gains."""
    of_stage = labels[:, None] == np.arange(model.stages)  # (N, S)
    counts = of_stage.sum(axis=0)
    together = labels[:, None] == labels
    np.fill_diagonal(together, False)
    nearest = np.where(together, model.hop, np.inf).min(axis=1)
    free = np.where(of_stage & ~locked[:, None], nearest[:, None], np.inf)
    movers = free.argmin(axis=0)
    least = free[movers, np.arange(model.stages)]
    between = (model.hop[movers] @ of_stage) / np.maximum(counts, 1) - np.where(np.isinf(least), 0.0, least)[:, None]
    between[np.isinf(least)] = -np.inf
    np.fill_diagonal(between, -np.inf)
    return np.where(np.isinf(least), -1, movers), between


def _labels(order: Ints, model: Model) -> Ints:
    labels = np.empty(model.devices, dtype=np.intp)
    labels[order] = np.arange(model.devices) // model.size
    return labels


def _score(model: Model, labels: Ints, best: Best) -> float:
    groups = np.argsort(labels, kind="stable").reshape(model.stages, model.size)
    total_s = float(model.totals_s(groups[None])[0])
    best.see(groups, total_s)
    return total_s
