"""Virtual time: a heap of (time, serial, action, argument), for everything else in sim/.

Ties are broken by the serial number, so that one seed is one history. Nothing is ever removed from the heap: whoever
schedules a timer that may be overtaken checks on arrival whether it still counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[[Any], None]
# Of Python's garbage collection, whose usual ones (700, 10, 10) take 8 to 14 % of a simulation of 100 peers: of what an event leaves
# behind hardly anything is a cycle. The most memory is the same (docs/forecast.md)
THRESHOLDS = 100_000, 20, 100


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
        before = gc.get_threshold()
        gc.set_threshold(*THRESHOLDS)
        try:
            self._run(until, events)
        finally:
            gc.set_threshold(*before)

    def _run(self, until: float, events: int) -> None:
        heap = self._heap
        while heap and not self.stopped and self.events < events:
            entry = heappop(heap)
            time, _, action, argument = entry
            if time > until:
                heappush(heap, entry)
                self.now = until
                return
            self.now = time
            self.events += 1
            action(argument)
