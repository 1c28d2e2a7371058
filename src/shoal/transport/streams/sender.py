"""Outgoing streams: one per peer and kind, dialled when there is something to send. For streams.py.

A stream is one connection. Bulk has several (lanes) where the system has no BBR: one connection falls to a tenth of a line with losses, and
what it lost holds up the others no longer than the receiver's buffers last. Each lane takes fragments from the one queue; the receiver puts
them in order by their numbers. The first lane makes the stream, and it ends with any of them.

A stream that breaks loses what waits in its queue and is reported as Lost; the next message dials again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Generic

from shoal.core.messages import Message, Peer
from shoal.transport.base import MAX_CONTROL_BYTES, STREAM_KINDS, Limits, StreamKind
from shoal.transport.budget import Warnings
from shoal.transport.congestion.busy_rate import BusyRate
from shoal.transport.congestion.downlink import DownlinkQueue
from shoal.transport.identity.identity import key_id_of
from shoal.transport.identity.invite import Membership
from shoal.transport.streams import handshake
from shoal.transport.streams.carrier import ByteStream, Carrier, Route, lanes_of
from shoal.transport.streams.engine import Connection, Engines, Steps, WaitFor
from shoal.transport.streams.handshake import HandshakeRefused, check_hello, encode_hello
from shoal.transport.streams.presence import Presence
from shoal.transport.streams.send_queue import QueuedBytes, SendQueue
from shoal.transport.streams.uplink import Uplink, is_acknowledged
from shoal.transport.wire import FRAGMENT_BYTES, Frame, fragment_head

QUEUED_CONTROL_BYTES = 4 * MAX_CONTROL_BYTES  # waiting for one peer
ALL_CONTROL_BYTES = 16 * QUEUED_CONTROL_BYTES  # waiting for all peers
SEND_QUEUES = 4096  # peers and kinds; beyond it the queues that are empty and have no connection are forgotten


class Sender(Generic[Route]):
    """`put`, `resume`, `forget`, `withdraw` and `pending` are called in the node's thread; everything else in the engine's of the kind."""

    def __init__(
        self,
        name: Peer,
        membership: Membership,
        carrier: Carrier[Route],
        limits: Limits,
        engines: Engines,
        presence: Presence,
        warnings: Warnings,
        down_queue_s: Callable[[float], float],
        downlink_queue: DownlinkQueue,
    ) -> None:
        self._name, self._membership, self._carrier = name, membership, carrier
        self._limits = limits
        self._engines, self._presence, self._warnings = engines, presence, warnings
        self._uplink = Uplink(down_queue_s, downlink_queue)
        self._queues: dict[tuple[Peer, StreamKind], SendQueue] = {}
        self._queued_bytes = {"control": QueuedBytes(ALL_CONTROL_BYTES), "bulk": QueuedBytes(math.inf)}

    def put(self, peer: Peer, frame: Frame) -> bool:
        """False: too much waits already, and the frame is dropped."""
        kind: StreamKind = "bulk" if frame.bulk else "control"
        queue = self._queues.get((peer, kind))
        if queue is None:
            queue = self._new_queue(peer, kind)
        if not queue.put(frame):
            return False
        self._engines.sender(kind).post(lambda: self._serve(queue))
        return True

    def resume(self, peer: Peer) -> None:
        """A route to that peer has become known: send what waits for it."""
        for kind in STREAM_KINDS:
            queue = self._queues.get((peer, kind))
            if queue is not None:
                self._engines.sender(kind).post(partial(self._serve, queue))

    def forget(self, peer: Peer) -> None:
        for kind in STREAM_KINDS:
            queue = self._queues.pop((peer, kind), None)
            if queue is not None:
                queue.clear()
                self._engines.sender(kind).post(partial(self._disconnect, queue))

    def withdraw(self, is_void: Callable[[Peer, Message], bool]) -> None:
        for (_, kind), queue in self._queues.items():
            if kind == "bulk":
                queue.withdraw(is_void)

    @property
    def uplink(self) -> BusyRate:
        return self._uplink.busy

    @property
    def pending(self) -> bool:
        """Frames wait to be sent."""
        return any(queue.pending for queue in self._queues.values())

    def _new_queue(self, peer: Peer, kind: StreamKind) -> SendQueue:
        if len(self._queues) >= SEND_QUEUES:  # names are free, and a peer answers every request
            self._queues = {key: queue for key, queue in self._queues.items() if not queue.idle}
        limit_bytes = self._limits.queued_bytes if kind == "bulk" else QUEUED_CONTROL_BYTES
        queue = self._queues[peer, kind] = SendQueue(peer, kind, limit_bytes, self._queued_bytes[kind])
        return queue

    def _serve(self, queue: SendQueue) -> None:
        """Wake the queue's connections, or dial one."""
        if queue.connections:
            for connection in queue.connections:
                self._engines.sender(queue.kind).wake(connection)
            return
        route = self._carrier.route(queue.peer)
        if route is None or not queue.pending:
            return
        queue.begin()
        self._connect(queue, route, 0)

    def _connect(self, queue: SendQueue, route: Route, lane: int) -> None:
        try:
            sock = self._carrier.socket(route)
        except OSError as error:  # no file descriptor is left: the same as a peer that does not answer
            if lane:
                return
            queue.clear()
            self._warnings.warn("no file descriptors", f"{self._name} cannot call {queue.peer}: {error}")
            return self._presence.disconnected(queue.peer, error, always=True)
        connection = Connection(sock, lambda error: self._failed(queue, connection, route, error))
        connection.steps = self._dial(connection, queue, route, lane)
        connection.deadline = time.monotonic() + handshake.CONNECT_S
        connection.is_heard = partial(self._is_heard, queue.peer)
        queue.connections.append(connection)
        self._engines.sender(queue.kind).adopt(connection)

    def _dial(self, connection: Connection, queue: SendQueue, route: Route, lane: int) -> Steps:
        stream, key = yield from self._carrier.dial(connection, route, queue.peer)
        if key != key_id_of(queue.peer):
            raise HandshakeRefused(f"another peer answers at its address (key {key})")
        mine = encode_hello(self._name, queue.peer, queue.kind, self._membership, stream=queue.generation, lane=lane)
        yield from handshake.write(stream, mine)
        hello = check_hello((yield from handshake.read(stream)), key, self._name, self._membership)
        if hello.name != queue.peer:
            raise HandshakeRefused(f"{hello.name} answers at its address: it was restarted")
        connection.deadline = None
        if not lane:
            self._carrier.reached(queue.peer, route)
            self._presence.connected(queue.peer)
            for further in range(1, lanes_of(connection.sock) if queue.kind == "bulk" else 1):
                self._connect(queue, route, further)
        yield from self._send_frames(connection, stream.paced(self._uplink) if queue.kind == "bulk" else stream, queue)

    def _send_frames(self, connection: Connection, stream: ByteStream, queue: SendQueue) -> Steps:
        while True:
            taken = queue.take(FRAGMENT_BYTES if queue.kind == "bulk" else None)
            if taken is None:
                stream.check_open()
                yield WaitFor.READ
                continue
            frame = taken.frame
            if queue.kind == "bulk":  # one fragment, then the frame that has the highest rank by then
                connection.rank = frame.rank
                report = self._uplink.report(connection, taken.left_bytes)
                yield from stream.write(fragment_head(frame.rank, taken.number, taken.nbytes, report))
            for piece in frame.pieces(taken.start, taken.nbytes):
                yield from stream.write(piece)
            queue.sent(taken)
            yield WaitFor.AGAIN

    def _failed(self, queue: SendQueue, connection: Connection, route: Route, error: Exception) -> None:
        established = connection.deadline is None
        if connection in queue.connections:
            first = queue.connections[0] is connection
            queue.connections.remove(connection)
            if not established and not first:
                return None  # the stream goes on without that lane
            self._disconnect(queue)
            if not established and self._carrier.failed(queue.peer, route, str(error) or type(error).__name__):
                return self._serve(queue)
            if established and isinstance(error, TimeoutError):
                self._carrier.stalled(queue.peer)
            queue.clear()
        self._presence.disconnected(queue.peer, error, always=not established)
        return None

    def _is_heard(self, peer: Peer) -> bool:
        """Control to that peer arrives. In any thread."""
        queue = self._queues.get((peer, "control"))
        connections = queue.connections if queue is not None else ()
        return any(each.deadline is None and is_acknowledged(each.sock) for each in connections)

    def _disconnect(self, queue: SendQueue) -> None:
        connections, queue.connections = queue.connections, []
        for connection in connections:
            self._engines.sender(queue.kind).drop(connection)
