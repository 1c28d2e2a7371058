"""The inner loop of anneal.py, compiled: swaps of devices and turns of the path, priced along the path as it is.

A state is a placement (S, n) and an order of its stages. Swapping two devices changes two exchanges and at most four hops
of the path, so that a candidate costs microseconds; two pipelines that exchange a stretch may change the whole path. A candidate
is refused by a bound wherever that is enough (no matching is cheaper than its worst row's or column's least entry): the same
refusals as with the matching, but nothing is counted, as nothing was matched. What is counted are matchings; one after the other
is made only until the candidate is refused.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shoal.compiled import compiled
from shoal.planner.costs.arrays import Floats, Ints
from shoal.planner.costs.matching import bounds, matched

DRAWS = 7  # uniform numbers that a proposal takes
TURN = 0.15  # of the proposals reverse a stretch of the path; those that are left swap devices
STRETCH = 0.1  # of the proposals exchange stretches of two pipelines
WORST = 0.25  # of the swaps take the stage whose exchange is the longest


class Chain(NamedTuple):
    """One chain's state; every array is changed in place."""

    groups: Ints  # (S, n) devices
    order: Ints  # (S,) stages along the path
    place: Ints  # (S,) where each stage stands in it
    sums: Floats  # (S, n) a device's exchange with the others of its stage
    links: Floats  # (S - 1,) hops along the path
    means: Floats  # (S - 1,) their smooth companions
    best_groups: Ints
    tally: Floats  # (3,) best cost along a path, matchings made, matchings allowed


def chain(share: Floats, hop: Floats, groups: Ints, order: Ints) -> Chain:
    stages, size = groups.shape
    state = Chain(
        groups.astype(np.int64).copy(),
        order.astype(np.int64).copy(),
        np.argsort(order).astype(np.int64),
        np.zeros((stages, size)),
        np.zeros(stages - 1),
        np.zeros(stages - 1),
        groups.astype(np.int64).copy(),
        np.array([np.inf, 0.0, np.inf]),
    )
    measure(share, hop, state)
    return state


@compiled
def measure(share: Floats, hop: Floats, state: Chain) -> None:
    """Everything from scratch: S - 1 matchings."""
    stages = len(state.groups)
    worst, length = 0.0, 0.0
    for stage in range(stages):
        _exchanges(share, state.groups[stage], state.sums[stage])
        worst = max(worst, state.sums[stage].max())
    for at in range(stages - 1):
        left, right = state.groups[state.order[at]], state.groups[state.order[at + 1]]
        bound, mean = bounds(hop, left, right)
        state.links[at], state.means[at] = matched(hop, left, right, bound, np.inf), mean
        length += state.links[at]
    state.tally[1] += stages - 1
    if worst + 2 * length < state.tally[0]:
        state.tally[0] = worst + 2 * length
        state.best_groups[:] = state.groups


@compiled
def advance(
    share: Floats, hop: Floats, state: Chain, draws: Floats, heat_s: float, guide: float
) -> int:  # what a chain is made of, its chance, and how warm it is
    """One proposal for each row of `draws` (P, 7), while there are matchings left; how many were taken.

    One function on purpose: with a compiled helper for each kind of proposal an annealing of 3,000 evaluations on 8 x 8 devices takes 0.47
    s instead of 0.29, and 0.43 with numba's inlining; tuples of arrays are unpacked at every call."""
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
    touched, ends = np.empty(4, dtype=np.int64), np.empty((4, 2), dtype=np.int64)
    new_links, new_means = np.empty(4), np.empty(4)
    worst_of = np.empty(stages)
    for stage in range(stages):
        worst_of[stage] = sums[stage].max()
    taken = 0
    for row in range(len(draws)):
        if state.tally[1] + stages - 1 > state.tally[2]:  # a proposal changes all hops of the path at most
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
                touched[count], ends[count, 0], ends[count, 1] = first - 1, order[first - 1], order[last]
                count += 1
            if last < stages - 1:
                touched[count], ends[count, 0], ends[count, 1] = last, order[first], order[last + 1]
                count += 1
            for k in range(count):
                new_links[k], new_means[k] = bounds(hop, groups[ends[k, 0]], groups[ends[k, 1]])
                length += new_links[k] - links[touched[k]]
                soft += new_means[k] - means[touched[k]]
            spare_s = (limit - largest - guide * mean) / 2 - length - guide * soft
            if not _stays(hop, groups, ends[:count], new_links, spare_s, state.tally):
                continue
            order[first : last + 1] = order[first : last + 1][::-1].copy()
            links[first:last] = links[first:last][::-1].copy()
            means[first:last] = means[first:last][::-1].copy()
            for at in range(first, last + 1):
                place[order[at]] = at
            for k in range(count):
                links[touched[k]], means[touched[k]] = new_links[k], new_means[k]
        elif stages > 3 and draw[0] < TURN + STRETCH:
            if not _exchanged(share, hop, state, worst_of, draw, guide, limit):
                continue
            largest = worst_of.max()
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
                ends[k, 0], ends[k, 1] = order[at], order[at + 1]
                new_links[k], new_means[k] = bounds(hop, groups[order[at]], groups[order[at + 1]])
                length += new_links[k] - links[at]
                soft += new_means[k] - means[at]
            spare_s = (limit - largest - guide * mean) / 2 - length - guide * soft
            if not _stays(hop, groups, ends[:count], new_links, spare_s, state.tally):
                groups[i, a], groups[j, b] = one, two
                continue
            sums[i], sums[j] = sums_i, sums_j
            worst_of[i], worst_of[j] = most_i, most_j
            for k in range(count):
                links[touched[k]], means[touched[k]] = new_links[k], new_means[k]
        taken += 1
        if largest + 2 * links.sum() < state.tally[0] * (1 - 1e-12):
            state.tally[0] = largest + 2 * links.sum()
            state.best_groups[:] = groups
    for stage in range(stages):  # so that rounding does not add up
        _exchanges(share, groups[stage], sums[stage])
    return taken


@compiled
def _exchanged(
    share: Floats, hop: Floats, state: Chain, worst_of: Floats, draw: Floats, guide: float, limit: float
) -> bool:  # as in `advance`, for one of its proposals
    """Two pipelines exchange a stretch: devices of stages that follow one another on the path, each the nearest to the one before,
    for as many elsewhere on it. Where stages of one make differ from those of another, single swaps would have to pass through
    placements whose every hop is slow."""
    stages, order, groups = len(state.order), state.order, state.groups
    long = 2 + int(draw[1] * (stages // 2 - 1))
    one = int(draw[2] * (stages - 2 * long + 1))
    two = one + long + int(draw[3] * (stages - 2 * long - one + 1))
    left = _follow(hop, groups, order[one : one + long], int(draw[4] * groups.shape[1]))
    right = _follow(hop, groups, order[two : two + long], int(draw[6] * groups.shape[1]))
    _exchange(state, left, right, one, two)
    worst = worst_of.copy()
    for k in range(long):
        worst[order[one + k]] = _longest(share, groups[order[one + k]])
        worst[order[two + k]] = _longest(share, groups[order[two + k]])
    exchange_s = worst.max() + guide * worst.sum() / stages
    length, soft = state.links.sum(), state.means.sum()
    touched, ends = np.empty(stages, dtype=np.int64), np.empty((stages, 2), dtype=np.int64)
    links, means = np.empty(stages), np.empty(stages)
    count = 0
    stays = False
    if exchange_s < limit:
        for at in range(max(one - 1, 0), min(two + long, stages - 1)):
            if at < one + long or at >= two - 1:
                touched[count], ends[count, 0], ends[count, 1] = at, order[at], order[at + 1]
                links[count], means[count] = bounds(hop, groups[order[at]], groups[order[at + 1]])
                length += links[count] - state.links[at]
                soft += means[count] - state.means[at]
                count += 1
        spare_s = (limit - exchange_s) / 2 - length - guide * soft
        stays = _stays(hop, groups, ends[:count], links, spare_s, state.tally)
    if not stays:
        _exchange(state, left, right, one, two)
        return False
    worst_of[:] = worst
    for k in range(long):
        _exchanges(share, groups[order[one + k]], state.sums[order[one + k]])
        _exchanges(share, groups[order[two + k]], state.sums[order[two + k]])
    for k in range(count):
        state.links[touched[k]], state.means[touched[k]] = links[k], means[k]
    return True


@compiled
def _stays(hop: Floats, groups: Ints, ends: Ints, links: Floats, spare_s: float, tally: Floats) -> bool:
    """Whether matchings between the stages of `ends`, (K, 2), in place of the bounds in `links` add less than `spare_s` in all.
    If so they are in `links`."""
    for k in range(len(ends)):
        if spare_s <= 0:
            return False
        tally[1] += 1
        exact = matched(hop, groups[ends[k, 0]], groups[ends[k, 1]], links[k], links[k] + spare_s)
        spare_s -= exact - links[k]
        links[k] = exact
    return spare_s > 0


@compiled
def _exchange(state: Chain, left: Ints, right: Ints, one: int, two: int) -> None:
    """The devices that stand at `left` in the stages from `one` on, for those at `right` from `two` on. Twice is not at all."""
    for k in range(len(left)):
        i, j, a, b = state.order[one + k], state.order[two + k], left[k], right[k]
        state.groups[i, a], state.groups[j, b] = state.groups[j, b], state.groups[i, a]


@compiled
def _follow(hop: Floats, groups: Ints, stages: Ints, first: int) -> Ints:
    """Where in each stage the device stands that is nearest to the one before, from `first` on."""
    devices = np.empty(len(stages), dtype=np.int64)
    devices[0] = first
    for k in range(1, len(stages)):
        line, group = hop[groups[stages[k - 1], devices[k - 1]]], groups[stages[k]]
        nearest = 0
        for at in range(1, len(group)):
            if line[group[at]] < line[group[nearest]]:
                nearest = at
        devices[k] = nearest
    return devices


@compiled
def _exchanges(share: Floats, group: Ints, sums: Floats) -> None:
    """What each device exchanges with the others of its stage, in seconds."""
    for k in range(len(group)):
        total = 0.0
        for other in range(len(group)):
            total += share[group[k], group[other]]
        sums[k] = total


@compiled
def _longest(share: Floats, group: Ints) -> float:
    longest = 0.0
    for k in range(len(group)):
        total = 0.0
        for other in range(len(group)):
            total += share[group[k], group[other]]
        longest = max(longest, total)
    return longest


@compiled
def in_blocks(share: Floats, hop: Floats, lengths: Ints, luck: Floats, noise: float) -> Ints:
    """A placement (S, n) in blocks of `lengths`, (B,), stages. A block's first device is any; each further pipeline begins with the
    one that exchanges fastest with the block so far, give or take `noise`; a pipeline takes the devices that are nearest to those it
    has. `luck`, (B * n, N), is uniform."""
    size, devices = len(luck) // len(lengths), len(hop)
    groups = np.empty((devices // size, size), dtype=np.int64)
    left = np.ones(devices, dtype=np.bool_)
    far_s, reach_s = np.empty(devices), np.empty(devices)
    base = 0
    for block in range(len(lengths)):
        far_s[:] = 0.0
        for line in range(size):
            chance = luck[block * size + line]
            taken, least = -1, np.inf
            for device in range(devices):
                value = far_s[device] * (1 + noise * chance[device]) if line > 0 else chance[device]
                if left[device] and value < least:
                    taken, least = device, value
            reach_s[:] = 0.0
            for at in range(base, base + lengths[block]):
                if at > base:
                    taken, least = -1, np.inf
                    for device in range(devices):
                        if left[device] and reach_s[device] < least:
                            taken, least = device, reach_s[device]
                groups[at, line] = taken
                left[taken] = False
                far_s += share[taken]
                reach_s += hop[taken]
        base += lengths[block]
    return groups
