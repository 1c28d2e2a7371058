"""The lines of a predicted step: when a message that is sent now has arrived."""

from __future__ import annotations

import math

import numpy as np

from shoal.planner.inputs.cluster import Cluster
from shoal.slots import Inflow

DRAWN_AT_ONCE = 1024  # a draw alone takes as long as a message


class Lines:
    """Uplinks, downlinks and pairs: when what is sent now has arrived. `spread`: a message's delay is drawn by `rng` from this share of the
    link's around it, and overtakes none that the same pair sent before. 0: every message has the link's."""

    def __init__(self, cluster: Cluster, rng: np.random.Generator | None = None, spread: float = 0.0) -> None:
        assert rng is not None or not spread, "delays that differ are drawn"
        devices = len(cluster.devices)
        self._rng, self._spread = rng, spread
        self._drawn: list[float] = []  # of delays, as factors, to be used from the end
        self._last: dict[tuple[int, int, bool], float] = {}  # arrivals: of tensors, of control messages
        self._delay = cluster.delay_s.tolist()
        self._pair = cluster.bandwidth_Bps.tolist()
        self._up = [device.up_Bps or math.inf for device in cluster.devices]
        self._down = [device.down_Bps or math.inf for device in cluster.devices]
        self._up_free = [[0.0, 0.0] for _ in range(devices)]  # of gradients, of all else
        self._inflow = [Inflow() for _ in cluster.devices]
        self._pair_free: dict[tuple[int, int, bool], float] = {}
        self.up_used, self.down_used, self.sent = np.zeros(devices), np.zeros(devices), np.zeros(devices)

    def free(self, source: int) -> float:
        """When all that was sent so far has left."""
        return max(self._up_free[source])

    def leave(self, source: int, target: int, nbytes: float, now: float, first: bool = False) -> float:
        """When its last byte reaches the target's line. `first`: before all that is not, as far as it has not left (sim/network.py)."""
        if source == target:
            return now
        up, pair = self._up[source], self._pair[source][target]
        firsts_s, others_s = self._up_free[source]
        start = max(now, firsts_s) if first else max(now, firsts_s, others_s)
        left = start + nbytes / up
        if first:
            self._up_free[source] = [left, others_s + nbytes / up if others_s > now else others_s]
        else:
            self._up_free[source][1] = left
        # The pair's link takes bytes as they leave the uplink, and holds nobody else up.
        through = max(max(start, self._pair_free.get((source, target, first), 0.0)) + nbytes / pair, left)
        self._pair_free[source, target, first] = through
        self.up_used[source] += nbytes / (pair if up == math.inf else up)
        self.sent[source] += nbytes
        return self._after(source, target, through, True)

    def control(self, source: int, target: int, now: float) -> float:
        """When a control message is there: it waits behind no tensor."""
        return now if source == target else self._after(source, target, now, False)

    def farthest(self, source: int, targets: list[int]) -> float:
        """The longest delay to one of them."""
        return max(0.0 if target == source else float(self._delay[source][target]) for target in targets)

    def arrive(self, source: int, target: int, nbytes: float, now: float, first: bool = False) -> float:
        """When it has passed the target's line; a message alone and no faster than the line is not held."""
        seconds = nbytes / self._down[target]
        self.down_used[target] += seconds
        return self._inflow[target].through(source, seconds, now, 0 if first else 1)

    def _after(self, source: int, target: int, now: float, tensor: bool) -> float:
        """The pair's delay later."""
        delay_s = float(self._delay[source][target])
        if self._rng is None or not self._spread:
            return now + delay_s
        if not self._drawn:
            low, high = 1 - self._spread, 1 + self._spread
            self._drawn = self._rng.uniform(low, high, DRAWN_AT_ONCE).tolist()
        key = source, target, tensor
        self._last[key] = at = max(now + delay_s * self._drawn.pop(), self._last.get(key, 0.0))
        return at
