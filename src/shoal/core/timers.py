"""Deadlines by key: set one, forget one, pop those that are due, and say when the next one comes. And how far apart heartbeats are.

For machines that wait for many things at once. Setting a key again replaces its deadline; every operation is O(log n).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import msgspec

CROWD = 50  # members and joiners, from which on heartbeats come more rarely,
RARER = 2.0  # up to so many times as far apart: the leader's rules know nobody silent before 2.5 beats (FRESH_BEATS)


def beat_s(heartbeat_s: float, peers: int) -> float:
    """Between two heartbeats of a peer, and two of its leader, in a run of so many: its leader handles each of them."""
    return heartbeat_s * min(max(peers / CROWD, 1.0), RARER)


class Called(msgspec.Struct):
    """When a machine was last given an event, which leader its parts know, and its deadline then; None: it has none, or has to ask its
    parts."""

    at: float | None = None
    leader: str | None = None
    deadline: float | None = None


def soonest(*times: float | None) -> float | None:
    """The earliest of those that are set. Asked for after every event of every peer, hence a loop: a third of min()'s time."""
    first = None
    for at in times:
        if at is not None and (first is None or at < first):
            first = at
    return first


class Timers:
    """`deadline`: the next one, None without any; kept up to date, as it is asked for more often than a timer is set."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        self._serial = 0
        self._live: dict[int, int] = {}  # key -> serial of its one valid entry
        self._heap: list[tuple[float, int, int]] = []  # (time, serial, key); entries of replaced serials are skipped

    def set(self, key: int, time: float) -> None:
        self._serial += 1
        self._live[key] = self._serial
        heappush(self._heap, (time, self._serial, key))
        if len(self._heap) > 64 + 4 * len(self._live):  # mostly replaced entries: their times may be far away
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapify(self._heap)
        self._look()

    def forget(self, key: int) -> None:
        if self._live.pop(key, None) is not None:
            self._look()

    def forget_all(self) -> None:
        self._live.clear()
        self._heap.clear()
        self.deadline = None

    def pop_due(self, now: float) -> int | None:
        """A key whose deadline has come, or None; it is forgotten by being returned."""
        if self.deadline is None or self.deadline > now:
            return None
        key = heappop(self._heap)[2]
        del self._live[key]
        self._look()
        return key

    def _look(self) -> None:
        heap, live = self._heap, self._live
        while heap and live.get(heap[0][2]) != heap[0][1]:
            heappop(heap)
        self.deadline = heap[0][0] if heap else None
