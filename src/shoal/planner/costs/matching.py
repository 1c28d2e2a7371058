"""Matchings between the devices of two stages (eq. 3 of communication.py), compiled."""

from __future__ import annotations

import numpy as np

from shoal.compiled import compiled
from shoal.planner.costs.arrays import Floats, Ints


@compiled
def hops(hop: Floats, groups: Ints) -> Floats:
    """Eq. 3 for every pair of groups, (S, n) -> (S, S)."""
    stages = len(groups)
    found = np.zeros((stages, stages))
    for i in range(stages):
        for j in range(i + 1, stages):
            least, _ = bounds(hop, groups[i], groups[j])
            found[i, j] = found[j, i] = matched(hop, groups[i], groups[j], least, np.inf)
    return found


@compiled
def bounds(hop: Floats, left: Ints, right: Ints) -> tuple[float, float]:
    """What no matching undercuts, and the mean of what each device's nearest partner costs."""
    size = len(left)
    columns = np.full(size, np.inf)
    worst, total = 0.0, 0.0
    for i in range(size):
        line = hop[left[i]]
        least = np.inf
        for j in range(size):
            value = line[right[j]]
            least = min(least, value)
            columns[j] = min(columns[j], value)
        worst = max(worst, least)
        total += least
    for j in range(size):
        worst = max(worst, columns[j])
        total += columns[j]
    return worst, total / (2 * size)


@compiled
def _free(line: Floats, right: Ints, row_of: Ints, threshold: float) -> int:
    """The first free column whose entry is at most `threshold`; -1: none."""
    for j in range(len(right)):
        if row_of[j] < 0 and line[right[j]] <= threshold:
            return j
    return -1


@compiled
def _freed(row_of: Ints, came_from: Ints, column: int) -> int:
    """Turn the alternating path to `column` over: the column at its beginning, which is free then."""
    while came_from[column] >= 0:
        row_of[column] = row_of[came_from[column]]
        column = came_from[column]
    return column


@compiled
def matched(hop: Floats, left: Ints, right: Ints, threshold: float, most: float) -> float:
    """Eq. 3: the least possible largest entry of a perfect matching, at least `threshold` (a bound, such as 0). Where that is
    `most` or more, something between `most` and it.

    Row by row, each by the path to a free column whose largest entry is least (Prim's tree from the row)."""
    size = len(left)
    row_of = np.full(size, -1, dtype=np.int64)
    reach = np.empty(size)
    came_from = np.empty(size, dtype=np.int64)
    seen = np.empty(size, dtype=np.bool_)
    for start in range(size):
        line = hop[left[start]]
        free = _free(line, right, row_of, threshold)
        if free >= 0:
            row_of[free] = start
            continue
        seen[:] = False
        for j in range(size):
            reach[j], came_from[j] = line[right[j]], -1
        while True:
            column, least = -1, np.inf
            for j in range(size):
                if not seen[j] and reach[j] < least:
                    column, least = j, reach[j]
                    if least <= threshold and row_of[j] < 0:
                        break
            threshold = max(threshold, least)
            if threshold >= most:
                return threshold
            seen[column] = True
            if row_of[column] < 0:
                break
            line = hop[left[row_of[column]]]
            for j in range(size):
                if not seen[j] and line[right[j]] < reach[j]:
                    reach[j], came_from[j] = line[right[j]], column
        row_of[_freed(row_of, came_from, column)] = start
    return threshold
