"""How fast bulk may leave over TCP, so that its queue stays in this process, where control and higher ranks pass it. For engine.py.

TCP fills the buffers of the line until they drop or, with BBR, with about one round trip of data; with four streams every small
message takes two to three round trips. So the kernel is told to send no faster (SO_MAX_PACING_RATE) than what this line was seen to
deliver, corrected by the queue that the round trip shows, as TCP Vegas and FAST do with a window: the queue settles at half of
ALLOWED_PART of a round trip, hence the line stays full. `Pacer` decides only; `SocketPacing` reads and sets the socket's values.
"""

from __future__ import annotations

import math
import socket
import struct
import sys
import time
from collections import deque

ALLOWED_PART = 1 / 4  # of the base round trip, that bulk may wait in queues
LEAST_BASE_S = 5e-3  # below it a busy machine delays more than a queue does, and there is nothing to gain
LEAST_ROUND_S = 20e-3
ROUNDS = 8  # whose highest delivery counts: one that BBR spent on measuring, or that a busy machine slowed, does not
GROWTH = 1.125  # per round, while there is no queue
LEAST_PART = 0.5  # of the delivery rate, to empty a queue
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
        self._crowded = 0  # rounds in a row with too long a queue
        self.limited = False  # there was one, ever

    def rest(self, trip_s: float) -> None:
        """Nothing was sent for a while, hence no queue of this stream is in that round trip."""
        self._base_s = min(self._base_s, trip_s)

    def limit_Bps(self, trip_s: float, delivered_Bps: float) -> float:
        """For the next round; infinite until the first queue is seen."""
        self._rates_Bps.append(delivered_Bps)
        self._base_s = min(self._base_s, trip_s)
        allowed_s = ALLOWED_PART * self._base_s
        self._crowded = self._crowded + 1 if trip_s - self._base_s > allowed_s else 0
        if self._crowded > PATIENCE:
            self._base_s, self._crowded = trip_s, 0
        self.limited |= self._crowded > 0
        if not self.limited or self._base_s < LEAST_BASE_S:
            return math.inf
        queue_s = trip_s - self._base_s
        factor = GROWTH if queue_s < allowed_s / 4 else 1 + (allowed_s / 2 - queue_s) / trip_s
        rate_Bps = (
            delivered_Bps if queue_s > self._base_s else max(self._rates_Bps)
        )  # so long a queue: the line is busy
        return rate_Bps * max(LEAST_PART, factor)


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
        except (OSError, struct.error):  # an older system says less
            self._works = False
            return
        if self._paused:
            self._pacer.rest(trip_s)
        # The first bytes after a pause are acknowledged a round trip later: a round begins there.
        self._round = None if self._paused else (now, acked)
        # A new connection doubles its rate with each round trip: what it puts into queues has to be seen sooner.
        self._look_at = now + (max(LEAST_ROUND_S, trip_s) if self._pacer.limited or self._paused else LEAST_ROUND_S)
        self._paused = False

    def _limit(self, rate_Bps: float) -> None:
        limit = _UNLIMITED if math.isinf(rate_Bps) else int(rate_Bps)
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", limit))
