"""The simulated network: when a message arrives at another peer, or that it never does.

Within the transport's contract (transport/base.py) control and bulk are two streams per pair of peers, each in order; a
sender's uplink passes one blob after the other; anything may vanish. Faults come on top: drops, delays, cuts, and, for
scenarios that ask for it, duplicates and reordering that no transport is allowed. Every draw comes from one stream.
"""

from __future__ import annotations

from random import Random

import msgspec

from shoal.core.messages import Peer
from shoal.sim.scenario import Messages, Scenario

CLEAN = Messages()


class Link(msgspec.Struct):
    """From one peer to another: its delay, and when the last message of each class arrives."""

    delay_s: float
    control_s: float = 0.0
    bulk_s: float = 0.0


class Uplink(msgspec.Struct):
    bandwidth_Bps: float
    free_s: float = 0.0


class Network:
    """`faults` is what may happen to a message now; `cut` holds the pairs (from, to) between which nothing passes."""

    def __init__(self, scenario: Scenario, rng: Random) -> None:
        self.faults = CLEAN
        self.cut: set[tuple[Peer, Peer]] = set()
        self._scenario = scenario
        self._rng = rng
        self._links: dict[tuple[Peer, Peer], Link] = {}
        self._uplinks: dict[Peer, Uplink] = {}

    def arrivals(self, source: Peer, target: Peer, nbytes: int, now: float) -> tuple[float, ...]:
        """When the message arrives: nothing if it is lost, twice if it is doubled. `nbytes` 0: a control message."""
        draw = self._rng.random
        link = self._links.get((source, target))
        if link is None:
            link = self._links[(source, target)] = Link(self._rng.uniform(*self._scenario.delay_s))
        if self.cut and (source, target) in self.cut:
            return ()
        at = now + link.delay_s * (1.0 + 0.2 * draw())
        if nbytes:
            at += self._wait(source, nbytes, now)
        faults = self.faults
        if faults is CLEAN:
            return (self._order(link, at, bool(nbytes)),)
        if draw() < faults.drop:
            return ()
        if draw() < faults.delay:
            at += 3.0 * draw()
        if draw() < faults.reorder:
            return (at + 2.0 * draw(),)
        at = self._order(link, at, bool(nbytes))
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

    def _wait(self, source: Peer, nbytes: int, now: float) -> float:
        """Seconds until the sender's uplink has passed these bytes, after what already waits there."""
        uplink = self._uplinks.get(source)
        if uplink is None:
            low, high = self._scenario.bandwidth_Bps
            uplink = self._uplinks[source] = Uplink(low * (high / low) ** self._rng.random())
        uplink.free_s = max(uplink.free_s, now) + nbytes / uplink.bandwidth_Bps
        return uplink.free_s - now

    def _order(self, link: Link, at: float, bulk: bool) -> float:
        if bulk:
            link.bulk_s = at = max(at, link.bulk_s)
        else:
            link.control_s = at = max(at, link.control_s)
        return at
