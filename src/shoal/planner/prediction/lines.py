"""The lines of a predicted step: when a message that is sent now has arrived."""

from __future__ import annotations

import math

import numpy as np

from shoal.planner.inputs.cluster import Cluster
from shoal.slots import Inflow, Uplink

CONTROL = -1  # before all ranks
DRAWN_AT_ONCE = 1024  # a draw alone takes as long as a message


class Lines:
    """Uplinks, downlinks and pairs: when what is sent now has arrived. `spread`: a message's delay is drawn by `rng` from this share of the
    link's around it, and overtakes none that the same pair sent before. 0: every message has the link's."""

    def __init__(self, cluster: Cluster, rng: np.random.Generator | None = None, spread: float = 0.0) -> None:
        assert rng is not None or not spread, "delays that differ are drawn"
        devices = len(cluster.devices)
        self._rng, self._spread = rng, spread
        self._drawn: list[float] = []  # of delays, as factors, to be used from the end
        self._last: dict[tuple[int, int, int], float] = {}  # arrivals by rank, and of control messages
        self._delay = cluster.delay_s.tolist()
        self._pair = cluster.bandwidth_Bps.tolist()
        self._uplinks = [Uplink(device.up_Bps or math.inf) for device in cluster.devices]
        self._down = [device.down_Bps or math.inf for device in cluster.devices]
        self._inflow = [Inflow() for _ in cluster.devices]
        self._pair_free: dict[tuple[int, int, int], float] = {}
        self.up_used, self.down_used, self.sent = np.zeros(devices), np.zeros(devices), np.zeros(devices)

    def free(self, source: int) -> float:
        """When all that was sent so far has left."""
        return max(self._uplinks[source].free_s)

    def leave(self, source: int, target: int, nbytes: float, now: float, rank: int = 0) -> float:
        """When its last byte reaches the target's line. `rank`: what goes first, 0 before 1 (core/messages.py), where delays spread; else
        all goes in the order sent."""
        if source == target:
            return now
        uplink, pair = self._uplinks[source], self._pair[source][target]
        seconds = nbytes / uplink.bandwidth_Bps
        if self._spread:
            left = uplink.pass_in_turn(rank, seconds, now)
        else:
            left = uplink.free_s[rank] = max(now, *uplink.free_s) + seconds
        # The pair's link takes bytes as they leave the uplink, and holds nobody else up.
        through = max(max(left - seconds, self._pair_free.get((source, target, rank), 0.0)) + nbytes / pair, left)
        self._pair_free[source, target, rank] = through
        self.up_used[source] += seconds or nbytes / pair
        self.sent[source] += nbytes
        return self._after(source, target, through, rank)

    def control(self, source: int, target: int, now: float) -> float:
        """When a control message is there: it waits behind no tensor."""
        return now if source == target else self._after(source, target, now, CONTROL)

    def delay_s(self, source: int, target: int) -> float:
        """The link's own."""
        return 0.0 if target == source else float(self._delay[source][target])

    def farthest(self, source: int, targets: list[int]) -> float:
        """The longest delay to one of them."""
        return max(self.delay_s(source, target) for target in targets)

    def arrive(self, source: int, target: int, nbytes: float, now: float, rank: int = 0) -> float:
        """When it has passed the target's line; a message alone and no faster than the line is not held."""
        seconds = nbytes / self._down[target]
        self.down_used[target] += seconds
        return self._inflow[target].through(source, seconds, now, rank)

    def _after(self, source: int, target: int, now: float, rank: int) -> float:
        """The pair's delay later."""
        delay_s = float(self._delay[source][target])
        if self._rng is None or not self._spread:
            return now + delay_s
        if not self._drawn:
            low, high = 1 - self._spread, 1 + self._spread
            self._drawn = self._rng.uniform(low, high, DRAWN_AT_ONCE).tolist()
        key = source, target, rank
        self._last[key] = at = max(now + delay_s * self._drawn.pop(), self._last.get(key, 0.0))
        return at
