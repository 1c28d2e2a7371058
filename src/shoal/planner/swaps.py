"""The inner loop of anneal.py, compiled: swaps of two devices and turns of the path, priced along the path as it is.

A state is a placement (S, n) and an order of its stages. Swapping two devices changes two exchanges and at most four hops
of the path, so that a candidate costs microseconds. A candidate is refused by a bound wherever that is enough (no matching
is cheaper than its worst row's or column's least entry): the same refusals as with the matching, but nothing is counted, as
nothing was matched. What is counted are matchings. numba compiles this once per machine and keeps it beside the file, or in
the user's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np

from shoal.planner.cost import Floats, Ints

DRAWS = 6  # uniform numbers that a proposal takes
TURN = 0.15  # of the proposals reverse a stretch of the path; the others swap devices
CHANGED = 4  # hops of the path at most that a proposal changes
WORST = 0.25  # of the swaps take the stage whose exchange is the longest

F = TypeVar("F", bound=Callable[..., Any])
compiled = cast(Callable[[F], F], numba.njit(cache=True))


class Chain(NamedTuple):
    """One chain's state; every array is changed in place."""

    groups: Ints  # (S, n) devices
    order: Ints  # (S,) stages along the path
    place: Ints  # (S,) where each stage stands in it
    sums: Floats  # (S, n) a device's exchange with the others of its stage
    links: Floats  # (S - 1,) hops along the path
    means: Floats  # (S - 1,) their smooth companions
    best_groups: Ints
    told: Floats  # (3,) best cost along a path, matchings made, matchings allowed


def chain(share: Floats, hop: Floats, groups: Ints, order: Ints) -> Chain:
    stages, size = groups.shape
    made = Chain(
        groups.astype(np.int64).copy(),
        order.astype(np.int64).copy(),
        np.argsort(order).astype(np.int64),
        np.zeros((stages, size)),
        np.zeros(stages - 1),
        np.zeros(stages - 1),
        groups.astype(np.int64).copy(),
        np.array([np.inf, 0.0, np.inf]),
    )
    measure(share, hop, made)
    return made


@compiled
def measure(share: Floats, hop: Floats, state: Chain) -> None:
    """Everything from scratch: S - 1 matchings."""
    stages, size = state.groups.shape
    worst = 0.0
    for stage in range(stages):
        for a in range(size):
            total = 0.0
            for b in range(size):
                total += share[state.groups[stage, a], state.groups[stage, b]]
            state.sums[stage, a] = total
            worst = max(worst, total)
    length = 0.0
    for at in range(stages - 1):
        left, right = state.groups[state.order[at]], state.groups[state.order[at + 1]]
        bound, mean = bounds(hop, left, right)
        state.links[at], state.means[at] = matched(hop, left, right, bound), mean
        length += state.links[at]
    state.told[1] += stages - 1
    if worst + 2 * length < state.told[0]:
        state.told[0] = worst + 2 * length
        state.best_groups[:] = state.groups


@compiled
def advance(
    share: Floats, hop: Floats, state: Chain, draws: Floats, heat_s: float, guide: float
) -> int:  # what a chain is made of, its chance, and how warm it is
    """One proposal for each row of `draws` (P, 6), while there are matchings left; how many were taken."""
    stages, size = state.groups.shape
    groups, order, place, sums, links, means = (
        state.groups,
        state.order,
        state.place,
        state.sums,
        state.links,
        state.means,
    )
    sums_i, sums_j = np.empty(size), np.empty(size)
    touched = np.empty(4, dtype=np.int64)
    new_links, new_means = np.empty(4), np.empty(4)
    worst_of = np.empty(stages)
    for stage in range(stages):
        worst_of[stage] = sums[stage].max()
    taken = 0
    for row in range(len(draws)):
        if state.told[1] + CHANGED > state.told[2]:
            break
        draw = draws[row]
        largest, mean, worst_at = 0.0, 0.0, 0
        for stage in range(stages):
            mean += worst_of[stage] / stages
            if worst_of[stage] > largest:
                largest, worst_at = worst_of[stage], stage
        length, soft = links.sum(), means.sum()
        limit = largest + guide * mean + 2 * (length + guide * soft) - heat_s * math.log(max(draw[5], 1e-300))
        if stages > 2 and draw[0] < TURN:
            first = int(draw[1] * stages)
            last = int(draw[2] * stages)
            if first > last:
                first, last = last, first
            if first == last or (first == 0 and last == stages - 1):
                continue
            count = 0
            if first > 0:
                bound, smooth = bounds(hop, groups[order[first - 1]], groups[order[last]])
                touched[count], new_links[count], new_means[count] = first - 1, bound, smooth
                count += 1
            if last < stages - 1:
                bound, smooth = bounds(hop, groups[order[first]], groups[order[last + 1]])
                touched[count], new_links[count], new_means[count] = last, bound, smooth
                count += 1
            for k in range(count):
                length += new_links[k] - links[touched[k]]
                soft += new_means[k] - means[touched[k]]
            if largest + guide * mean + 2 * (length + guide * soft) >= limit:
                continue
            state.told[1] += count
            for k in range(count):
                left = order[first - 1] if touched[k] == first - 1 else order[first]
                right = order[last] if touched[k] == first - 1 else order[last + 1]
                exact = matched(hop, groups[left], groups[right], new_links[k])
                length += exact - new_links[k]
                new_links[k] = exact
            if largest + guide * mean + 2 * (length + guide * soft) >= limit:
                continue
            order[first : last + 1] = order[first : last + 1][::-1].copy()
            links[first:last] = links[first:last][::-1].copy()
            means[first:last] = means[first:last][::-1].copy()
            for at in range(first, last + 1):
                place[order[at]] = at
            for k in range(count):
                links[touched[k]], means[touched[k]] = new_links[k], new_means[k]
        else:
            i = worst_at if draw[0] > 1 - WORST else int(draw[1] * stages)
            j = (i + 1 + int(draw[2] * (stages - 1))) % stages
            a, b = int(draw[3] * size), int(draw[4] * size)
            one, two = groups[i, a], groups[j, b]
            most_i, most_j, total_i, total_j = 0.0, 0.0, 0.0, 0.0
            for k in range(size):
                d, e = groups[i, k], groups[j, k]
                if k != a:
                    sums_i[k] = sums[i, k] - share[d, one] + share[d, two]
                    total_i += share[two, d]
                    most_i = max(most_i, sums_i[k])
                if k != b:
                    sums_j[k] = sums[j, k] - share[e, two] + share[e, one]
                    total_j += share[one, e]
                    most_j = max(most_j, sums_j[k])
            sums_i[a], sums_j[b] = total_i, total_j
            most_i, most_j = max(most_i, total_i), max(most_j, total_j)
            mean += (most_i + most_j - worst_of[i] - worst_of[j]) / stages
            largest = max(most_i, most_j)
            for stage in range(stages):
                if stage != i and stage != j:
                    largest = max(largest, worst_of[stage])
            if largest + guide * mean >= limit:
                continue
            groups[i, a], groups[j, b] = two, one
            count = 0
            for k in range(4):
                at = (place[i] if k < 2 else place[j]) - k % 2
                known = at < 0 or at >= stages - 1
                for other in range(count):
                    known = known or touched[other] == at
                if not known:
                    touched[count] = at
                    count += 1
            for k in range(count):
                at = touched[k]
                new_links[k], new_means[k] = bounds(hop, groups[order[at]], groups[order[at + 1]])
                length += new_links[k] - links[at]
                soft += new_means[k] - means[at]
            if largest + guide * mean + 2 * (length + guide * soft) < limit:
                state.told[1] += count
                for k in range(count):
                    at = touched[k]
                    exact = matched(hop, groups[order[at]], groups[order[at + 1]], new_links[k])
                    length += exact - new_links[k]
                    new_links[k] = exact
            if largest + guide * mean + 2 * (length + guide * soft) >= limit:
                groups[i, a], groups[j, b] = one, two
                continue
            sums[i], sums[j] = sums_i, sums_j
            worst_of[i], worst_of[j] = most_i, most_j
            for k in range(count):
                links[touched[k]], means[touched[k]] = new_links[k], new_means[k]
        taken += 1
        if largest + 2 * links.sum() < state.told[0] * (1 - 1e-12):
            state.told[0] = largest + 2 * links.sum()
            state.best_groups[:] = groups
    for stage in range(stages):  # so that rounding does not add up
        for k in range(size):
            total = 0.0
            for other in range(size):
                total += share[groups[stage, k], groups[stage, other]]
            sums[stage, k] = total
    return taken


@compiled
def hops(hop: Floats, groups: Ints) -> Floats:
    """Eq. 3 for every pair of groups, (S, n) -> (S, S)."""
    stages = len(groups)
    found = np.zeros((stages, stages))
    for i in range(stages):
        for j in range(i + 1, stages):
            least, _ = bounds(hop, groups[i], groups[j])
            found[i, j] = found[j, i] = matched(hop, groups[i], groups[j], least)
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
def matched(hop: Floats, left: Ints, right: Ints, threshold: float) -> float:
    """Eq. 3: the least possible largest entry of a perfect matching, at least `threshold` (a bound, such as 0).

    Row by row, each by the path to a free column whose largest entry is least (Prim's tree from the row)."""
    size = len(left)
    row_of = np.full(size, -1, dtype=np.int64)
    reach = np.empty(size)
    came_from = np.empty(size, dtype=np.int64)
    seen = np.empty(size, dtype=np.bool_)
    for start in range(size):
        free = -1
        line = hop[left[start]]
        for j in range(size):
            if row_of[j] < 0 and line[right[j]] <= threshold:
                free = j
                break
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
            seen[column] = True
            if row_of[column] < 0:
                break
            line = hop[left[row_of[column]]]
            for j in range(size):
                if not seen[j] and line[right[j]] < reach[j]:
                    reach[j], came_from[j] = line[right[j]], column
        while came_from[column] >= 0:
            row_of[column] = row_of[came_from[column]]
            column = came_from[column]
        row_of[column] = start
    return threshold
