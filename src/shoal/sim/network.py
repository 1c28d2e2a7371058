"""The simulated network: when a message arrives at another peer, or that it never does.

Within the transport's contract (transport/base.py) control, and each rank of bulk, are in order from one peer to another; a
sender's uplink passes one blob after the other, those of a higher rank first; anything may vanish. Where peers have lines of their
own (lines.py), lower ranks have the turns that the transport gives them, `arrivals` says when a blob is at its target's line, and
`through` when it has passed it; elsewhere histories stay what they were. Faults come on top: drops, delays, cuts, and, for scenarios
that ask for it, duplicates and reordering that no transport is allowed. Every draw comes from one stream.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from shoal.core.messages import RANKS, Message, Peer
from shoal.sim.lines import Downlinks, Wire
from shoal.sim.scenarios.scenario import Messages, Scenario
from shoal.slots import Uplink

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


class SimulatedUplink(Uplink):
    queued_s: list[float] = msgspec.field(
        default_factory=lambda: [0.0] * RANKS
    )  # of all that is in the queue of each rank

    def unsent(self, queue: Sequence[QueuedBlobs], now: float) -> list[QueuedBlobs]:
        """Of what was queued of one rank: that of which nothing has left. What went first since may have held it up, though its arrival
        was settled when it was sent."""
        self.pass_until(now)
        rest_s, unsent = self.waiting_s[queue[0].rank], list[QueuedBlobs]()
        for queued in reversed(queue):
            held_up = queued.left_s <= now and rest_s >= queued.seconds * (1 - 1e-9)
            if held_up or queued.left_s - queued.seconds > now:
                unsent.append(queued)
            rest_s -= queued.seconds
        return unsent

    def withdraw(self, void: Sequence[QueuedBlobs], kept: Sequence[QueuedBlobs], now: float) -> None:
        """Those do not go; these do."""
        for queued in void:
            self.waiting_s[queued.rank] = max(0.0, self.waiting_s[queued.rank] - queued.seconds)
            self.queued_s[queued.rank] -= queued.seconds
            self.free_s[queued.rank] = now
        for queued in kept:
            self.free_s[queued.rank] = max(self.free_s[queued.rank], queued.left_s)


class QueuedBlobs(msgspec.Struct):
    """A message with blobs at its sender's uplink: for so many seconds, until `left_s`; then it arrives `at`. `void`: it does not go."""

    target: Peer
    message: Message
    link: SimulatedLink
    rank: int
    seconds: float
    left_s: float
    at: float
    void: bool = False


class Network:
    """`faults` is what may happen to a message now; `cut` holds the pairs (from, to) between which nothing passes."""

    def __init__(self, scenario: Scenario, rng: Random, regions: int = 1, wire: Wire | None = None) -> None:
        self.faults = CLEAN
        self.cut: set[tuple[Peer, Peer]] = set()
        self._scenario = scenario
        self._regions = regions
        self._rng = rng
        self._links: dict[tuple[Peer, Peer], SimulatedLink] = {}
        self._uplinks: dict[Peer, SimulatedUplink] = {}
        self._queued: dict[Peer, list[deque[QueuedBlobs]]] = {}  # that wait at that peer's uplink, by rank
        self._wire = wire
        if wire is not None:
            self.through = Downlinks(wire).through

    def arrivals(self, source: Peer, target: Peer, nbytes: int, now: float, rank: int = 0) -> tuple[float, ...]:
        """When the message arrives: nothing if it is lost, twice if it is doubled. `nbytes` 0: a control message."""
        draw, pair, lane = self._rng.random, (source, target), 0
        link = self._links.get(pair)
        if link is None:
            link = self._links[pair] = self._link(source, target)
        if self.cut and pair in self.cut:
            return ()
        at = now + link.delay_s * (1.0 + LATE * draw())
        if nbytes:
            lane = 1 + rank
            at += self._wait(source, nbytes, now, rank) + nbytes / link.bandwidth_Bps
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

    def left(self, source: Peer, rank: int) -> float:
        """When the last blob of that rank leaves, or has left, its sender's uplink."""
        return self._uplinks[source].free_s[rank]

    def queued(
        self, source: Peer, target: Peer, message: Message, nbytes: int, rank: int, at: float, now: float
    ) -> QueuedBlobs:
        """What was sent last, with blobs, arrives `at`."""
        uplink, queues = self._uplinks[source], self._queued.get(source)
        if queues is None:
            queues = self._queued[source] = [deque() for _ in range(RANKS)]
        queue, seconds = queues[rank], nbytes / uplink.bandwidth_Bps if uplink.bandwidth_Bps else 0.0
        waits_s, behind_s = uplink.waiting_s[rank] - seconds - 1e-9, uplink.queued_s[rank]
        while queue and queue[0].left_s <= now and waits_s <= behind_s - queue[0].seconds:
            behind_s -= queue.popleft().seconds
        uplink.queued_s[rank] = (behind_s if queue else 0.0) + seconds
        queued = QueuedBlobs(target, message, self._links[source, target], rank, seconds, uplink.free_s[rank], at)
        queue.append(queued)
        return queued

    def withdraw(self, source: Peer, voids: Callable[[Peer, Message], bool], now: float) -> float:
        """Such messages, of which nothing has left, do not go: the seconds of the line that this gives back."""
        return self._withdraw(source, lambda queued: voids(queued.target, queued.message), now)

    def forget(self, target: Peer, now: float) -> dict[Peer, float]:
        """It is dead, and connections to it carry nothing more: the seconds of their lines that the others get back."""
        return {source: self._withdraw(source, lambda queued: queued.target == target, now) for source in self._queued}

    def _withdraw(self, source: Peer, voids: Callable[[QueuedBlobs], bool], now: float) -> float:
        queues = self._queued.get(source)
        if queues is None:
            return 0.0
        uplink, void = self._uplinks[source], list[QueuedBlobs]()
        for queue in queues:
            if any(map(voids, queue)):
                void += filter(voids, uplink.unsent(queue, now))
        if not void:
            return 0.0
        for queued in void:
            queued.void = True
        self._queued[source] = [deque(queued for queued in queue if not queued.void) for queue in queues]
        kept = [queued for queue in self._queued[source] for queued in queue]
        uplink.withdraw(void, kept, now)
        for queued in void:
            queued.link.last_s[1 + queued.rank] = now
        for queued in kept:
            last_s = queued.link.last_s
            last_s[1 + queued.rank] = max(last_s[1 + queued.rank], queued.at)
        return sum(queued.seconds for queued in void)

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
            uplink = self._uplinks[source] = SimulatedUplink(self._line_rate(source))
        seconds = nbytes / uplink.bandwidth_Bps if uplink.bandwidth_Bps else 0.0
        if self._wire is not None:
            return uplink.pass_in_turn(rank, seconds, now) - now
        free_s = uplink.free_s
        free_s[rank] = left = max(max(free_s[: rank + 1]), now) + seconds
        for lower in range(rank + 1, RANKS):
            if free_s[lower] > now:
                free_s[lower] += seconds
        return left - now

    def _line_rate(self, source: Peer) -> float:
        if self._wire is not None:
            return self._wire.line(source).up_Bps
        low, high = self._scenario.bandwidth_Bps
        return float(low * (high / low) ** self._rng.random())

    def _order(self, link: SimulatedLink, at: float, lane: int) -> float:
        last_s = link.last_s
        if at < last_s[lane]:
            return last_s[lane]
        last_s[lane] = at
        return at
