"""Planned wiring: which replica serves each microbatch of each owner, stage by stage. For strategy.py; core follows it.

Paper: DT-FM (arXiv 2206.01288) matches the devices of neighbouring stages so that the hops between them take near links.
Where hops go through the microbatch's owner the sides that are matched are owners and replicas: every replica gets as many
microbatches as its compute and its lines can pass beside the others', and of all such assignments the one with the least time
on links is taken, by scipy's solver for assignment problems. With direct hops tensors pass between replicas of neighbouring
stages, as in the paper: stage by stage, microbatches are assigned anew beside what their neighbours have, until nothing gets shorter.
That spends less time on links and lets replicas wait for one another more, so both are priced by playing them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped, unused-ignore]

from shoal.planner.cluster import Cluster
from shoal.planner.cost import Floats
from shoal.planner.step import Routing, Seats, handed_bytes, hop_bytes, hop_s

SWEEPS = 4  # over the stages; what gets shorter does so in the first two
EVENLY = 1e-3  # of a microbatch's seconds on links is what being a step early or late for an even turn counts
PATTERN = 256  # microbatches that are assigned one by one; a longer step repeats their pattern


def planned(seats: Seats, cluster: Cluster, neighbours: bool = False) -> Routing:
    """By owner's device and stage: the devices that serve its microbatches, in turn. Empty for devices that have no seat. With direct
    hops, `neighbours`: near one another, not only to the owner; less on links, and less even over time, so a caller plays both."""
    owners = seats.seated
    count = min(seats.microbatches, max(PATTERN // len(owners), 1) * len(owners))
    slots = []  # of each stage: who serves, as often as it does
    for stage in range(seats.stages):
        group = seats.replicas(stage)
        quotas = shares(count, [1 / pass_s(seats, cluster, device) for device in group])
        slots.append([device for device, quota in zip(group, quotas, strict=True) for _ in range(quota)])
    ways = [_by_owners(seats, cluster, owners, stage, slots[stage]) for stage in range(seats.stages)]
    if neighbours and seats.direct and count >= len(owners):
        ways = _by_neighbours(seats, cluster, owners, ways)
    return tuple(
        tuple(tuple(ways[stage][owners.index(device)]) for stage in range(seats.stages)) if device in owners else ()
        for device in range(len(seats.stage_of))
    )


def _by_owners(seats: Seats, cluster: Cluster, owners: list[int], stage: int, slots: list[int]) -> list[list[int]]:
    """By owner: who serves its microbatches at that stage, in turn."""
    group = seats.replicas(stage)
    cost_s = np.array([[link_s(seats, cluster, owner, device, stage) for device in group] for owner in owners])
    columns_of = [group.index(device) for device in slots]
    rows, columns = linear_sum_assignment(cost_s[np.arange(len(slots)) % len(owners)][:, columns_of])
    served = [[0] * len(group) for _ in owners]
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        served[row % len(owners)][columns_of[column]] += 1
    turns = [spread(counts, number / len(owners)) for number, counts in enumerate(served)]
    return [
        [group[at] for at in turns[number]] or [group[int(cost_s[number].argmin())]] for number in range(len(owners))
    ]


def _by_neighbours(
    seats: Seats, cluster: Cluster, owners: list[int], ways: list[list[list[int]]]
) -> list[list[list[int]]]:
    """The same with each microbatch's replicas near one another: owner k's microbatch i is served by ways[stage][k][i]. A replica serves as
    often as before; of assignments that cost the same, those are kept that let nobody serve twice in a row."""
    members = seats.members
    own_s, near_s = (
        np.zeros((seats.stages, len(seats.stage_of), len(seats.stage_of))),
        np.zeros((len(seats.stage_of),) * 2),
    )
    for one in members:
        for other in members:
            if one != other:
                near_s[one, other] = _handed_s(seats, cluster, one, other)
                for stage in range(seats.stages):
                    own_s[stage, one, other] = asked_s(seats, cluster, one, other, stage)
    each = [len(turns) for turns in ways[0]]
    owner_of = np.repeat(owners, each)
    at = np.concatenate([(np.arange(turns) + 0.5) / turns for turns in each])  # when in the step
    served = [np.concatenate([np.array(turns) for turns in stage]) for stage in ways]
    for _ in range(SWEEPS):
        shorter = False
        for stage in range(seats.stages):
            slots = np.sort(served[stage])
            cost_s = own_s[stage][owner_of][:, slots]
            if stage:
                cost_s = cost_s + near_s[served[stage - 1]][:, slots]
            if stage < seats.stages - 1:
                cost_s = cost_s + near_s[slots][:, served[stage + 1]].T
            now_s = cost_s[
                np.arange(len(slots)), np.argsort(np.argsort(served[stage], kind="stable"), kind="stable")
            ].sum()
            late = np.abs(at[:, None] - _spread_at(slots)[None, :])
            rows, columns = linear_sum_assignment(cost_s + EVENLY * (now_s / len(slots) or 1.0) * late)
            if cost_s[rows, columns].sum() < now_s * (1 - 1e-9):
                served[stage], shorter = slots[columns], True
        if not shorter:
            break
    bounds = np.cumsum(each)[:-1]
    return [[turns.tolist() for turns in np.split(stage, bounds)] for stage in served]


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
    (asked, answered), (handed_on, handed) = hop_bytes(seats), handed_bytes(seats)
    stage, machine = seats.stage_of[device], cluster.devices[device]
    foreign = 1 - 1 / len(seats.seated)
    down_s = (asked[stage] * foreign + handed[stage]) / machine.down_Bps if machine.down_Bps else 0.0
    up_s = (answered[stage] * foreign + handed_on[stage]) / machine.up_Bps if machine.up_Bps else 0.0
    return max(hop_s(seats, device), down_s, up_s)


def link_s(seats: Seats, cluster: Cluster, owner: int, device: int, stage: int) -> float:
    """Seconds that one microbatch of that owner spends on links for a stage served there, forward and backward. Roughly with
    direct hops: what neighbours hand over is taken to come from where the owner is, and to go there."""
    handed_on, handed = handed_bytes(seats)
    if owner == device:
        return 0.0
    there_s, back_s = handed[stage] / _Bps(cluster, owner, device), handed_on[stage] / _Bps(cluster, device, owner)
    return asked_s(seats, cluster, owner, device, stage) + there_s + back_s


def asked_s(seats: Seats, cluster: Cluster, owner: int, device: int, stage: int) -> float:
    """Of that what passes between the owner and who serves."""
    asked, answered = hop_bytes(seats)
    turns = 1 if stage == seats.stages - 1 else 2
    there_s = asked[stage] / _Bps(cluster, owner, device) + turns * cluster.delay_s[owner, device]
    return float(there_s + answered[stage] / _Bps(cluster, device, owner) + turns * cluster.delay_s[device, owner])


def _handed_s(seats: Seats, cluster: Cluster, one: int, other: int) -> float:
    """Of a boundary tensor from one to the next stage's other, and of its gradient back."""
    there_s = seats.boundary_bytes / _Bps(cluster, one, other) + cluster.delay_s[one, other]
    return float(there_s + seats.back_bytes / _Bps(cluster, other, one) + cluster.delay_s[other, one])


def _Bps(cluster: Cluster, source: int, target: int) -> float:
    lines = (
        cluster.devices[source].up_Bps,
        cluster.devices[target].down_Bps,
        float(cluster.bandwidth_Bps[source, target]),
    )
    return min(line for line in lines if line)
