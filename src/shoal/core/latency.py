"""Running estimates of a duration: a moving average, and the median of the latest samples.

Timeouts follow these estimates: of hops (trainer/routing.py), of tasks (server/jobs.py), of tensors on their way
(server/activation_store.py), of averaging rounds (allreduce/rounds.py) and of state chunks (transfer/download.py). Each user chooses
its own multiple and its own bounds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

ALPHA = 0.1  # weight of a new sample in the moving average: SWARM's figure
LEAST_S = 1e-4  # no estimate is zero: a peer that seems to cost nothing would receive all the work
SAMPLES = 15  # that the median is taken of
COLD_Bps = 5e6  # what a line is thought to carry before anything has shown it


class Latency:
    """Bias-corrected exponential moving average, in seconds: `value`, None before the first sample."""

    __slots__ = ("_sum", "_weight", "value")

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0  # 1 - (1 - ALPHA)^n
        self.value: float | None = None  # asked for more often than a sample is added

    def add(self, seconds: float) -> None:
        self._sum += ALPHA * ((LEAST_S if seconds < LEAST_S else seconds) - self._sum)
        self._weight += ALPHA * (1.0 - self._weight)
        self.value = self._sum / self._weight


class Usual:
    """Median of the latest SAMPLES samples, in seconds. The initial guess counts as one sample until it is displaced."""

    __slots__ = ("_latest", "_sorted", "value")

    def __init__(self, prior_s: float) -> None:
        self._latest = deque([prior_s])
        self._sorted = [prior_s]
        self.value = prior_s

    @property
    def known(self) -> bool:
        """There are at least two measured samples, so that the guess does not decide the median."""
        return len(self._latest) > 2

    def add(self, seconds: float) -> None:
        if len(self._latest) == SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._latest.append(seconds)
        insort(self._sorted, seconds)
        self.value = max(self._sorted[(len(self._sorted) - 1) // 2], LEAST_S)
