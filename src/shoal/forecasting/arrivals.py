"""The machines of a forecast in order of time: there, asking to join, gone; and the hours that they are paid for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.core.messages import Peer
from shoal.forecasting.churn import Presence
from shoal.forecasting.crew import slot_of
from shoal.forecasting.job import Job

HOUR_S = 3600.0


class Arrivals:
    """Machines by time: there, asking to join once they have started, and gone. Names say slot and how many were there before. Of one
    moment those who ask come last, as they are listed: in the order of their deaths the newest member, who moves first, would be the one
    that lives longest."""

    def __init__(self, presences: Sequence[Presence], start_s: float, slots: int) -> None:
        count = [0] * slots
        events: list[tuple[float, bool, int, str, Peer]] = []
        asks: dict[int, tuple[float, bool, int, str, Peer]] = {}
        for number, presence in enumerate(presences):
            if presence.joins:
                count[presence.slot] += 1
                peer = f"p{presence.slot}.{count[presence.slot]}"
                asks[presence.slot] = (presence.at_s + start_s, True, number, "asks", peer)
                events.append((presence.at_s, False, number, "there", peer))
            else:
                asked = asks.pop(presence.slot)
                if asked[0] < presence.at_s:
                    events.append(asked)
                events.append((presence.at_s, False, number, "dies", asked[-1]))
        self._events = sorted([*events, *asks.values()])
        self._at = 0

    def next_s(self) -> float:
        return self._events[self._at][0] if self._at < len(self._events) else math.inf

    def due(self, now: float) -> list[tuple[str, Peer]]:
        first = self._at
        while self._at < len(self._events) and self._events[self._at][0] <= now:
            self._at += 1
        return [(what, peer) for *_, what, peer in self._events[first : self._at]]


class Bill:
    """Hours that machines were there, by kind."""

    def __init__(self, job: Job) -> None:
        self._job = job
        kinds = len(job.machines.kinds)
        self._there, self.hours = [0] * kinds, [0.0] * kinds

    def _kind(self, peer: Peer) -> int:
        return self._job.machines.kind_of[slot_of(peer)]

    @property
    def there(self) -> int:
        return sum(self._there)

    def come(self, peer: Peer) -> None:
        self._there[self._kind(peer)] += 1

    def go(self, peer: Peer) -> None:
        self._there[self._kind(peer)] -= 1

    def spend(self, seconds: float) -> None:
        for kind, count in enumerate(self._there):
            if count:
                self.hours[kind] += count * seconds / HOUR_S
