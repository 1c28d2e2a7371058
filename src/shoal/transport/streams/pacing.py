"""How fast bulk may leave over TCP, so that its queue stays in this process, where control and higher ranks pass it. For engine.py.

TCP fills the buffers of the line until they drop or, with BBR, with about one round trip of data; with four streams every small
message takes two to three round trips. So the kernel is told to send no faster (SO_MAX_PACING_RATE) than what this line was seen to
deliver, less by what its round trip has grown, plus a little: FAST TCP (Wei, Jin, Low and Hegde 2006) with a rate in place of the
window. What is added is the same for all streams of a line, so their shares become equal, and small, so control waits a fraction of
a round trip. `Pacer` decides only; `SocketPacing` reads and sets the socket's values.
"""

from __future__ import annotations

import math
import socket
import struct
import sys
import time
from collections import deque

KEPT_PART = (
    1 / 12
)  # of the line's bandwidth times delay, that each stream keeps in queues: the same for all, so that shares become equal
ALLOWED_PART = 1 / 4  # of the base round trip: a longer queue than this, seen first, ends the time without a limit
LEAST_BASE_S = 5e-3  # below it a busy machine delays more than a queue does, and there is nothing to gain
LEAST_ROUND_S = 20e-3
ROUNDS = 4  # whose highest delivery counts: one that BBR spent on measuring, or that a busy machine slowed, does not
GROWTH = 1.25  # per round, while there is no queue
LEAST_PART = 0.5  # of the delivery rate, to empty a queue
FORGOTTEN_PART = 0.03  # of the highest rate ever delivered, per round
RESTART_PART = 0.5  # of it, after a pause: a tensor is over before the rate has grown from little
PATIENCE = 12  # rounds for a queue to shrink; afterwards it is not ours, or the way has become longer

_SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; the socket module has no name for it
_UNLIMITED = 2**64 - 1
_info = struct.Struct("=8x 24I 4Q")  # the first fields of struct tcp_info (linux/tcp.h)
_ROUND_TRIP_US, _BYTES_ACKED = 15, 26


class Pacer:
    """Of one stream, called once per round in which there was always something to send."""

    def __init__(self) -> None:
        self._base_s = math.inf
        self._rates_Bps: deque[float] = deque(maxlen=ROUNDS)
        self._highest_Bps = 0.0
        self._crowded = 0  # rounds in a row with too long a queue
        self.limited = False  # there was one, ever
        self._limit_Bps = math.inf

    def restart(self, trip_s: float) -> float:
        """The limit after a pause. Nothing was sent in it, hence no queue of this stream is in that round trip."""
        self._base_s = min(self._base_s, trip_s)
        self._limit_Bps = max(self._limit_Bps, RESTART_PART * self._highest_Bps)
        return self._limit_Bps

    def limit_Bps(self, trip_s: float, delivered_Bps: float) -> float:
        """For the next round; infinite until the first queue is seen."""
        self._rates_Bps.append(delivered_Bps)
        self._highest_Bps = max(delivered_Bps, (1 - FORGOTTEN_PART) * self._highest_Bps)
        self._base_s = min(self._base_s, trip_s)
        queue_s = trip_s - self._base_s
        self._crowded = self._crowded + 1 if queue_s > ALLOWED_PART * self._base_s else 0
        if self._crowded > PATIENCE:
            self._base_s, self._crowded, queue_s = trip_s, 0, 0.0
        self.limited |= self._crowded > 0
        if self.limited and self._base_s >= LEAST_BASE_S:
            kept_s = KEPT_PART * self._base_s
            part = GROWTH if queue_s < kept_s / 4 else max(LEAST_PART, self._base_s / trip_s)
            self._limit_Bps = part * max(self._rates_Bps) + self._highest_Bps * kept_s / trip_s
        return self._limit_Bps


class SocketPacing:
    """Paces one socket, where the system can (Linux)."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pacer = Pacer()
        self._works = sys.platform == "linux"
        self._look_at = 0.0
        self._paused = True
        self._round: tuple[float, int] | None = None  # when it began, and the bytes acknowledged by then

    def pause(self) -> None:
        """There is nothing to send: what is measured now says nothing about the line."""
        self._paused = True

    def sent(self) -> None:
        """More was handed to the socket."""
        now = time.monotonic()
        if not self._works or (now < self._look_at and not self._paused):
            return
        try:
            values = _info.unpack(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _info.size))
            trip_s, acked = 1e-6 * values[_ROUND_TRIP_US], values[_BYTES_ACKED]
            if self._round is not None and not self._paused:
                self._limit(self._pacer.limit_Bps(trip_s, (acked - self._round[1]) / (now - self._round[0])))
            elif self._paused:
                self._limit(self._pacer.restart(trip_s))
        except (OSError, struct.error):  # an older system says less
            self._works = False
            return
        # The first bytes after a pause are acknowledged a round trip later: a round begins there.
        self._round = None if self._paused else (now, acked)
        # A new connection doubles its rate with each round trip: what it puts into queues has to be seen sooner.
        self._look_at = now + (max(LEAST_ROUND_S, trip_s) if self._pacer.limited or self._paused else LEAST_ROUND_S)
        self._paused = False

    def _limit(self, rate_Bps: float) -> None:
        limit = _UNLIMITED if math.isinf(rate_Bps) else int(rate_Bps)
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", limit))
