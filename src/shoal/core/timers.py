"""Deadlines by key: set one, forget one, pop those that are due, and say when the next one comes.

For machines that wait for many things at once. Setting a key again replaces its deadline; every operation is O(log n).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush


def soonest(*times: float | None) -> float | None:
    """The earliest of those that are set. Asked for after every event of every peer, hence a loop: a third of min()'s time."""
    first = None
    for at in times:
        if at is not None and (first is None or at < first):
            first = at
    return first


class Timers:
    def __init__(self) -> None:
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

    def forget(self, key: int) -> None:
        self._live.pop(key, None)

    def forget_all(self) -> None:
        self._live.clear()
        self._heap.clear()

    def pop_due(self, now: float) -> int | None:
        """A key whose deadline has come, or None; it is forgotten by being returned."""
        deadline = self.deadline
        if deadline is None or deadline > now:
            return None
        key = heappop(self._heap)[2]
        del self._live[key]
        return key

    @property
    def deadline(self) -> float | None:
        while self._heap:
            time, serial, key = self._heap[0]
            if self._live.get(key) == serial:
                return time
            heappop(self._heap)
        return None
