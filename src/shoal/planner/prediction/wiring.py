"""Planned wiring: which replica serves each microbatch of each owner, stage by stage. For strategy.py; core follows it.

Paper: DT-FM (arXiv 2206.01288) matches the devices of neighbouring stages so that the hops between them take near links.
First owners and replicas are matched: every replica gets as many microbatches as its compute and its lines can pass beside the
others', and of all such assignments the one with the least time on links is taken, by scipy's solver for assignment problems. Then
stage by stage, as in the paper, microbatches are assigned anew beside what their neighbours have, until nothing gets shorter.
That spends less time on links and lets replicas wait for one another more, so both are priced by playing them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from shoal.planner.costs.arrays import Floats
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.seats import Routing, Seats, handed_bytes, hop_s, request_bytes

SWEEPS = 4  # over the stages; what gets shorter does so in the first two
EVENLY = 1e-3  # of a microbatch's seconds on links is what being a step early or late for an even turn counts
PATTERN = 256  # microbatches that are assigned one by one; a longer step repeats their pattern


def planned(seats: Seats, cluster: Cluster) -> Routing:
    """By owner's device and stage: the devices that serve its microbatches, in turn. Empty for devices that have no seat."""
    owners = seats.seated
    count = min(seats.microbatches, max(PATTERN // len(owners), 1) * len(owners))
    ways = [_by_owners(seats, cluster, owners, stage, count) for stage in range(seats.stages)]
    return _routing(seats, owners, ways)


def matched(seats: Seats, cluster: Cluster, routes: Routing) -> Routing:
    """`planned` routes with each microbatch's replicas near one another and not only near its owner. A replica serves as
    often as before, but less evenly over time, so a caller plays both; of assignments that cost the same the most even is taken."""
    owners = seats.seated
    ways = [[routes[owner][stage] for owner in owners] for stage in range(seats.stages)]
    each, *others = ([len(turns) for turns in way] for way in ways)
    if not others or any(other != each for other in others):  # one stage, or fewer microbatches than owners
        return routes
    own_s, near_s = _seconds_on_links(seats, cluster, owners)
    owner_of = np.repeat(owners, each)
    at = np.concatenate([(np.arange(turns) + 0.5) / turns for turns in each])  # when in the step
    served = [np.concatenate(way) for way in ways]
    for _ in range(SWEEPS):
        shorter = [_shortened(served, stage, own_s[stage][owner_of], near_s, at) for stage in range(seats.stages)]
        if not any(shorter):
            break
    bounds = np.cumsum(each)[:-1]
    return _routing(seats, owners, [[turns.tolist() for turns in np.split(way, bounds)] for way in served])


def _seconds_on_links(seats: Seats, cluster: Cluster, owners: list[int]) -> tuple[Floats, Floats]:
    """Of a microbatch: between owner and replica, (S, N, N), and between replicas of neighbouring stages, (N, N)."""
    devices, groups = len(seats.stage_of), [seats.replicas(stage) for stage in range(seats.stages)]
    own_s, near_s = np.zeros((seats.stages, devices, devices)), np.zeros((devices, devices))
    for stage, group in enumerate(groups):
        for device in group:
            for owner in owners:
                own_s[stage, owner, device] = asked_s(seats, cluster, owner, device, stage)
            for before in groups[stage - 1] if stage else ():
                near_s[before, device] = _handed_s(seats, cluster, before, device)
    return own_s, near_s


def _shortened(served: list[Any], stage: int, own_s: Floats, near_s: Floats, at: Floats) -> bool:
    """Assign the stage's replicas anew beside its neighbours' where that takes less time on links. `own_s`: (microbatches, N)."""
    link_s_of = own_s
    if stage:
        link_s_of = link_s_of + near_s[served[stage - 1]]
    if stage < len(served) - 1:
        link_s_of = link_s_of + near_s[:, served[stage + 1]].T
    slots = np.sort(served[stage])
    now_s = link_s_of[np.arange(len(slots)), served[stage]].sum()
    late = np.abs(at[:, None] - _spread_at(slots)[None, :])
    cost_s = link_s_of[:, slots]
    rows, columns = linear_sum_assignment(cost_s + EVENLY * (now_s / len(slots) or 1.0) * late)
    if cost_s[rows, columns].sum() >= now_s * (1 - 1e-9):
        return False
    served[stage] = slots[columns]
    return True


def _routing(seats: Seats, owners: list[int], ways: list[list[list[int]]]) -> Routing:
    """From turns by stage and number of the owner."""
    found = {owner: tuple(tuple(way[number]) for way in ways) for number, owner in enumerate(owners)}
    return tuple(found.get(device, ()) for device in range(len(seats.stage_of)))


def _by_owners(seats: Seats, cluster: Cluster, owners: list[int], stage: int, count: int) -> list[list[int]]:
    """By number of the owner: who serves its microbatches at that stage, in turn."""
    group = seats.replicas(stage)
    quotas = shares(count, [1 / pass_s(seats, cluster, device) for device in group])
    slots = [at for at, quota in enumerate(quotas) for _ in range(quota)]
    cost_s = np.array([[link_s(seats, cluster, owner, device, stage) for device in group] for owner in owners])
    rows, columns = linear_sum_assignment(cost_s[np.arange(count) % len(owners)][:, slots])
    served = [[0] * len(group) for _ in owners]
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        served[row % len(owners)][slots[column]] += 1
    turns = [spread(counts, number / len(owners)) for number, counts in enumerate(served)]
    return [
        [group[at] for at in turns[number]] or [group[int(cost_s[number].argmin())]] for number in range(len(owners))
    ]


def _spread_at(slots: Any) -> Floats:
    """When in the step each of a replica's turns should be: evenly."""
    _, first, count = np.unique(slots, return_index=True, return_counts=True)
    number = np.arange(len(slots)) - np.repeat(first, count)
    return (number + 0.5) / np.repeat(count, count)


def shares(count: int, weights: list[float]) -> list[int]:
    """`count` in whole numbers in proportion to the weights, none off by one or more; ties go to the first."""
    exact = [count * weight / sum(weights) for weight in weights]
    whole = [int(part) for part in exact]
    by_rest = sorted(range(len(weights)), key=lambda at: (whole[at] - exact[at], at))
    for at in by_rest[: count - sum(whole)]:
        whole[at] += 1
    return whole


def spread(counts: list[int], phase: float = 0.0) -> list[int]:
    """Each position as often as it counts, as evenly over the turns as can be; owners of other phases begin elsewhere."""
    total = sum(counts)
    turns = sorted((((k + 0.5) / count, at) for at, count in enumerate(counts) for k in range(count)))
    begin = int(phase * total)
    return [turns[(begin + k) % total][1] for k in range(total)]


def pass_s(seats: Seats, cluster: Cluster, device: int) -> float:
    """Seconds between two microbatches at a replica: its compute, or what it is sent and sends on its own lines."""
    asked, (handed_on, handed) = request_bytes(seats), handed_bytes(seats)
    stage, machine = seats.stage_of[device], cluster.devices[device]
    foreign = 1 - 1 / len(seats.seated)
    down_s = (asked[stage] * foreign + handed[stage]) / machine.down_Bps if machine.down_Bps else 0.0
    up_s = handed_on[stage] / machine.up_Bps if machine.up_Bps else 0.0
    return max(hop_s(seats, device), down_s, up_s)


def link_s(seats: Seats, cluster: Cluster, owner: int, device: int, stage: int) -> float:
    """Seconds that one microbatch of that owner spends on links for a stage served there, forward and backward. Roughly:
    what neighbours hand over is taken to come from where the owner is, and to go there."""
    handed_on, handed = handed_bytes(seats)
    if owner == device:
        return 0.0
    there_s, back_s = handed[stage] / _Bps(cluster, owner, device), handed_on[stage] / _Bps(cluster, device, owner)
    return asked_s(seats, cluster, owner, device, stage) + there_s + back_s


def asked_s(seats: Seats, cluster: Cluster, owner: int, device: int, stage: int) -> float:
    """Of that what passes between the owner and who serves."""
    if owner == device:
        return 0.0
    asked = request_bytes(seats)
    turns = 1 if stage == seats.stages - 1 else 2
    there_s = asked[stage] / _Bps(cluster, owner, device) + turns * cluster.delay_s[owner, device]
    return float(there_s + turns * cluster.delay_s[device, owner])


def _handed_s(seats: Seats, cluster: Cluster, one: int, other: int) -> float:
    """Of a boundary tensor from one stage's to the next one's, and of its gradient back."""
    there_s = seats.boundary_bytes / _Bps(cluster, one, other) + cluster.delay_s[one, other]
    return float(there_s + seats.back_bytes / _Bps(cluster, other, one) + cluster.delay_s[other, one])


def _Bps(cluster: Cluster, source: int, target: int) -> float:
    lines = (
        cluster.devices[source].up_Bps,
        cluster.devices[target].down_Bps,
        float(cluster.bandwidth_Bps[source, target]),
    )
    return min(line for line in lines if line)
