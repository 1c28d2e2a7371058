"""The lines of a predicted step: when a message that is sent now has arrived."""

from __future__ import annotations

import math

import numpy as np

from shoal.planner.inputs.cluster import Cluster
from shoal.slots import Inflow


class Lines:
    """Uplinks, downlinks and pairs: when what is sent now has arrived."""

    def __init__(self, cluster: Cluster) -> None:
        devices = len(cluster.devices)
        self._delay = cluster.delay_s.tolist()
        self._pair = cluster.bandwidth_Bps.tolist()
        self._up = [device.up_Bps or math.inf for device in cluster.devices]
        self._down = [device.down_Bps or math.inf for device in cluster.devices]
        self._up_free = [0.0] * devices
        self._inflow = [Inflow() for _ in cluster.devices]
        self._pair_free: dict[tuple[int, int], float] = {}
        self.up_used, self.down_used, self.sent = np.zeros(devices), np.zeros(devices), np.zeros(devices)

    def free(self, source: int) -> float:
        """When all that was sent so far has left."""
        return self._up_free[source]

    def leave(self, source: int, target: int, nbytes: float, now: float) -> float:
        """When its last byte reaches the target's line."""
        if source == target:
            return now
        up, pair = self._up[source], self._pair[source][target]
        start = max(now, self._up_free[source])
        self._up_free[source] = left = start + nbytes / up
        # The pair's link takes bytes as they leave the uplink, and holds nobody else up.
        through = max(max(start, self._pair_free.get((source, target), 0.0)) + nbytes / pair, left)
        self._pair_free[source, target] = through
        self.up_used[source] += nbytes / (pair if up == math.inf else up)
        self.sent[source] += nbytes
        return float(through + self._delay[source][target])

    def control(self, source: int, target: int, now: float) -> float:
        """When a control message is there: it waits behind no tensor."""
        return now if source == target else float(now + self._delay[source][target])

    def arrive(self, source: int, target: int, nbytes: float, now: float) -> float:
        """When it has passed the target's line; a message alone and no faster than the line is not held."""
        seconds = nbytes / self._down[target]
        self.down_used[target] += seconds
        return self._inflow[target].through(source, seconds, now)
