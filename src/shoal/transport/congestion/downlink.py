"""The queue in this machine's downlink, by how long what its receivers say is on its way.

A round trip passes four queues, an uplink and a downlink at each end, and no round trip tells them apart: a machine whose own uplink was
full took that for its downlink, and told its senders to be slow. But a receiver says when it has sent each share (shares.py), by a clock of
its own. What one takes longer than the quickest of the last minute it has waited in that receiver's uplink or in this downlink, and what
all of them have waited was in this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

BASE_S = 60.0  # whose quickest counts: clocks drift apart by milliseconds in a minute
FRESH_S = 0.3  # whose quickest is now: a program reads late
KNOWN_S = 0.5  # since the last one
MOST_WORDS = 1024  # of one way that are kept: ten a second for more than BASE_S


class DownlinkQueue:
    """Times are the caller's, in seconds. `heard` in one thread, `queue_s` in any."""

    def __init__(self) -> None:
        self._ways: dict[Hashable, Way] = {}
        self._known = (0.0, float("-inf"))  # queue, and when

    def heard(self, way: Hashable, sent_s: float, now: float) -> None:
        """`sent_s`: by the other side's clock."""
        self._ways.setdefault(way, Way()).heard(now - sent_s, now)
        for other in [each for each, known in self._ways.items() if known.heard_at < now - BASE_S]:
            del self._ways[other]
        fresh = [known.queue_s for known in self._ways.values() if known.heard_at > now - FRESH_S]
        self._known = (min(fresh), now)

    def queue_s(self, now: float) -> float | None:
        """None: nothing was heard lately."""
        queue_s, at = self._known
        return queue_s if now - at < KNOWN_S else None


class Way:
    """From one receiver to this machine."""

    def __init__(self) -> None:
        self.heard_at = 0.0
        # When, and how long: what is quicker than all after it
        self._base = deque[tuple[float, float]](maxlen=MOST_WORDS)
        self._fresh = deque[tuple[float, float]](maxlen=MOST_WORDS)

    def heard(self, took_s: float, now: float) -> None:
        self.heard_at = now
        for quickest, keep_s in ((self._base, BASE_S), (self._fresh, FRESH_S)):
            while quickest and quickest[0][0] <= now - keep_s:
                quickest.popleft()
            while quickest and quickest[-1][1] >= took_s:
                quickest.pop()
            quickest.append((now, took_s))

    @property
    def queue_s(self) -> float:
        return self._fresh[0][1] - self._base[0][1]
