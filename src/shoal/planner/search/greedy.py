"""Placements that follow from a rule at the price of one evaluation: baselines, and where anneal.py starts.

In the published networks devices come in regions, and two rules are natural: `spread`, every stage has something of every
region, so that each pipeline stays inside one and only gradients travel far; and `gathered`, every stage is one
region, so that only activations do. `nearest` needs no regions.
"""

from __future__ import annotations

import numpy as np

from shoal.planner.costs.arrays import Floats, Ints
from shoal.planner.costs.communication import Model
from shoal.planner.search.placements import Best, Found


def greedy_search(model: Model) -> Found:
    """The best of the rules, at every scale on which the links fall into regions."""
    best = Best(model)
    for groups in starts(model):
        best.see(groups, float(model.totals_s(groups[None])[0]))
    return best.found()


def starts(model: Model) -> list[Ints]:
    """Each rule's placement, without repeats."""
    starts_by_rule = [nearest(model)]
    for regions in scales(model.hop):
        starts_by_rule += [spread(regions, model), gathered(regions, model)]
    return list({np.sort(np.sort(groups, axis=1), axis=0).tobytes(): groups for groups in starts_by_rule}.values())


def scales(seconds: Floats, most: int = 3) -> list[list[Ints]]:
    """Regions: devices that hang together by links below a gap. One list of regions for each of the widest gaps.

    The links that matter are those of the cheapest tree through all devices (single linkage); a gap is between two of its
    links, in ratio."""
    if len(seconds) == 1:
        return [[np.array([0])]]
    links = _tree(seconds)
    lengths = np.sort(np.array([length for length, _, _ in links]))
    ratios = lengths[1:] / np.maximum(lengths[:-1], 1e-300)
    gaps = [int(gap) for gap in np.argsort(-ratios, kind="stable")[:most] if ratios[gap] > 1 + 1e-9]
    levels = [float(lengths[gap]) for gap in gaps] or [float(lengths[-1])]
    return [_parts(len(seconds), [(one, two) for length, one, two in links if length <= level]) for level in levels]


def spread(regions: list[Ints], model: Model) -> Ints:
    """Largest region first, each device to a stage with room that has the fewest of its region; the first on ties."""
    stages: list[list[int]] = [[] for _ in range(model.stages)]
    for region in sorted(regions, key=len, reverse=True):
        counts = [0] * model.stages
        for device in region.tolist():
            stage = min((s for s in range(model.stages) if len(stages[s]) < model.size), key=lambda s: (counts[s], s))
            stages[stage].append(device)
            counts[stage] += 1
    return np.array(stages, dtype=np.intp)


def gathered(regions: list[Ints], model: Model) -> Ints:
    """Stage after stage filled from one region after the other, each next to the one before."""
    left = list(range(len(regions)))
    centre = np.array([[model.hop[np.ix_(a, b)].mean() for b in regions] for a in regions])
    order = [max(left, key=lambda r: (len(regions[r]), -r))]
    while len(order) < len(regions):
        left.remove(order[-1])
        order.append(min(left, key=lambda r: (centre[order[-1], r], r)))
    return np.asarray(np.concatenate([regions[r] for r in order]).reshape(model.stages, model.size))


def nearest(model: Model) -> Ints:
    """Stages one by one: the device with the worst links that is left, and those nearest to it."""
    left = np.ones(model.devices, dtype=bool)
    remoteness = model.share.sum(axis=1)
    groups = []
    for _ in range(model.stages):
        worst = int(np.where(left, remoteness, -np.inf).argmax())
        group = np.argsort(np.where(left, model.share[worst], np.inf), kind="stable")[: model.size]
        if worst not in group:  # a free link to others: the diagonal is no smaller
            group[-1] = worst
        left[group] = False
        groups.append(group)
    return np.array(groups, dtype=np.intp)


def _tree(seconds: Floats) -> list[tuple[float, int, int]]:
    """The cheapest tree (Prim)."""
    reach, via = seconds[0].copy(), np.zeros(len(seconds), dtype=np.intp)
    outside = np.ones(len(seconds), dtype=bool)
    outside[0] = False
    links = []
    while outside.any():
        node = int(np.where(outside, reach, np.inf).argmin())
        links.append((float(reach[node]), int(via[node]), node))
        outside[node] = False
        closer = seconds[node] < reach
        reach[closer], via[closer] = seconds[node][closer], node
    return links


def _parts(count: int, links: list[tuple[int, int]]) -> list[Ints]:
    part = list(range(count))

    def root(node: int) -> int:
        while part[node] != node:
            part[node] = part[part[node]]
            node = part[node]
        return node

    for one, two in links:
        part[max(root(one), root(two))] = min(root(one), root(two))
    roots = np.array([root(node) for node in range(count)])
    return [np.flatnonzero(roots == r) for r in np.unique(roots)]
