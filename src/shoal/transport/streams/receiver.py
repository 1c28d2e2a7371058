"""Incoming streams of peers that have proven their membership: reads frames and puts messages into the receive queue. For streams.py."""

from __future__ import annotations

import time
from functools import partial

from shoal.core.messages import RANKS, Peer
from shoal.transport.base import MAX_CONTROL_BYTES, STREAM_KINDS, Incoming, Limits, StreamKind
from shoal.transport.budget import Warnings
from shoal.transport.identity.invite import Membership
from shoal.transport.streams.admission import Admission, PartialMessages, SenderRates
from shoal.transport.streams.busy_rate import BusyRate
from shoal.transport.streams.carrier import ByteStream
from shoal.transport.streams.engine import Connection, Engine, Engines, Steps, WaitFor
from shoal.transport.streams.handshake import HandshakeRefused
from shoal.transport.streams.presence import Presence
from shoal.transport.streams.receive_queue import ReceiveQueue, sender_of
from shoal.transport.wire import FRAGMENT_BYTES, FRAGMENT_HEAD_BYTES, PREFIX_BYTES, Arriving, Malformed, fragment

PARTIAL_BLOBS = 4  # of the largest size, that may be in memory incomplete, of all peers: 16 replicas' chunks of 256 MiB


class Receiver:
    """`disconnect` and `wake_all` are called from any thread; everything else in the engine's that reads the kind."""

    def __init__(
        self,
        membership: Membership,
        limits: Limits,
        engines: Engines,
        receive_queue: ReceiveQueue,
        admission: Admission,
        presence: Presence,
        warnings: Warnings,
    ) -> None:
        self._membership, self._limits, self._engines = membership, limits, engines
        self._receive_queue, self._admission = receive_queue, admission
        self._presence, self._warnings = presence, warnings
        self._connections: dict[tuple[Peer, StreamKind], Connection] = {}  # each kind in its engine's thread only
        self._partial_messages = PartialMessages(PARTIAL_BLOBS * limits.blob_bytes)
        self._rates = {kind: SenderRates() for kind in STREAM_KINDS}
        self.downlink = BusyRate()

    def engine(self, kind: StreamKind) -> Engine:
        return self._engines.reader(kind)

    def disconnect(self, peer: Peer, kind: StreamKind) -> None:
        self.engine(kind).post(partial(self._disconnect, peer, kind))

    def wake_all(self) -> None:
        """The receive queue has space again."""
        for kind in STREAM_KINDS:
            self.engine(kind).post(partial(self._wake, kind))

    def receive(self, connection: Connection, stream: ByteStream, peer: Peer, kind: StreamKind) -> Steps:
        self._disconnect(peer, kind)  # the new stream replaces the old one
        self._connections[peer, kind] = connection
        if self._membership.revoked(peer):
            raise HandshakeRefused("it was revoked during its handshake")
        self._presence.connected(peer)
        yield from self._read_frames(connection, stream, peer, kind)

    def failed(self, peer: Peer, kind: StreamKind, connection: Connection, error: Exception) -> None:
        self._admission.remove(connection)
        if self._connections.get((peer, kind)) is connection:
            del self._connections[peer, kind]
            self._partial_messages.remove(peer, kind)
        if isinstance(error, Malformed):
            self._warnings.warn("malformed messages", f"{peer} is dropped: it sent {error}")
            for each in STREAM_KINDS:
                self.disconnect(peer, each)
        self._presence.disconnected(peer, error, always=isinstance(error, Malformed))

    def _read_frames(self, connection: Connection, stream: ByteStream, peer: Peer, kind: StreamKind) -> Steps:
        bulk = kind == "bulk"
        head = memoryview(bytearray(FRAGMENT_HEAD_BYTES))
        arriving = [Arriving(self._limits, bulk) for _ in range(RANKS)]
        rate = self._rates[kind].of(sender_of(peer))
        while True:
            while (debt_s := rate.debt_s(now := time.monotonic())) > 0:  # shared by the key's names and connections
                connection.resume_at = now + debt_s
                yield WaitFor.WOKEN
            while self._receive_queue.full(bulk, peer):
                yield WaitFor.WOKEN
            rank, left = 0, MAX_CONTROL_BYTES + PREFIX_BYTES
            if bulk:
                yield from stream.read(head)
                rank, left = fragment(head)
            message = arriving[rank]
            if bulk:
                yield from self._read_fragment(stream, peer, message, left)
            else:
                yield from self._read_part(stream, peer, kind, message, left)
            if message.whole:
                self._partial_messages.remove(peer, kind, message.nbytes)
                arriving[rank] = Arriving(self._limits, bulk)
                self._receive_queue.put(Incoming(peer, *message.message(), message.nbytes), message.nbytes)
                rate.spend(time.monotonic(), 0 if bulk else message.nbytes)

    def _read_fragment(self, stream: ByteStream, peer: Peer, message: Arriving, left: int) -> Steps:
        """Its head has come, so until its end this machine's line is busy, unless the sender's is narrower."""
        self.downlink.begin(time.monotonic())
        read = 0
        try:
            yield from self._read_part(stream, peer, "bulk", message, left)
            read = left
        finally:
            self.downlink.end(read, time.monotonic())

    def _read_part(self, stream: ByteStream, peer: Peer, kind: StreamKind, message: Arriving, left: int) -> Steps:
        """A fragment of bulk, or the whole of a control message."""
        while left and not (message.whole and kind == "control"):
            view = message.room(min(left, FRAGMENT_BYTES))
            yield from stream.read(view)
            message.advance(view.nbytes)
            left -= view.nbytes
            largest = self._partial_messages.add(peer, kind, view.nbytes)
            if largest is not None:
                self._drop_partial(*largest)

    def _drop_partial(self, peer: Peer, kind: StreamKind) -> None:
        """Incomplete messages take too much memory: end the connection that holds most of it."""

        def end() -> None:
            connection = self._connections.get((peer, kind))
            if connection is not None:
                self._disconnect(peer, kind)
                self.failed(peer, kind, connection, ConnectionError("too much of what it sends is unfinished"))

        self._warnings.warn("unfinished messages", f"{peer} is dropped: too much of what it sends is unfinished")
        self.engine(kind).post(end)

    def _disconnect(self, peer: Peer, kind: StreamKind) -> None:
        connection = self._connections.pop((peer, kind), None)
        if connection is not None:
            self._admission.remove(connection)
            self._partial_messages.remove(peer, kind)
            self.engine(kind).drop(connection)

    def _wake(self, kind: StreamKind) -> None:
        for (_, other), connection in list(self._connections.items()):
            if other == kind:
                self.engine(kind).wake(connection)
