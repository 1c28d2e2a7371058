"""When a line that passes one thing after another was and will be busy. For transport/emulated/shaped.py and the planner's model of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable

KEPT = 64  # spans; idle time before the oldest is forgotten


class Slots:
    """Spans of time that are taken: disjoint, in order."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def take(self, start: float, seconds: float) -> float:
        """Take that much of what is free from `start` on; when the last of it is over.

        So whatever came while something else was on its way takes its own time from it, and no more: nothing idles that has work."""
        first = at = bisect_left(self._ends, start)  # of the spans that end there or later
        now, left = start, seconds
        while at < len(self._begins) and now + left > self._begins[at]:
            left -= max(0.0, self._begins[at] - now)
            now = max(now, self._ends[at])
            at += 1
        end = now + left
        begins = min(start, self._begins[first]) if first < at else start
        self._begins[first:at], self._ends[first:at] = [begins], [end]
        del self._begins[:-KEPT], self._ends[:-KEPT]
        return end


class Inflow:
    """A line that takes what several others send, while it comes: nobody says when the first byte of a message came.

    It came no faster than this line takes it, and not before the sender's last message of its rank or a later one had come: those
    pass a sender's own line one after the other. So a message that comes alone is not held, two at once share the line,
    and a sender that is faster than the line is slowed to it."""

    def __init__(self) -> None:
        self._slots = Slots()
        self._came: dict[Hashable, dict[int, float]] = {}  # by sender and rank

    def through(self, sender: Hashable, seconds: float, now: float, rank: int = 0) -> float:
        """When a message that takes so many seconds, and whose last byte comes `now`, is through."""
        came = self._came.setdefault(sender, {})
        began = max([now - seconds, *(at for other, at in came.items() if other >= rank)])
        came[rank] = now
        return max(self._slots.take(began, seconds), now)
