"""Planned wiring: which replica serves each microbatch of each owner, stage by stage. For strategy.py; core follows it.

Paper: DT-FM (arXiv 2206.01288) matches the devices of neighbouring stages so that the hops between them take near links.
Here the sides that are matched are owners and replicas, since hops go through the microbatch's owner: every replica gets as
many microbatches as its compute and its lines can pass beside the others', and of all such assignments the one with the
least time on links is taken, by scipy's solver for assignment problems. With direct hops tensors pass between replicas
of neighbouring stages, who are matched only by way of the owner: each is priced as if the others were where the owner is.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped, unused-ignore]

from shoal.planner.cluster import Cluster
from shoal.planner.step import Routing, Seats, handed_bytes, hop_bytes, hop_s

PATTERN = 256  # microbatches that are assigned one by one; a longer step repeats their pattern


def planned(seats: Seats, cluster: Cluster) -> Routing:
    """By owner's device and stage: the devices that serve its microbatches, in turn. Empty for devices that have no seat."""
    owners = seats.seated
    count = min(seats.microbatches, max(PATTERN // len(owners), 1) * len(owners))
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for stage in range(seats.stages):
        group = seats.replicas(stage)
        quotas = shares(count, [1 / pass_s(seats, cluster, device) for device in group])
        slots = [at for at, quota in enumerate(quotas) for _ in range(quota)]
        cost_s = np.array([[link_s(seats, cluster, owner, device, stage) for device in group] for owner in owners])
        rows, columns = linear_sum_assignment(cost_s[np.arange(count) % len(owners)][:, slots])
        served = {owner: [0] * len(group) for owner in owners}
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            served[owners[row % len(owners)]][slots[column]] += 1
        for number, owner in enumerate(owners):
            turns = spread(served[owner], number / len(owners))
            found[owner, stage] = tuple(group[at] for at in turns) or (group[int(cost_s[number].argmin())],)
    return tuple(
        tuple(found[device, stage] for stage in range(seats.stages)) if device in owners else ()
        for device in range(len(seats.stage_of))
    )


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
    if owner == device:
        return 0.0
    (asked, answered), (handed_on, handed) = hop_bytes(seats), handed_bytes(seats)
    turns = 1 if stage == seats.stages - 1 else 2
    there_s = (asked[stage] + handed[stage]) / _Bps(cluster, owner, device) + turns * cluster.delay_s[owner, device]
    back_s = (answered[stage] + handed_on[stage]) / _Bps(cluster, device, owner) + turns * cluster.delay_s[
        device, owner
    ]
    return float(there_s + back_s)


def _Bps(cluster: Cluster, source: int, target: int) -> float:
    lines = (
        cluster.devices[source].up_Bps,
        cluster.devices[target].down_Bps,
        float(cluster.bandwidth_Bps[source, target]),
    )
    return min(line for line in lines if line)
