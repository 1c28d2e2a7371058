"""The simulated network: when a message arrives at another peer, or that it never does.

Within the transport's contract (transport/base.py) control, and each rank of bulk, are in order from one peer to another; a
sender's uplink passes one blob after the other, those of a higher rank first; anything may vanish. Where peers have lines of their
own (lines.py), `arrivals` is asked when a blob has left its sender's, and says when it is at its target's; elsewhere histories stay what
they were. Faults come on top: drops, delays, cuts, and, for scenarios that ask for it, duplicates and reordering that no transport is
allowed. Every draw comes from one stream.
"""

from __future__ import annotations

import math
from random import Random

import msgspec

from shoal.core.messages import RANKS, Peer
from shoal.sim.lines import Wire
from shoal.sim.scenarios.scenario import Messages, Scenario

CLEAN = Messages()
NEAR_S, FAR_S = (0.001, 0.01), (0.04, 0.16)  # delays within a region and between two
LATE = 0.2  # of a link's delay: up to so much longer may a message take
FAR_Bps = 5e6  # what passes between two peers of different regions


def region(peer: Peer, regions: int) -> int:
    """Where a simulated peer is: `p7.2` is the third process of key 7."""
    return int(peer[1 : peer.index(".")]) % regions


class SimulatedLink(msgspec.Struct):
    """From one peer to another: its delay, and when the last message of each class arrives."""

    delay_s: float
    bandwidth_Bps: float = math.inf  # of this pair, beside both lines
    last_s: list[float] = msgspec.field(default_factory=lambda: [0.0] * (1 + RANKS))  # control, then bulk by rank


class Network:
    """`faults` is what may happen to a message now; `cut` holds the pairs (from, to) between which nothing passes."""

    def __init__(self, scenario: Scenario, rng: Random, regions: int = 1, wire: Wire | None = None) -> None:
        self.faults = CLEAN
        self.cut: set[tuple[Peer, Peer]] = set()
        self._scenario = scenario
        self._regions = regions
        self._rng = rng
        self._links: dict[tuple[Peer, Peer], SimulatedLink] = {}
        self._uplinks: dict[
            Peer, tuple[float, list[float]]
        ] = {}  # its bandwidth, and when the last blob of each rank has left it
        self._wire = wire

    def arrivals(self, source: Peer, target: Peer, nbytes: int, now: float, rank: int = 0) -> tuple[float, ...]:
        """When the message arrives: nothing if it is lost, twice if it is doubled. `nbytes` 0: a control message. With lines of their own
        it is at the target's line then, and has left its sender's `now`."""
        draw, pair, lane = self._rng.random, (source, target), 0
        link = self._links.get(pair)
        if link is None:
            link = self._links[pair] = self._link(source, target)
        if self.cut and pair in self.cut:
            return ()
        at = now + link.delay_s * (1.0 + LATE * draw())
        if nbytes:
            lane = 1 + rank
            at += nbytes / link.bandwidth_Bps
            if self._wire is None:
                at += self._wait(source, nbytes, now, rank)
        faults = self.faults
        if faults is CLEAN:
            last_s = link.last_s  # as `_order`, of most messages
            if at < last_s[lane]:
                at = last_s[lane]
            last_s[lane] = at
            return (at,)
        if draw() < faults.drop:
            return ()
        if draw() < faults.delay:
            at += 3.0 * draw()
        if draw() < faults.reorder:
            return (at + 2.0 * draw(),)
        at = self._order(link, at, lane)
        return (at, at + 3.0 * draw()) if draw() < faults.duplicate else (at,)

    def part(self, groups: tuple[tuple[Peer, ...], tuple[Peer, ...]], both: bool) -> list[tuple[Peer, Peer]]:
        """Cut from the first group to the second, and back if `both`. Returns the pairs, for `join`."""
        pairs = [(a, b) for a in groups[0] for b in groups[1] if a != b]
        pairs += [(b, a) for a, b in pairs] if both else []
        self.cut.update(pairs)
        return pairs

    def join(self, pairs: list[tuple[Peer, Peer]]) -> None:
        self.cut.difference_update(pairs)

    def heal(self) -> None:
        self.faults = CLEAN
        self.cut.clear()

    def _link(self, source: Peer, target: Peer) -> SimulatedLink:
        known = self._wire.link(source, target) if self._wire is not None else None
        if known is not None:
            return SimulatedLink(*known)
        if self._regions == 1:
            return SimulatedLink(self._rng.uniform(*self._scenario.delay_s))
        far = region(source, self._regions) != region(target, self._regions)
        return SimulatedLink(self._rng.uniform(*(FAR_S if far else NEAR_S)), FAR_Bps if far else math.inf)

    def _wait(self, source: Peer, nbytes: int, now: float, rank: int) -> float:
        """Seconds until the sender's uplink has passed these bytes, after what waits there and goes first. What goes after it
        is late for that only if it is sent later: the others' arrival is settled."""
        uplink = self._uplinks.get(source)
        if uplink is None:
            uplink = self._uplinks[source] = self._line_rate(), [0.0] * RANKS
        bandwidth_Bps, free_s = uplink
        seconds = nbytes / bandwidth_Bps
        free_s[rank] = left = max(max(free_s[: rank + 1]), now) + seconds
        for lower in range(rank + 1, RANKS):
            if free_s[lower] > now:
                free_s[lower] += seconds
        return left - now

    def _line_rate(self) -> float:
        low, high = self._scenario.bandwidth_Bps
        return float(low * (high / low) ** self._rng.random())

    def _order(self, link: SimulatedLink, at: float, lane: int) -> float:
        last_s = link.last_s
        if at < last_s[lane]:
            return last_s[lane]
        last_s[lane] = at
        return at
