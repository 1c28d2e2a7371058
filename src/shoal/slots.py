"""When a line that sends one transfer after another is busy. For transport/emulated/shaped.py, the simulator and the planner's model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable
from functools import lru_cache

import msgspec

from shoal.core.messages import PASSED, RANKS

MAX_SPANS = 64  # older spans are forgotten, with the idle time before them
PIECES = 6000  # by which a rank's share of a full line is found


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


class RankTurns:
    """The highest waiting rank goes next, and each lower one after it was passed over as often as PASSED says: averaging fills a line for
    minutes, and a joiner's state would stand still."""

    def __init__(self) -> None:
        self._passed = [0] * RANKS

    def next(self, waiting: Collection[int]) -> int:
        return min((rank for rank in waiting if self._passed[rank] >= PASSED[rank]), default=min(waiting))

    def took(self, turn: int, waiting: Collection[int]) -> None:
        """`turn` has gone, while these waited."""
        for rank in waiting:
            if rank > turn:
                self._passed[rank] += 1
        self._passed[turn] = 0


@lru_cache
def shares_of(ranks: tuple[int, ...]) -> tuple[float, ...]:
    """Of a line, that each rank has while all of these wait."""
    turns, pieces = RankTurns(), dict.fromkeys(ranks, 0)
    for _ in range(PIECES):
        rank = turns.next(ranks)
        turns.took(rank, ranks)
        pieces[rank] += 1
    return tuple(pieces[rank] / PIECES for rank in ranks)


class Uplink(msgspec.Struct):
    """A sender's line, which passes one transfer after the other: those of a higher rank first, but for the turns that lower ones have."""

    bandwidth_Bps: float
    # When the last blob of each rank has left
    free_s: list[float] = msgspec.field(default_factory=lambda: [0.0] * RANKS)
    # What waited of each rank at `then_s`, in seconds of the whole line
    waiting_s: list[float] = msgspec.field(default_factory=lambda: [0.0] * RANKS)
    then_s: float = 0.0

    def pass_in_turn(self, rank: int, seconds: float, now: float) -> float:
        """When `seconds` of that rank will have left, as transport/streams/send_queue.py sends them."""
        waiting = self.waiting_s
        if now > self.then_s:
            if max(waiting) > 0:
                self._advance(now)
            self.then_s = now
        waiting[rank] += seconds
        taken = waiting[rank]
        taken += min(sum(waiting[:rank]), PASSED[rank] * taken) if rank else 0.0
        lower_s = 0.0
        for lower in range(rank + 1, RANKS):
            if waits_s := waiting[lower]:
                turns_s = taken / PASSED[lower]
                lower_s += waits_s if waits_s < turns_s else turns_s
        left = now + (taken + lower_s)
        if left < self.free_s[rank]:
            return self.free_s[rank]
        self.free_s[rank] = left
        return left

    def _advance(self, now: float) -> None:
        waiting, left = self.waiting_s, now - self.then_s
        while left > 0 and (ranks := [rank for rank, waits_s in enumerate(waiting) if waits_s]):
            if len(ranks) == 1:  # as mostly: it has the whole line
                rest = waiting[ranks[0]] - left
                waiting[ranks[0]] = rest if rest > 1e-9 else 0.0
                return
            shares = shares_of(tuple(ranks))
            step = min(left, *(waiting[rank] / share for rank, share in zip(ranks, shares, strict=True)))
            for rank, share in zip(ranks, shares, strict=True):
                rest = waiting[rank] - step * share
                waiting[rank] = rest if rest > 1e-9 else 0.0
            left -= step
