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
        all_begins, all_ends = self._begins, self._ends
        first = at = bisect_left(all_ends, start)  # of the spans that end there or later
        now, remaining = start, seconds
        while at < len(all_begins) and now + remaining > all_begins[at]:
            remaining -= max(0.0, all_begins[at] - now)
            now = max(now, all_ends[at])
            at += 1
        end = now + remaining
        begins = min(start, all_begins[first]) if first < at else start
        all_begins[first:at], all_ends[first:at] = [begins], [end]
        if len(all_ends) > MAX_SPANS:
            del all_begins[:-MAX_SPANS], all_ends[:-MAX_SPANS]
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
        arrivals, start = self._arrivals.get(sender), now - seconds
        if arrivals is None:
            arrivals = self._arrivals[sender] = {}
        for other, at in arrivals.items():
            if other >= rank and at > start:
                start = at
        arrivals[rank] = now
        return max(self._slots.take(start, seconds), now)
