"""Paths through stages for communication.py, compiled: the cheapest one exactly, or a good one where stages are many."""

from __future__ import annotations

import numpy as np

from shoal.compiled import compiled
from shoal.planner.costs.arrays import Floats, Ints


@compiled
def partial_paths(weights: Floats) -> Floats:
    """Held-Karp, (S, S) -> (2^S, S): row `mask`, column `last` is the cheapest path over the mask's nodes that ends at `last`."""
    nodes = len(weights)
    table = np.full((1 << nodes, nodes), np.inf)
    for mask in range(1, 1 << nodes):
        for last in range(nodes):
            before = mask ^ (1 << last)
            if before > mask:  # `last` is not in it
                continue
            if before == 0:
                table[mask, last] = 0.0
                continue
            least = np.inf
            for other in range(nodes):
                least = min(least, table[before, other] + weights[other, last])
            table[mask, last] = least
    return table


@compiled
def nearest(weights: Floats) -> Ints:
    """The best of the paths that go on to the nearest neighbour, one from every start, (S, S) -> (S,)."""
    nodes = len(weights)
    best, order, left = np.zeros(nodes, dtype=np.int64), np.zeros(nodes, dtype=np.int64), np.ones(nodes, dtype=np.int64)
    best_s = np.inf
    for start in range(nodes):
        left[:] = 1
        left[start], order[0], length = 0, start, 0.0
        for at in range(1, nodes):
            nearest, least = -1, np.inf
            for node in range(nodes):
                if left[node] and weights[order[at - 1], node] < least:
                    nearest, least = node, weights[order[at - 1], node]
            order[at], left[nearest] = nearest, 0
            length += least
        if length < best_s:
            best[:], best_s = order, length
    return best


@compiled
def improved(weights: Floats) -> Ints:
    """`nearest`, mended by reversing stretches until none helps, (S, S) -> (S,)."""
    nodes, best = len(weights), nearest(weights)
    better = True
    while better:
        better = False
        for i in range(nodes - 1):
            before = weights[best[i - 1], best[i]] if i else 0.0
            most, end = 1e-12, -1
            for k in range(i + 1, nodes):
                joined = weights[best[i - 1], best[k]] if i else 0.0
                after = weights[best[k], best[k + 1]] if k < nodes - 1 else 0.0
                closed = weights[best[i], best[k + 1]] if k < nodes - 1 else 0.0
                gain = before + after - joined - closed
                if gain > most:
                    most, end = gain, k
            if end >= 0:
                best[i : end + 1] = best[i : end + 1][::-1].copy()
                better = True
    return best
