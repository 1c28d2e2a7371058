"""Virtual time: a heap of (time, serial, action, argument), for everything else in sim/.

Ties are broken by the serial number, so that one seed is one history. Nothing is ever removed from the heap: whoever
schedules a timer that may be overtaken checks on arrival whether it still counts.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[[Any], None]


class Kernel:
    """`now` is the virtual second; `events` counts what has been carried out."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.stopped = False
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._serial = 0

    def at(self, time: float, action: Action, argument: Any = None) -> None:
        """Carry out `action(argument)` at `time`; a time gone by means now, after what is already due."""
        self._serial += 1
        heappush(self._heap, (time if time > self.now else self.now, self._serial, action, argument))

    def after(self, seconds: float, action: Action, argument: Any = None) -> None:
        self.at(self.now + seconds, action, argument)

    def stop(self) -> None:
        """No further action is carried out."""
        self.stopped = True

    def run(self, until: float, events: int) -> None:
        """Carry out everything due up to `until`, at most `events` actions in all."""
        heap = self._heap
        while heap and not self.stopped and self.events < events:
            if heap[0][0] > until:
                self.now = until
                return
            self.now, _, action, argument = heappop(heap)
            self.events += 1
            action(argument)
