"""What every search for a placement returns, and the two that need no idea: all placements, and random ones.

A search is a function of a cost model, a seeded generator and a budget in evaluations: the same seed gives the same
placement on every machine. dtfm.py has the published algorithm, anneal.py ours, greedy.py rules that need one
evaluation each.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import msgspec
import numpy as np

from shoal.planner.costs.arrays import Ints
from shoal.planner.costs.communication import Cost, Model

BATCH = 32  # placements priced at once: enough to feed numpy, few enough to stay in the cache


class Found(msgspec.Struct, frozen=True):
    """The best placement a search has seen. `curve` lists (evaluations so far, cost) wherever it improved."""

    groups: tuple[tuple[int, ...], ...]
    cost: Cost
    evaluations: int
    curve: tuple[tuple[int, float], ...]
    proven: bool = False  # nothing can be better: every placement was priced, or the lower bound is met


class Best:
    """Keeps the best of what is priced, and counts."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._bound_s = model.lower_bound_s()
        self.groups: Ints = np.zeros((0, 0), dtype=np.intp)
        self.total_s = np.inf
        self.evaluations = 0
        self.curve: list[tuple[int, float]] = []

    def see(self, groups: Ints, total_s: float, evaluations: int = 1) -> None:
        self.evaluations += evaluations
        if total_s < self.total_s:
            self.groups, self.total_s = groups.copy(), total_s
            self.curve.append((self.evaluations, total_s))

    @property
    def proven(self) -> bool:
        return self.total_s <= self._bound_s * (1 + 1e-12)

    def found(self, proven: bool = False) -> Found:
        groups = tuple(tuple(int(device) for device in group) for group in self.groups)
        return Found(groups, self._model.cost(self.groups), self.evaluations, tuple(self.curve), proven or self.proven)


def random_placement(model: Model, rng: np.random.Generator) -> Ints:
    return np.asarray(rng.permutation(model.devices).reshape(model.stages, model.size))


def random_search(model: Model, rng: np.random.Generator, budget: int) -> Found:
    """The best of `budget` uniform draws, each with its best matchings and path."""
    best = Best(model)
    while best.evaluations < budget:
        many = min(BATCH, budget - best.evaluations)
        drawn = np.stack([random_placement(model, rng) for _ in range(many)])
        for groups, total_s in zip(drawn, model.totals_s(drawn), strict=True):
            best.see(groups, float(total_s))
    return best.found()


def exhaustive(model: Model) -> Found:
    """Every placement once; the groups' order does not matter. For about ten devices at most."""
    best = Best(model)
    every = placements(tuple(range(model.devices)), model.size)
    while chunk := [
        groups for _, groups in zip(range(BATCH), every, strict=False)
    ]:  # range first, or zip would drop one
        drawn = np.array(chunk, dtype=np.intp)
        for groups, total_s in zip(drawn, model.totals_s(drawn), strict=True):
            best.see(groups, float(total_s))
    return best.found(proven=True)


def placements(devices: tuple[int, ...], size: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All partitions of the devices into groups of `size`."""
    if not devices:
        yield ()
        return
    first, rest = devices[0], devices[1:]
    for others in combinations(rest, size - 1):
        left = tuple(device for device in rest if device not in others)
        for groups in placements(left, size):
            yield ((first, *others), *groups)
