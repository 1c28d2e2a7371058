"""How many microbatches an owner drives at once, with `run.inflight = "auto"`. For microbatch.py's Owned, also in the planner's play.

What fills lines and compute is bandwidth times delay, counted in microbatches: the rate at which this owner's are finished, times
the trip of one that meets no queue. Three times as many are driven, as other owners' hops come between. Both are measured in every step,
and the window follows between steps only: owners that measure the same drive as many, so that none is left with the end of a step. Where
latency limits, rate times trip is the window itself, which therefore grows until something is full. Memory bounds it: a replica keeps two
boundary tensors of each microbatch and stage (config/derived.py). docs/design/2026-11-23-in-flight.md
"""

from __future__ import annotations

import math
from collections import deque

from shoal.core.messages import Index, Settings

FIRST = 4  # before anything is measured
LEAST, MOST = 3, 64
FACTOR = 3.0  # of rate times trip: with 2 a step takes up to 3 % longer in the planner's play
GROWTH = 2  # from step to step, at most
STEPS = 3  # whose shortest trip counts


class Window:
    def __init__(self, settings: Settings) -> None:
        """Of a fixed size where the settings give one."""
        self.size = settings.inflight or FIRST
        self._fixed = settings.inflight > 0
        self._store_bytes = settings.activation_store_bytes / (2 * settings.stages)
        self._tensor_bytes = math.inf  # the smallest told: a liar cannot narrow the window
        self._shortest_s: deque[float] = deque(maxlen=STEPS)
        self._started: dict[Index, float] = {}
        self._trips_s: list[float] = []
        self._span_s = (math.inf, 0.0)  # from the first start to the last end

    def begin(self) -> None:
        """A step is over: follow what it has shown."""
        if len(self._trips_s) > 1 and not self._fixed:
            self._shortest_s.append(min(self._trips_s))
            rate = len(self._trips_s) / max(self._span_s[1] - self._span_s[0], 1e-9)
            wanted = min(math.ceil(FACTOR * rate * min(self._shortest_s)), GROWTH * self.size, MOST)
            fitting = int(self._store_bytes / self._tensor_bytes) or 1 if self._tensor_bytes < math.inf else MOST
            self.size = min(max(LEAST, wanted), fitting)
        self._started.clear()
        self._trips_s.clear()
        self._span_s = (math.inf, 0.0)

    def start(self, index: Index, now: float) -> None:
        self._started[index] = now
        self._span_s = (min(self._span_s[0], now), self._span_s[1])

    def finish(self, index: Index, now: float) -> None:
        start = self._started.pop(index, None)
        if start is not None:
            self._trips_s.append(now - start)
            self._span_s = (self._span_s[0], now)

    def made(self, nbytes: int) -> None:
        """A boundary tensor of that size was made."""
        if nbytes > 0:
            self._tensor_bytes = min(self._tensor_bytes, nbytes)
