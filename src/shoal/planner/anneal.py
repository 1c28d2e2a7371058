"""Our search for a placement: swaps of two devices, taken or refused by annealing on the true cost.

dtfm.py's local search never looks at the cost it serves; its population collapses; and both stall where many placements
cost the same. Here every candidate is priced exactly, many at a time (cost.py is numpy over a batch), a chain starts from
the best of greedy.py's rules and another at random, and a second term, small and fading, prefers on a plateau what is
about to become cheaper: mean instead of largest exchange, mean instead of largest hop.

Beyond EXACT_PATH_MOST stages or SUBSETS_MOST devices per stage a candidate is priced by estimates: along the present
path only, and with the bound from which a matching's threshold starts; what a chain ends with is priced exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.planner.cost import EXACT_PATH_MOST, SUBSETS_MOST, Floats, Ints, Model, bottlenecks, path, path_lengths
from shoal.planner.greedy import starts
from shoal.planner.search import Best, Found, exhaustive, random_placement

EXHAUSTIVE_MOST = 2000  # placements up to which all are priced
BATCH = 16  # candidates priced at once, the best of the accepted ones is taken
WARM, COLD = 3e-3, 1e-4  # temperature at the start and the end, of the start's cost: tuned on six irregular networks
GUIDE, GUIDE_END = 1.0, 0.01  # weight of the second term at the start and the end
REORDER = 40  # accepted swaps after which a long path is looked for again

Flags = npt.NDArray[np.bool_]


def anneal(model: Model, rng: np.random.Generator, budget: int) -> Found:
    """The best placement within `budget` evaluations; fewer when it is proven that none is better."""
    if model.stages == 1 or _count(model) <= min(EXHAUSTIVE_MOST, budget):
        return exhaustive(model)
    best = Best(model)
    for groups in starts(model)[:budget]:
        best.see(groups, model.cost(groups).total_s)
    rule = best.groups
    chains: tuple[tuple[Ints | None, float], ...] = ((rule, 0.6), (random_placement(model, rng), 0.9), (None, 1.0))
    for start, until in chains:  # the last one polishes what is best by then
        if not best.proven and best.evaluations < budget * until:
            warm = WARM / 10 if start is None else WARM
            _chain(model, rng, best, best.groups if start is None else start, int(budget * until), warm)
    return best.found()


def _chain(
    model: Model, rng: np.random.Generator, best: Best, groups: Ints, until: int, warm: float
) -> None:  # six values that belong to one chain and are read once
    state = _State(model, groups)
    first, scale_s = best.evaluations, state.total_s
    lead_s, lead = best.total_s if state.exact else scale_s, groups
    while best.evaluations < until and not best.proven:
        done = (best.evaluations - first) / (until - first)
        guide = GUIDE * (GUIDE_END / GUIDE) ** done
        heat_s = scale_s * warm * (COLD / warm) ** done
        many = min(BATCH, until - best.evaluations)
        swaps = state.propose(rng, many)
        energies, totals = state.energies(swaps, guide)
        now = state.energy(guide)
        accepted = taken(energies - now, heat_s, rng.random(many))
        k = int(totals.argmin())
        if totals[k] < lead_s:
            lead_s, lead = float(totals[k]), swaps.applied(state.groups, k)
            if state.exact:
                best.see(lead, lead_s, 0)
        best.evaluations += many
        if accepted.any():
            state.take(swaps, int(np.where(accepted, energies, np.inf).argmin()))
    if not state.exact:
        best.see(lead, model.cost(lead).total_s, 0)


def taken(dearer_s: Floats, heat_s: float, draws: Floats) -> Flags:
    """Metropolis: what is cheaper, and what is dearer with probability exp(-dearer_s / heat_s)."""
    return np.asarray(dearer_s < -heat_s * np.log(np.maximum(draws, 1e-300)))


class _Swaps(NamedTuple):
    """Candidates: the device at place a of stage i against the one at place b of stage j."""

    i: Ints
    j: Ints
    a: Ints
    b: Ints

    def applied(self, groups: Ints, k: int) -> Ints:
        groups = groups.copy()
        i, j, a, b = (int(column[k]) for column in self)
        groups[i, a], groups[j, b] = groups[j, b], groups[i, a]
        return groups


class _State:
    """A placement with everything that a swap leaves as it was."""

    def __init__(self, model: Model, groups: Ints) -> None:
        self._model = model
        self._long = model.stages > EXACT_PATH_MOST
        self._rough = model.size > SUBSETS_MOST
        self.exact = not (self._long or self._rough)
        self.groups = groups.copy()
        self._taken = 0
        self._measure()

    def _measure(self) -> None:
        """From scratch: exchanges, hops and, when it is fixed between whiles, the path."""
        stages = self._model.stages
        self._shares = self._model.data_parallel_s(self.groups)
        self._hops, self._means = (np.zeros((stages, stages)) for _ in range(2))
        left, right = np.triu_indices(stages, 1)
        hops, means = self._price(self.groups[left], self.groups[right])
        self._hops[left, right] = self._hops[right, left] = hops
        self._means[left, right] = self._means[right, left] = means
        self._links = ~np.eye(stages, dtype=bool)
        if self._long:
            order = np.array(path(self._hops)[1])
            self._links[:] = False
            self._links[order[:-1], order[1:]] = self._links[order[1:], order[:-1]] = True

    def _price(self, left: Ints, right: Ints) -> tuple[Floats, Floats]:
        """Per pair of groups the hop, and its smooth companion: what each device's nearest partner costs, on average."""
        costs = self._model.hop[left[:, :, None], right[:, None, :]]
        rows, columns = costs.min(axis=2), costs.min(axis=1)
        hops = np.maximum(rows.max(axis=1), columns.max(axis=1)) if self._rough else bottlenecks(costs)
        return hops, (rows.mean(axis=1) + columns.mean(axis=1)) / 2

    @property
    def total_s(self) -> float:
        return float(self._shares.max() + 2 * self._lengths(self._hops[:, :, None])[0])

    def energy(self, guide: float) -> float:
        length = self._lengths((self._hops + guide * self._means)[:, :, None])[0]
        return float(self._shares.max() + guide * self._shares.mean() + 2 * length)

    def propose(self, rng: np.random.Generator, many: int) -> _Swaps:
        stages, size = self._model.stages, self._model.size
        i = rng.integers(stages, size=many)
        j = (i + rng.integers(1, stages, size=many)) % stages
        return _Swaps(i, j, rng.integers(size, size=many), rng.integers(size, size=many))

    def energies(self, swaps: _Swaps, guide: float) -> tuple[Floats, Floats]:
        """Of every candidate: cost with the second term, and without."""
        i, j, a, b = swaps
        every = np.arange(len(i))
        groups = np.repeat(self.groups[None], len(i), axis=0)
        groups[every, i, a], groups[every, j, b] = self.groups[j, b], self.groups[i, a]
        shares = np.repeat(self._shares[None], len(i), axis=0)
        shares[every, i] = self._model.data_parallel_s(groups[every, i])
        shares[every, j] = self._model.data_parallel_s(groups[every, j])
        hops = np.repeat(self._hops[:, :, None], len(i), axis=2)
        means = np.repeat(self._means[:, :, None], len(i), axis=2)
        from_j = self._links[j]
        from_j[every, i] = False  # counted from i
        at_i, at_j = np.nonzero(self._links[i]), np.nonzero(from_j)
        candidate = np.concatenate([at_i[0], at_j[0]])
        one = np.concatenate([i[at_i[0]], j[at_j[0]]])
        two = np.concatenate([at_i[1], at_j[1]])
        priced = self._price(groups[candidate, one], groups[candidate, two])
        for table, values in zip((hops, means), priced, strict=True):
            table[one, two, candidate] = table[two, one, candidate] = values
        lengths = self._lengths(np.concatenate([hops, hops + guide * means], axis=2))
        plain, guided = lengths[: len(i)], lengths[len(i) :]
        largest = shares.max(axis=1)
        return largest + guide * shares.mean(axis=1) + 2 * guided, largest + 2 * plain

    def take(self, swaps: _Swaps, k: int) -> None:
        i, j = int(swaps.i[k]), int(swaps.j[k])
        self.groups = swaps.applied(self.groups, k)
        self._taken += 1
        if self._long and self._taken % REORDER == 0:
            self._measure()
            return
        for stage in (i, j):
            self._shares[stage] = self._model.data_parallel_s(self.groups[stage])
            others = np.flatnonzero(self._links[stage])
            hops, means = self._price(self.groups[np.full(len(others), stage)], self.groups[others])
            self._hops[stage, others] = self._hops[others, stage] = hops
            self._means[stage, others] = self._means[others, stage] = means

    def _lengths(self, weights: Floats) -> Floats:
        if self._long:
            return np.asarray((weights * self._links[:, :, None]).sum(axis=(0, 1)) / 2)
        return path_lengths(weights)


def _count(model: Model) -> float:
    """How many placements there are."""
    count = 1.0
    for stage in range(model.stages):
        for device in range(model.size):
            count *= (model.devices - stage * model.size - device) / (device + 1)
        count /= stage + 1
    return count
