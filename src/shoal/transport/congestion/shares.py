"""What part of this machine's downlink each sender of bulk may use. For receiver.py, which tells them.

Without it each sender's BBR looks for its part by overrunning the line, and learns of a sender that has ended only seconds later: on lines
that change their senders several times a second it believes in too little, and the line is idle. So a sender says with each fragment how
much waits behind it, what its own uplink leaves for it and what queue it sees; the receiver knows its line by what arrives while there is
a queue, divides it max-min fairly among those that have something to send, and tells each its part.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.core.messages import Peer

ROUND_S = 0.1  # at least, between two looks
QUEUE_S = 0.03  # common to all senders: the line is full
DRAIN_S = 0.5  # in which a queue is to be gone
LEAST_FACTOR = 0.7  # of what arrives, however long the queue is
# Of the line in a round at least, while it is not used and there is a queue, unless that is longer: it may be on the senders' side
UNUSED_FACTOR, LONG_QUEUE_S = 0.99, 0.25
FULL_ROUNDS = 3  # with a queue, before the line is known for the first time
GROWTH, FAST_GROWTH, FREE_ROUNDS = 1.04, 1.1, 5  # of a line that is used and has no queue; after so many rounds of it
GROWN = 1.06  # times the highest rate of arrival of BEST_S it may be by that: a queue shows a round trip late
USED = 0.85  # of the line: it is used
RATE_ROUNDS = 3  # that make a rate: what waited for a lost segment comes at once
RATES_S = 2.0  # whose highest rate of arrival counts
BEST_S, LEAST_PART = 30.0, 1 / 16  # and of the highest of that time the line carries at least this part
RAISED, LOWERED = 1.1, 0.95  # a share that has changed as much is told at once
RENEW_S = 0.25  # and any other after this time
SHARE_S = 1.5  # after which a sender no longer believes in a share
LEAST_BPS = 16e3
QUEUE_KNOWN_S = 0.5  # since the last round
SILENT_S = 1.0  # without a byte: the sender does not send
WANT = 2.0  # times what came from a sender lately: it is given no more, or it could hold a part that it does not use
LEAST_WANT = 1 / 4  # of an equal part: whatever a sender says, and what little came


class Report(NamedTuple):
    """Of a sender, with a fragment. `left_bytes`: wait behind it. `most_Bps`: what its uplink leaves for this way; inf: unknown.
    `queue_s`: the round trip, less the shortest; inf: unknown."""

    left_bytes: int
    most_Bps: float
    queue_s: float


class Share(NamedTuple):
    peer: Peer
    rate_Bps: float


@dataclass
class SharingSender:
    report: Report
    since: float  # it has something to send; inf: it has not
    arrived_at: float  # its last bytes
    nbytes: int = 0  # in this round
    rates_Bps: deque[tuple[float, float]] = field(default_factory=deque)  # of rounds
    told_Bps: float = math.inf
    told_at: float = -math.inf

    def want_Bps(self, equal_Bps: float, now: float) -> float:
        most_Bps = self.report.most_Bps
        if now - self.since > RATES_S and self.rates_Bps:
            most_Bps = min(most_Bps, WANT * self.rates_Bps[0][1])
        return max(most_Bps, LEAST_WANT * equal_Bps)


class Shares:
    """Times are the caller's, in seconds. One thread."""

    def __init__(self, own_queue_s: Callable[[float], float | None] = lambda now: None) -> None:
        """`own_queue_s`: in this machine's downlink (downlink.py); None: what its senders see must do."""
        self._own_queue_s = own_queue_s
        self.line_Bps = math.inf  # until it was full
        self._senders: dict[Peer, SharingSender] = {}
        self._round_at = 0.0
        self._rates_Bps: deque[tuple[float, float]] = deque()  # when, of some rounds together
        self._came: deque[tuple[int, float]] = deque(maxlen=RATE_ROUNDS)  # in the last rounds: bytes, seconds
        self._full = self._free = 0  # rounds in a row
        self._queue_s = 0.0  # in the last round, common to all senders

    def heard(self, peer: Peer, report: Report, now: float) -> None:
        """A fragment's head has come."""
        if not self._active(now):
            self._came.clear()
            self._begin(now)
        sender = self._senders.get(peer)
        if sender is None:
            sender = self._senders[peer] = SharingSender(report, now, now)
        if math.isinf(sender.since):
            sender.since = now
        sender.report, sender.arrived_at = report, now

    def arrived(self, peer: Peer, nbytes: int, now: float) -> None:
        sender = self._senders.get(peer)
        if sender is not None:
            sender.nbytes += nbytes
            sender.arrived_at = now

    def ended(self, peer: Peer) -> None:
        """A fragment is whole."""
        sender = self._senders.get(peer)
        if sender is not None and not sender.report.left_bytes:
            sender.since = math.inf

    def forget(self, peer: Peer) -> None:
        self._senders.pop(peer, None)

    def told(self, now: float) -> list[Share]:
        """What is to be told, now: of those whose share has changed, or was told a while ago."""
        if now - self._round_at < ROUND_S:
            return []
        active = self._active(now)
        self._look(active, now)
        self._begin(now)
        parts = {} if math.isinf(self.line_Bps) else self._divided(active, now)
        # Who has nothing to send may begin with what would be its part
        first_Bps = self.line_Bps / (len(active) + 1)
        tells = []
        for peer, sender in self._senders.items():
            rate_Bps = max(LEAST_BPS, parts.get(peer, first_Bps))
            due = peer in active and now - sender.told_at >= RENEW_S
            if due or not LOWERED * sender.told_Bps <= rate_Bps <= RAISED * sender.told_Bps:
                sender.told_Bps, sender.told_at = rate_Bps, now
                tells.append(Share(peer, rate_Bps))
        return tells

    def queue_s(self, now: float) -> float:
        """In this machine's downlink: acknowledgements of what it sends itself wait there, too."""
        return self._queue_s if now - self._round_at < QUEUE_KNOWN_S else 0.0

    def _active(self, now: float) -> dict[Peer, SharingSender]:
        return {
            peer: each
            for peer, each in self._senders.items()
            if not math.isinf(each.since) and now - each.arrived_at < SILENT_S
        }

    def _begin(self, now: float) -> None:
        self._round_at = now
        for sender in self._senders.values():
            sender.nbytes = 0

    def _look(self, active: dict[Peer, SharingSender], now: float) -> None:
        passed_s = now - self._round_at
        self._came.append((sum(each.nbytes for each in self._senders.values()), passed_s))
        arrived_Bps = sum(nbytes for nbytes, _ in self._came) / sum(seconds for _, seconds in self._came)
        for sender in self._senders.values():
            _add(sender.rates_Bps, sender.nbytes / passed_s, now, RATES_S)
        _add(self._rates_Bps, arrived_Bps, now, BEST_S)
        queues_s = [each.report.queue_s for each in active.values() if not math.isinf(each.report.queue_s)]
        own_s = self._own_queue_s(now)
        if own_s is not None:
            queues_s = [own_s]
        if not queues_s:
            self._queue_s = 0.0
            return
        queue_s = self._queue_s = min(queues_s)
        if queue_s > QUEUE_S:
            self._full, self._free = self._full + 1, 0
            if self._full >= FULL_ROUNDS or not math.isinf(self.line_Bps):
                self._lower(arrived_Bps, queue_s, now)
        else:
            self._full = 0
            if queue_s < QUEUE_S / 2 and arrived_Bps > USED * self.line_Bps:
                self._free += 1
                growth = FAST_GROWTH if self._free > FREE_ROUNDS else GROWTH
                self.line_Bps = max(self.line_Bps, min(growth * self.line_Bps, GROWN * self._rates_Bps[0][1]))

    def _lower(self, arrived_Bps: float, queue_s: float, now: float) -> None:
        least_Bps = LEAST_PART * max(rate for _, rate in self._rates_Bps)
        if queue_s < LONG_QUEUE_S:
            if arrived_Bps < USED * self.line_Bps < math.inf:
                least_Bps = max(least_Bps, UNUSED_FACTOR * self.line_Bps)
            arrived_Bps = max(rate for at, rate in self._rates_Bps if at > now - RATES_S)
        factor = max(LEAST_FACTOR, 1 - (queue_s - QUEUE_S) / DRAIN_S)
        self.line_Bps = max(arrived_Bps * factor, least_Bps, LEAST_BPS)

    def _divided(self, active: dict[Peer, SharingSender], now: float) -> dict[Peer, float]:
        """Max-min fairly; what all together do not want is theirs, too, in proportion."""
        equal_Bps = self.line_Bps / max(1, len(active))
        wants_Bps = [each.want_Bps(equal_Bps, now) for each in active.values()]
        parts = dict(zip(active, max_min(self.line_Bps, wants_Bps), strict=True))
        scale = self.line_Bps / sum(parts.values()) if parts else 1.0
        return {peer: part * scale for peer, part in parts.items()}


def max_min(line_Bps: float, wants_Bps: Sequence[float]) -> list[float]:
    """What each gets of a line: no more than it wants, and what that leaves is divided equally among the others."""
    parts = [0.0] * len(wants_Bps)
    for place, index in enumerate(sorted(range(len(wants_Bps)), key=wants_Bps.__getitem__)):
        parts[index] = min(wants_Bps[index], line_Bps / (len(wants_Bps) - place))
        line_Bps -= parts[index]
    return parts


def _add(rates_Bps: deque[tuple[float, float]], rate_Bps: float, now: float, keep_s: float) -> None:
    """Older and lower ones will never be the highest."""
    while rates_Bps and rates_Bps[0][0] <= now - keep_s:
        rates_Bps.popleft()
    while rates_Bps and rates_Bps[-1][1] <= rate_Bps:
        rates_Bps.pop()
    rates_Bps.append((now, rate_Bps))
