"""When a line that sends one transfer after another is busy. For transport/emulated/shaped.py and the planner's model of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable

MAX_SPANS = 64  # older spans are forgotten, with the idle time before them


class Slots:
    """Busy spans of time: disjoint, in order."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def take(self, start: float, seconds: float) -> float:
        """Reserve `seconds` of free time from `start` on; returns its end.

        The line never idles while it has work: a transfer that arrives during another one delays it by no more than its own time."""
        first = at = bisect_left(self._ends, start)  # of the spans that end there or later
        now, remaining = start, seconds
        while at < len(self._begins) and now + remaining > self._begins[at]:
            remaining -= max(0.0, self._begins[at] - now)
            now = max(now, self._ends[at])
            at += 1
        end = now + remaining
        begins = min(start, self._begins[first]) if first < at else start
        self._begins[first:at], self._ends[first:at] = [begins], [end]
        del self._begins[:-MAX_SPANS], self._ends[:-MAX_SPANS]
        return end


class Inflow:
    """A downlink that receives from several senders at once; only the arrival of a message's last byte is known.

    A message arrived no faster than the line allows, and started after the sender's last message of the same or a later rank, since
    a sender's line sends one after the other. So a single message is not delayed, two at once share the line, and a sender
    faster than the line is slowed to it."""

    def __init__(self) -> None:
        self._slots = Slots()
        self._arrivals: dict[Hashable, dict[int, float]] = {}  # sender -> rank -> time

    def through(self, sender: Hashable, seconds: float, now: float, rank: int = 0) -> float:
        """When a message of `seconds`, whose last byte arrives `now`, has been received."""
        arrivals = self._arrivals.setdefault(sender, {})
        start = max([now - seconds, *(at for other, at in arrivals.items() if other >= rank)])
        arrivals[rank] = now
        return max(self._slots.take(start, seconds), now)
