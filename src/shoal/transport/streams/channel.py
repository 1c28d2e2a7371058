"""Streams of bytes over a connection, in steps (engine.py): TLS, and a plain socket; and the uplink that all bulk shares.

TLS works on memory and the socket is read in large pieces, because that takes a third of the system calls of ssl's own sockets (and they
allow no reading beside writing); crypto and copies run outside the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import operator
import socket
import ssl
import struct
import time
from collections import deque
from functools import cache, partial
from typing import NamedTuple

from shoal.transport.streams.busy_rate import BusyRate
from shoal.transport.streams.congestion import Acknowledged, PathSample, PathWindow, Restarts, UplinkWindow
from shoal.transport.streams.engine import Connection, Steps, WaitFor
from shoal.transport.streams.send_queue import RankTurns

WRITE_BYTES = 256 << 10  # encrypted and handed to a socket at once
QUANTUM_BYTES = 1 << 20  # moved for one connection before the next has its turn
PIECE_BYTES = 64 << 10  # of bulk, while other connections wait for the uplink
UNSENT_BYTES = 128 << 10  # the system takes no more than it can send soon: what waits there cannot be overtaken
UNSENT_S = 0.02  # of bulk or more, what it sends in this time: on a busy machine this side wakes late, and the line would be idle
UNSENT_MOST_BYTES = 4 << 20
MEASURE_S = 0.004  # between two questions to the system
RESUME_S = 0.005  # after which whoever found no room looks again
# Bulk that stands for so long, while control to that peer was acknowledged so lately: an MTU black hole
STUCK_S, HEARD_S = 3.0, 1.0
BLACK_HOLE = "small packets arrive and large ones do not: the next connection has smaller ones"
WATCH_S = 1.0
LOOK_S = 0.05  # after which whoever waits for the system looks at its way again
BBR = b"bbr"
# And four round trips without an acknowledgement: that line carries nothing, and the others do not wait for it
SILENT_S = 0.2
# Of Linux's tcp_info: a segment's bytes; segments on their way, and acknowledged out of turn; ms since the last acknowledgement; round
# trip in us; segments sent again; bytes acknowledged, and unsent; the shortest round trip; bytes per second
TCP_INFO = struct.Struct("16xI4xII24xI8xI28xI16xQ16xII8xQ")


class Sent:
    """By one connection. `written_bytes` and `delivered_bytes` since it began, with encryption."""

    def __init__(self, delivered_bytes: int) -> None:
        self.written_bytes = self.delivered_bytes = delivered_bytes
        self.unsent_bytes = UNSENT_BYTES  # that the system takes
        self.restarts, self.path = Restarts(), PathWindow()
        self.stuck_since = 0.0  # nothing of what is on its way has been delivered; 0: nothing is on its way


class Uplink:
    """Shared by the outgoing bulk of all connections, which write by rank and in turn while the window has room. In the engine's thread.

    Where the system does not say what was acknowledged, nothing is limited."""

    def __init__(self) -> None:
        self._window = UplinkWindow()
        self._sent: dict[Connection, Sent] = {}
        self._waiting: deque[Connection] = deque()
        self._ranks = RankTurns()
        self._outstanding_bytes = 0
        self._measured_at = 0.0

    @property
    def busy(self) -> BusyRate:
        """What the line has carried."""
        return self._window.busy

    def join(self, connection: Connection) -> None:
        with contextlib.suppress(AttributeError, OSError, struct.error):
            self._sent[connection] = Sent(_info(connection.sock).delivered_bytes)

    def write(self, connection: Connection, data: memoryview) -> Steps:
        try:
            while data:
                most = self._room_bytes(connection)
                if not most:
                    yield WaitFor.WOKEN
                    continue
                try:
                    nbytes = connection.sock.send(data[:most])
                except BlockingIOError:
                    self._end_turn(connection)
                    connection.resume_at = time.monotonic() + LOOK_S
                    yield WaitFor.WRITE
                    continue
                data = data[nbytes:]
                if connection in self._sent:
                    self._sent[connection].written_bytes += nbytes
                    self._outstanding_bytes += nbytes
                    self._ranks.took(connection.rank, {each.rank for each in self._waiting})
                self._end_turn(connection)
        finally:
            self._end_turn(connection)

    def _room_bytes(self, connection: Connection) -> int:
        """0: it is not this connection's turn, and it is woken then; or there is no room, and it looks again soon."""
        if connection not in self._sent:
            return QUANTUM_BYTES
        now = time.monotonic()
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
        room = min(path_room, self._window.room_bytes(self._outstanding_bytes))
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
        self._outstanding_bytes, lately, infos = 0, list[Acknowledged](), list[tuple[Connection, Sent, Info]]()
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
                    lately.append(Acknowledged(nbytes, info.trip_us / 1e6, info.base_us / 1e6))
                    sent.delivered_bytes = info.delivered_bytes
                    _take_ahead(connection.sock, sent, info.rate_Bps)
                if info.silent_ms / 1e3 < SILENT_S + 4 * info.trip_us / 1e6:
                    # What waits in the line of a single receiver leaves room in this one
                    own = min(1.0, (info.base_us + 1e6 * self._window.queue_s) / max(1, info.trip_us))
                    self._outstanding_bytes += int(own * max(0, sent.written_bytes - info.delivered_bytes))
                infos.append((connection, sent, info))
        self._window.acknowledged(lately, now)
        room = self._window.is_roomy(self._outstanding_bytes)
        for connection, sent, info in infos:
            waits, trip_s, base_s = info.unsent_bytes > 0, info.trip_us / 1e6, info.base_us / 1e6
            path = PathSample(info.delivered_bytes, trip_s, base_s, waits, room, info.again)
            sent.path.look(path, sent.written_bytes - info.delivered_bytes, now)
            if sent.restarts.look(path, now):
                restart(connection.sock)
            _fail_if_stuck(connection, sent, info, now)

    def watch(self, connection: Connection) -> None:
        """It has nothing to write. What it has written may stand."""
        sent, now = self._sent.get(connection), time.monotonic()
        if sent is not None and sent.written_bytes > sent.delivered_bytes:
            connection.resume_at = now + WATCH_S
            if now - self._measured_at >= MEASURE_S:
                self._measure(now)


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


class Channel:
    """TLS over one non-blocking socket, in steps."""

    def __init__(self, connection: Connection, context: ssl.SSLContext, server_side: bool) -> None:
        self._connection = connection
        self._sock = connection.sock
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._uplink: Uplink | None = None  # of bulk
        self._tls = context.wrap_bio(self._in, self._out, server_side=server_side)

    def handshake(self) -> Steps:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                yield from self._flush()
                yield from self._fill()
            except ssl.SSLError:
                yield from self._flush()  # the alert that tells the other side why
                raise
            else:
                yield from self._flush()
                return

    def certificate(self) -> bytes:
        shown = self._tls.getpeercert(binary_form=True)
        assert shown is not None  # the handshake requires one
        return shown

    def read(self, view: memoryview) -> Steps:
        """Fill `view`. ConnectionError when the other side has closed."""
        at = turn = 0
        while at < view.nbytes:
            try:
                got: int = self._tls.read(view.nbytes - at, view[at:])  # type: ignore[assignment]  # a number, as it is given a buffer
            except ssl.SSLWantReadError:
                yield from self._fill()
                continue
            except ssl.SSLZeroReturnError:
                got = 0
            if not got:
                raise ConnectionError("closed by the other side")
            at += got
            turn += got
            if turn >= QUANTUM_BYTES:
                turn = 0
                yield WaitFor.AGAIN

    def write(self, view: memoryview) -> Steps:
        turn = 0
        for at in range(0, view.nbytes, WRITE_BYTES):
            part = view[at : at + WRITE_BYTES]
            self._tls.write(part)
            yield from self._flush()
            turn += part.nbytes
            if turn >= QUANTUM_BYTES:
                turn = 0
                yield WaitFor.AGAIN

    def check_open(self) -> None:
        """Between writes: ConnectionError when the other side has closed; it has nothing else to say."""
        assert self._connection.engine is not None
        if self._uplink is not None:
            self._uplink.watch(self._connection)
        scratch = self._connection.engine.scratch
        try:
            got = self._sock.recv_into(scratch)
        except BlockingIOError:
            return
        if not got:
            raise ConnectionError("closed by the other side")
        self._in.write(scratch[:got])
        try:
            self._tls.read(1)
        except ssl.SSLWantReadError:
            return
        except ssl.SSLZeroReturnError:
            pass
        raise ConnectionError("closed by the other side")

    def paced(self, uplink: Uplink | None) -> Channel:
        if uplink is not None:
            uplink.join(self._connection)
        self._uplink = uplink
        return self

    def _fill(self) -> Steps:
        while True:
            assert self._connection.engine is not None
            scratch = self._connection.engine.scratch  # of the thread this runs in now
            try:
                got = self._sock.recv_into(scratch)
            except BlockingIOError:
                yield WaitFor.READ
                continue
            if not got:
                raise ConnectionError("closed by the other side")
            self._in.write(scratch[:got])
            return

    def _flush(self) -> Steps:
        waiting = memoryview(self._out.read())
        if self._uplink is not None:
            return (yield from self._uplink.write(self._connection, waiting))
        while waiting:
            try:
                waiting = waiting[self._sock.send(waiting) :]
            except BlockingIOError:
                yield WaitFor.WRITE


class PlainStream:
    """A plain socket, in steps: what it carries is encrypted by others."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sock = connection.sock

    def read(self, view: memoryview) -> Steps:
        at = turn = 0
        while at < view.nbytes:
            try:
                got = self._sock.recv_into(view[at:])
            except BlockingIOError:
                yield WaitFor.READ
                continue
            if not got:
                raise ConnectionError("closed by the other side")
            at += got
            turn += got
            if turn >= QUANTUM_BYTES:
                turn = 0
                yield WaitFor.AGAIN

    def write(self, view: memoryview) -> Steps:
        turn = 0
        while view:
            try:
                sent = self._sock.send(view[:QUANTUM_BYTES])
            except BlockingIOError:
                yield WaitFor.WRITE
                continue
            view = view[sent:]
            turn += sent
            if turn >= QUANTUM_BYTES:
                turn = 0
                yield WaitFor.AGAIN

    def check_open(self) -> None:
        if self.received(1):
            raise ConnectionError("the other side sent data on a stream of this side's")

    def received(self, most: int) -> bytes:
        """The bytes that have arrived, without waiting."""
        try:
            words = self._sock.recv(most)
        except BlockingIOError:
            return b""
        if not words:
            raise ConnectionError("closed by the other side")
        return words
