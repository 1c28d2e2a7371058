"""The machines of a forecast by kind: thousands of slots, and delays and bandwidths only between kinds.

A slot is a place for one machine of its kind: machines come to it and are taken away again (churn.py). A cluster of machines that are
all unlike has as many kinds as slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from shoal.planner.costs.arrays import Floats
from shoal.planner.inputs.cluster import Cluster, Device


class Machines(msgspec.Struct, frozen=True, eq=False):
    """`delay_s` and `bandwidth_Bps` are by kind, from row to column; the diagonal is of two machines of one kind."""

    kinds: tuple[Device, ...]
    kind_of: tuple[int, ...]  # by slot
    delay_s: Floats
    bandwidth_Bps: Floats

    def cluster(self, slots: Sequence[int]) -> Cluster:
        """Those slots, each pair with its own link."""
        kinds = [self.kind_of[slot] for slot in slots]
        devices = tuple(
            msgspec.structs.replace(self.kinds[kind], name=f"p{slot}") for slot, kind in zip(slots, kinds, strict=True)
        )
        at = np.ix_(kinds, kinds)
        return Cluster(devices, self.delay_s[at], self.bandwidth_Bps[at])


def grouped(cluster: Cluster) -> Machines:
    """A cluster's devices as slots, in its order. Devices alike in all but their names, and in all their links, are of one kind."""
    number: dict[Device, int] = {}
    kind_of = tuple(
        number.setdefault(msgspec.structs.replace(device, name=""), len(number)) for device in cluster.devices
    )
    slots_of: list[list[int]] = [[] for _ in number]
    for slot, kind in enumerate(kind_of):
        slots_of[kind].append(slot)
    first = [slots[0] for slots in slots_of]
    other = [slots[-1] for slots in slots_of]
    delay_s, bandwidth_Bps = (_between(matrix, first, other) for matrix in (cluster.delay_s, cluster.bandwidth_Bps))
    at, off = np.ix_(kind_of, kind_of), ~np.eye(len(kind_of), dtype=bool)
    alike = all(
        np.array_equal(kinds[at][off], matrix[off])
        for kinds, matrix in ((delay_s, cluster.delay_s), (bandwidth_Bps, cluster.bandwidth_Bps))
    )
    if not alike:
        return Machines(cluster.devices, tuple(range(len(kind_of))), cluster.delay_s, cluster.bandwidth_Bps)
    return Machines(tuple(number), kind_of, delay_s, bandwidth_Bps)


def _between(matrix: Floats, first: list[int], other: list[int]) -> Floats:
    """By kind; the first and the last of a kind stand for any two of it."""
    kinds = matrix[np.ix_(first, first)].copy()
    np.fill_diagonal(kinds, matrix[first, other])
    return kinds
