"""How much bulk may be on its way at once over a line that it shares with control messages: enough to fill the line, hardly more.

For libp2p.py, where all streams to a peer share one connection. What its queues hold (unix sockets, 64 frames in each
daemon, TCP) is megabytes, and a small message waits behind all of it. So the reader of bulk acknowledges every ACK_BYTES with
one byte, and the sender keeps within a window that follows the round trip of its own bytes, as in FAST TCP (Wei, Jin, Low
and Hegde 2006): w <- w * (base + allowance) / rtt. Where FAST allows a number of packets in the queues we allow a time, since
that is what control waits; and the base is measured anew every so often, with little on its way. Decides only: no clock, no
socket.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

ACK_BYTES = 64 << 10
FLOOR_BYTES = 8 * ACK_BYTES  # with half of it, 40 % less through the loopback of a busy machine
CEILING_BYTES = 16 << 20  # what one libp2p stream takes unread
ALLOWED_S = 1e-3  # that bulk may wait in queues, and control behind it; on long lines
ALLOWED_PART = 1 / 8  # of the round trip
FIRST_GROWTH, GROWTH = 2.0, 1.25  # of the window, until it was too large for the first time; later
BASE_S = 30.0  # after which the base is measured anew, at a few round trips' loss


class CongestionWindow:
    """Of one stream. Times are the caller's, in seconds."""

    def __init__(self) -> None:
        self.size_bytes = FLOOR_BYTES
        self._aim_bytes = FLOOR_BYTES  # what the size grows to, as fast as acknowledgements come: no bursts
        self._sent = self._acked = 0  # bytes since the stream began
        self._marks: deque[float] = deque()  # when each whole ACK_BYTES that is on its way was handed over
        self._base_s = math.inf  # round trip with little on its way
        self._base_until = 0.0
        self._base_after: int | None = FLOOR_BYTES  # while it is measured: the window's size before
        self._growth = FIRST_GROWTH
        self._round = (0, FLOOR_BYTES)  # the bytes sent since the window last changed, as many as it holds
        self._trips_s: list[float] = []  # of these
        self._used = False  # all of the window was, in this round

    def room_bytes(self) -> int:
        """That may be sent now, up to the next acknowledgement's end. 0: wait for one, which will come."""
        room = self.size_bytes - (self._sent - self._acked)
        if room <= 0:
            self._used = True
        return min(max(0, room), ACK_BYTES - self._sent % ACK_BYTES)

    def sent(self, nbytes: int, now: float) -> None:
        whole = self._sent // ACK_BYTES
        self._sent += nbytes
        self._marks.extend([now] * (self._sent // ACK_BYTES - whole))

    def acknowledged(self, count: int, now: float) -> None:
        """Of so many times ACK_BYTES. ValueError when that many are not on their way."""
        if count > len(self._marks):
            raise ValueError(f"{count} acknowledgements where there can be {len(self._marks)}")
        for _ in range(count):
            self._acked += ACK_BYTES
            trip_s = now - self._marks.popleft()
            if self._acked - ACK_BYTES >= self._round[0]:
                self._trips_s.append(trip_s)
        self.size_bytes = min(self._aim_bytes, self.size_bytes + count * ACK_BYTES)
        if self._acked >= self._round[1]:
            self._next_round(now)

    def _next_round(self, now: float) -> None:
        self._base_s = min(self._base_s, *self._trips_s)
        if self._base_after is not None:
            aim = self._base_after
            self._base_after, self._base_until = None, now + BASE_S
        elif now >= self._base_until:
            self._base_after, self._base_s = self.size_bytes, math.inf
            aim = FLOOR_BYTES
        else:
            # The middle one: some come late because packets were lost or a machine was busy, and no queue is to blame.
            aim = int(self._aim_bytes * self._factor(statistics.median_low(self._trips_s)))
        self._aim_bytes = min(CEILING_BYTES, max(FLOOR_BYTES, aim))
        self.size_bytes = min(self.size_bytes, self._aim_bytes)
        self._round = (self._sent, self._sent + self._aim_bytes)
        self._trips_s, self._used = [], False

    def _factor(self, trip_s: float) -> float:
        allowed_s = max(ALLOWED_S, ALLOWED_PART * self._base_s)
        if trip_s > self._base_s + allowed_s:
            self._growth = GROWTH
            return (self._base_s + allowed_s) / trip_s
        return self._growth if self._used and trip_s < self._base_s + allowed_s / 2 else 1.0
