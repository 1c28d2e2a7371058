"""What one direction of this machine's line carries while it is full, measured from the run's own bulk. For sender.py and receiver.py.

A rate over all seconds says little: most lines wait for tensors most of the time. So only time counts in which bytes wait for the line,
and every SAMPLE_S of it is a sample. The highest of KEEP_S is the line's rate: in the others another peer's line may have been the
narrow one. No clock.
"""

from __future__ import annotations

# Of time in which the line was busy: several round trips, so that acknowledgements in bursts matter little
SAMPLE_S = 0.5
# Samples before the line is known: the first of a fresh connection are of a window that still grows, a third of what the line carries
KNOWN = 8
KEEP_S = 120.0  # A step of the laboratory takes 5 to 50 s, and in each there is averaging, when all lines are full


class BusyRate:
    """Written by one thread; `rate_Bps` is read by any."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._busy_s = 0.0
        self._samples: tuple[tuple[float, float], ...] = ()  # when, bytes per second
        self._count = 0  # of all samples since none was kept
        self._active = 0  # pieces that are arriving
        self._since = 0.0  # what has been counted of the time in which some were

    def begin(self, now: float) -> None:
        """The first bytes of a piece are here, the others are on their way."""
        if not self._active:
            self._since = now
        self._active += 1

    def end(self, nbytes: int, now: float) -> None:
        """A piece that had begun is whole, or will never be: `nbytes` of it came."""
        self._active -= 1
        self.carried(nbytes, max(0.0, now - self._since), now)
        self._since = now

    def carried(self, nbytes: int, busy_s: float, now: float) -> None:
        self._nbytes += nbytes
        self._busy_s += busy_s
        if self._busy_s >= SAMPLE_S:
            fresh = tuple(sample for sample in self._samples if sample[0] > now - KEEP_S)
            sample = now, self._nbytes / self._busy_s
            self._count = self._count + 1 if fresh else 1
            # Older and lower ones will never be the highest
            self._samples = (*(each for each in fresh if each[1] > sample[1]), sample)
            self._nbytes, self._busy_s = 0, 0.0

    def rate_Bps(self, now: float) -> float:
        """0: the line has not been busy for long enough."""
        if self._count < KNOWN:
            return 0.0
        return max((rate for at, rate in self._samples if at > now - KEEP_S), default=0.0)
