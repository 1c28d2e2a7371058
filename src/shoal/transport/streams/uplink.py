"""The uplink that all bulk shares: what the system says of each connection, and when each may write.

Deciders of shoal.transport.congestion say how much; here are the sockets. In steps (engine.py), like the streams of channel.py.
"""

from __future__ import annotations

import contextlib
import math
import operator
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import NamedTuple

from shoal.slots import RankTurns
from shoal.transport.congestion.busy_rate import BusyRate
from shoal.transport.congestion.downlink import DownlinkQueue
from shoal.transport.congestion.shares import LEAST_BPS, SHARE_S, Report, max_min
from shoal.transport.congestion.windows import Acknowledged, PathSample, PathWindow, Restarts, UplinkWindow
from shoal.transport.streams.engine import Connection, Steps, WaitFor

QUANTUM_BYTES = 1 << 20  # moved for one connection before the next has its turn
PIECE_BYTES = 64 << 10  # of bulk, while other connections wait for the uplink
UNSENT_BYTES = 128 << 10  # the system takes no more than it can send soon: what waits there cannot be overtaken
UNSENT_S = 0.02  # of bulk or more, what it sends in this time: on a busy machine this side wakes late, and the line would be idle
UNSENT_MOST_BYTES = 4 << 20
MEASURE_S = 0.004  # between two questions to the system
RESUME_S = 0.005  # after which whoever found no room looks again
HEAR_S = 0.01  # between two looks for what the receiver says
PACE = 1.06  # of a share: a little queue keeps the receiver's line full, and shows it
# Of what this machine's line has for it: no bursts, and the window is used, by which the line is known
UPLINK_PACE = 1.25
STEADY = 0.95  # a smaller change is not worth a call
SO_MAX_PACING_RATE = 47  # Linux
NO_LIMIT = -1
# Bulk that stands for so long, while control to that peer was acknowledged so lately: an MTU black hole
STUCK_S, HEARD_S = 3.0, 1.0
BLACK_HOLE = "small packets arrive and large ones do not: the next connection has smaller ones"
WATCH_S = 1.0
LOOK_S = 0.05  # after which whoever waits for the system looks at its way again
BBR = b"bbr"
# And four round trips without an acknowledgement: that line carries nothing, and the others do not wait for it
SILENT_S = 0.2
BBR_INFO = struct.Struct("=II8xI")  # bytes per second that BBR believes in, low and high word; gain of its window
TCP_CC_INFO, CRUISING = 26, 512  # it neither looks for the rate nor for the shortest round trip
# Of Linux's tcp_info: a segment's bytes; segments on their way, and acknowledged out of turn; ms since the last acknowledgement; round
# trip in us; segments sent again; bytes acknowledged, and unsent; the shortest round trip; bytes per second
TCP_INFO = struct.Struct("16xI4xII24xI8xI28xI16xQ16xII8xQ")


class Sent:
    """By one connection. `written_bytes` and `delivered_bytes` since it began, with encryption. `hear`: what its receiver says."""

    def __init__(self, delivered_bytes: int, hear: Callable[[], None] = lambda: None) -> None:
        self.written_bytes = self.delivered_bytes = delivered_bytes
        self.hear, self.heard_at = hear, 0.0
        self.share_Bps, self.share_until = math.inf, 0.0  # of the receiver's line; it is told anew all the time
        self.paced_Bps = math.inf
        self.queue_s = math.inf  # on its way; inf: not seen yet
        self.unsent_bytes = UNSENT_BYTES  # that the system takes
        self.restarts, self.path = Restarts(), PathWindow()
        self.stuck_since = 0.0  # nothing of what is on its way has been delivered; 0: nothing is on its way


class Uplink:
    """Shared by the outgoing bulk of all connections, which write by rank and in turn while the window has room. In the engine's thread.

    Where the system does not say what was acknowledged, nothing is limited."""

    def __init__(
        self,
        down_queue_s: Callable[[float], float] = lambda now: 0.0,
        downlink_queue: DownlinkQueue | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`down_queue_s`: in this machine's downlink, now: acknowledgements wait there. `downlink_queue`: is told when receivers have said
        their shares. `clock`: the engine's seconds."""
        self._down_queue_s, self._clock = down_queue_s, clock
        self._downlink_queue = downlink_queue or DownlinkQueue()
        self._window = UplinkWindow()
        self._sent: dict[Connection, Sent] = {}
        self._waiting: deque[Connection] = deque()
        self._ranks = RankTurns()
        self._outstanding_bytes = self._unsent_bytes = 0
        self._measured_at = 0.0

    @property
    def busy(self) -> BusyRate:
        """What the line has carried."""
        return self._window.busy

    def join(self, connection: Connection, hear: Callable[[], None] = lambda: None) -> None:
        with contextlib.suppress(AttributeError, OSError, struct.error):
            self._sent[connection] = Sent(_info(connection.sock).delivered_bytes, hear)

    def take_share(self, connection: Connection, rate_Bps: float, sent_s: float) -> None:
        """Its receiver has said what part of its line this connection may use, and when, by its own clock."""
        sent = self._sent.get(connection)
        if sent is not None:
            now = self._clock()
            self._downlink_queue.heard(connection, sent_s, now)
            sent.share_Bps, sent.share_until = max(rate_Bps, LEAST_BPS), now + SHARE_S
            self._pace(connection, sent, now)

    def report(self, connection: Connection, left_bytes: int) -> Report:
        """For its receiver."""
        sent = self._sent.get(connection)
        if sent is None:
            return Report(left_bytes, math.inf, math.inf)
        return Report(left_bytes, self._left_Bps(sent, self._clock()), sent.queue_s)

    def _pace(self, connection: Connection, sent: Sent, now: float) -> float:
        """No faster than its receiver's line and this machine's allow beside the others. Returns that."""
        left_Bps = self._left_Bps(sent, now)
        paced_Bps = min(PACE * sent.share_Bps, UPLINK_PACE * left_Bps)
        if not STEADY * paced_Bps <= sent.paced_Bps <= paced_Bps / STEADY:
            sent.paced_Bps = paced_Bps
            _pace(connection.sock, paced_Bps)
        return min(sent.share_Bps, left_Bps)

    def _left_Bps(self, sent: Sent, now: float) -> float:
        """What this machine's line has for it, beside the shares of the others: max-min fairly. inf: not known yet."""
        line_Bps = self._window.busy.rate_Bps(now)
        if not line_Bps:
            return math.inf
        others = [
            each for each in self._sent.values() if each is not sent and each.written_bytes > each.delivered_bytes
        ]
        return max_min(line_Bps, [*(each.share_Bps for each in others), math.inf])[-1]

    def write(self, connection: Connection, data: memoryview) -> Steps:
        try:
            while data:
                self._hear(connection)
                most = self._room_bytes(connection)
                if not most:
                    yield WaitFor.WOKEN
                    continue
                try:
                    nbytes = connection.sock.send(data[:most])
                except BlockingIOError:
                    self._end_turn(connection)
                    connection.resume_at = self._clock() + LOOK_S
                    # Who is not asked what it hears must not be woken for that
                    yield WaitFor.EITHER if connection in self._sent else WaitFor.WRITE
                    self._hear(connection, at_once=True)
                    continue
                data = data[nbytes:]
                if connection in self._sent:
                    self._sent[connection].written_bytes += nbytes
                    self._outstanding_bytes += nbytes
                    self._ranks.took(connection.rank, {each.rank for each in self._waiting})
                self._end_turn(connection)
        finally:
            self._end_turn(connection)

    def _hear(self, connection: Connection, *, at_once: bool = False) -> None:
        sent, now = self._sent.get(connection), self._clock()
        if sent is None or (now - sent.heard_at < HEAR_S and not at_once):
            return
        sent.heard_at = now
        sent.hear()
        if now > sent.share_until and not math.isinf(sent.share_Bps):
            sent.share_Bps = math.inf

    def _room_bytes(self, connection: Connection) -> int:
        """0: it is not this connection's turn, and it is woken then; or there is no room, and it looks again soon."""
        if connection not in self._sent:
            return QUANTUM_BYTES
        now = self._clock()
        if now - self._measured_at >= MEASURE_S:
            self._measure(now)
        path_room = self._path_room_bytes(connection)
        if not path_room:
            self._end_turn(connection)
            connection.resume_at = now + RESUME_S
            return 0
        if connection not in self._waiting:
            self._waiting.append(connection)
        if self._next() is not connection:
            return 0
        room = min(path_room, self._window.room_bytes(self._outstanding_bytes, self._unsent_bytes))
        if not room:
            connection.resume_at = now + RESUME_S
        return min(room, PIECE_BYTES) if len(self._waiting) > 1 else room

    def _path_room_bytes(self, connection: Connection) -> int:
        """0: its way is full, and others go before it."""
        sent = self._sent.get(connection)  # None: just found to be closed
        if sent is None:
            return QUANTUM_BYTES
        return sent.path.room_bytes(sent.written_bytes - sent.delivered_bytes)

    def _end_turn(self, connection: Connection) -> None:
        if connection in self._waiting:
            self._waiting.remove(connection)
            if self._waiting and (first := self._next()).engine is not None:
                first.engine.wake(first)

    def _next(self) -> Connection:
        """The one that waits longest, of the rank that goes next."""
        rank = self._ranks.next({each.rank for each in self._waiting})
        return next(each for each in self._waiting if each.rank == rank)

    def _measure(self, now: float) -> None:
        self._measured_at = now
        down_queue_s = self._down_queue_s(now)
        lately, infos = list[Acknowledged](), list[tuple[Connection, Sent, Info]]()
        for connection, sent in list(self._sent.items()):
            if connection.closed:
                del self._sent[connection]
                continue
            if sent.written_bytes <= sent.delivered_bytes:
                sent.stuck_since = 0.0
            else:
                info = _info(connection.sock)
                sent.stuck_since = sent.stuck_since or now
                if info.delivered_bytes > sent.delivered_bytes:
                    sent.stuck_since = now
                    nbytes = info.delivered_bytes - sent.delivered_bytes
                    trip_s = max(info.base_us / 1e6, info.trip_us / 1e6 - down_queue_s)
                    lately.append(Acknowledged(nbytes, trip_s, info.base_us / 1e6))
                    sent.delivered_bytes = info.delivered_bytes
                    _take_ahead(connection.sock, sent, info.rate_Bps)
                infos.append((connection, sent, info))
        last_s = self._window.queue_s if len(self._sent) > 1 else math.inf
        self._outstanding_bytes = outstanding_bytes(((sent, info) for _, sent, info in infos), last_s)
        self._unsent_bytes = sum(info.unsent_bytes for _, _, info in infos)
        self._window.acknowledged(lately, now)
        room = self._window.is_roomy(self._outstanding_bytes - self._unsent_bytes)
        for connection, sent, info in infos:
            waits, trip_s, base_s = info.unsent_bytes > 0, info.trip_us / 1e6, info.base_us / 1e6
            path = PathSample(info.delivered_bytes, trip_s, base_s, waits, room, info.again)
            sent.path.look(path, sent.written_bytes - info.delivered_bytes, now)
            # Of several connections' queues what is common to all is in this machine's uplink
            sent.queue_s = max(0.0, trip_s - base_s - (self._window.queue_s if len(infos) > 1 else 0.0))
            rate_Bps = self._pace(connection, sent, now)
            if math.isinf(sent.share_Bps):
                again = sent.restarts.look(path, now)
            else:
                again = waits and sent.restarts.short_of(rate_Bps, _cruise_Bps(connection.sock), trip_s, now)
            if again:
                restart(connection.sock)
            _fail_if_stuck(connection, sent, info, now)

    def watch(self, connection: Connection) -> None:
        """It has nothing to write. What it has written may stand."""
        sent, now = self._sent.get(connection), self._clock()
        if sent is not None and sent.written_bytes > sent.delivered_bytes:
            connection.resume_at = now + WATCH_S
            if now - self._measured_at >= MEASURE_S:
                self._measure(now)


def outstanding_bytes(ways: Iterable[tuple[Sent, Info]], last_s: float) -> int:
    """In this machine's line. What all connections wait beyond their base, now and in the last round (`last_s`), is its queue; what one
    waits beyond that is in the line of its receiver, and leaves room here. Of a single connection nobody can say: inf."""
    heard = [(sent, info) for sent, info in ways if info.silent_ms / 1e3 < SILENT_S + 4 * info.trip_us / 1e6]
    queue_us = min([1e6 * last_s, *(info.trip_us - info.base_us for _, info in heard)])
    own = [min(1.0, (info.base_us + queue_us) / max(1, info.trip_us)) for _, info in heard]
    return sum(
        int(part * max(0, sent.written_bytes - info.delivered_bytes))
        for part, (sent, info) in zip(own, heard, strict=True)
    )


def _fail_if_stuck(connection: Connection, sent: Sent, info: Info, now: float) -> None:
    """TCP would notice an MTU black hole after ten seconds."""
    stuck = info.unacked and min(now - sent.stuck_since, info.silent_ms / 1e3) > STUCK_S
    if stuck and connection.engine is not None and connection.is_heard():
        connection.engine.fail_if(partial(operator.is_, connection), TimeoutError(BLACK_HOLE))


class Info(NamedTuple):
    unacked: int  # segments
    silent_ms: int  # since the last acknowledgement
    trip_us: int
    again: int  # segments sent once more
    delivered_bytes: int
    base_us: int  # the shortest round trip
    rate_Bps: int
    unsent_bytes: int


def _info(sock: socket.socket) -> Info:
    """What arrived behind a lost segment is delivered, too: at 0.1 % loss one connection had 0.8 of its rate without it."""
    fields = TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size))
    segment_bytes, unacked, early, silent_ms, trip_us, again, acked_bytes, unsent_bytes, base_us, rate_Bps = fields
    delivered_bytes = acked_bytes + early * segment_bytes
    return Info(unacked, silent_ms, trip_us, again, delivered_bytes, base_us, rate_Bps, unsent_bytes)


def is_acknowledged(sock: socket.socket) -> bool:
    """The other side has acknowledged something lately."""
    with contextlib.suppress(AttributeError, OSError, struct.error):
        return _info(sock).silent_ms < 1e3 * HEARD_S
    return False


def _take_ahead(sock: socket.socket, sent: Sent, rate_Bps: int) -> None:
    """Let the system take as much bulk as it sends in UNSENT_S."""
    unsent_bytes = max(UNSENT_BYTES, min(int(rate_Bps * UNSENT_S), UNSENT_MOST_BYTES))
    if not 0.8 * sent.unsent_bytes <= unsent_bytes <= 1.25 * sent.unsent_bytes:
        sent.unsent_bytes = unsent_bytes
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes)


def _pace(sock: socket.socket, rate_Bps: float) -> None:
    if sys.platform == "linux":
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(rate_Bps) if rate_Bps < 1 << 31 else NO_LIMIT)


def _cruise_Bps(sock: socket.socket) -> float:
    """What BBR believes that the way carries; inf: it is not BBR, or just looks."""
    with contextlib.suppress(AttributeError, OSError, struct.error):
        low, high, gain = BBR_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, TCP_CC_INFO, BBR_INFO.size))
        if gain == CRUISING:
            return float(high << 32 | low)
    return math.inf


@cache
def can_restart() -> bool:
    """The system lets this process choose BBR again after another congestion control."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            for name in (b"reno", BBR):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
    except (AttributeError, OSError):
        return False
    return True


def restart(sock: socket.socket) -> None:
    """BBR forgets the rate that it knows, and doubles it from round trip to round trip as at the beginning."""
    if not can_restart() or sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") != BBR:
        return
    for name in (b"reno", BBR):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
