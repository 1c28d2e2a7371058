"""Incoming streams of peers that have proven their membership: reads frames and puts messages into the receive queue. For streams.py.

A stream of bulk may have several connections (sender.py). Each reads the head of its next fragment, and the rest when those before it of
its rank are whole: what comes early waits in the system's buffers, whose size is bounded, and pushes back on its connection alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from shoal.core.messages import RANKS, Peer
from shoal.transport.base import MAX_CONTROL_BYTES, STREAM_KINDS, Incoming, Limits, StreamKind
from shoal.transport.budget import Warnings
from shoal.transport.congestion.busy_rate import BusyRate
from shoal.transport.congestion.downlink import DownlinkQueue
from shoal.transport.congestion.shares import Shares
from shoal.transport.identity.invite import Membership
from shoal.transport.streams.admission import Admission, PartialMessages, SenderRates
from shoal.transport.streams.carrier import ByteStream
from shoal.transport.streams.engine import Connection, Engine, Engines, Steps, WaitFor
from shoal.transport.streams.handshake import MAX_LANES, HandshakeRefused, Hello
from shoal.transport.streams.presence import Presence
from shoal.transport.streams.receive_queue import ReceiveQueue, sender_of
from shoal.transport.wire import (
    FRAGMENT_BYTES,
    FRAGMENT_HEAD_BYTES,
    NUMBERS,
    PREFIX_BYTES,
    Arriving,
    Malformed,
    fragment,
    share_told,
)

EARLY_S = 120.0  # that a fragment waits for those before it: a line that has lost much needs 30 s for one
PARTIAL_BLOBS = 4  # of the largest size, that may be in memory incomplete, of all peers: 16 replicas' chunks of 256 MiB


class IncomingStream:
    """Its connections, and what has come of it."""

    def __init__(self, number: int, limits: Limits, bulk: bool) -> None:
        self.number = number  # the sender's, of the stream
        self.connections: list[Connection] = []
        # Shares of this machine's line; None: it has several connections, or cannot
        self.tell: Callable[[bytes], None] | None = None
        self.arriving = [Arriving(limits, bulk) for _ in range(RANKS)]
        self._next = [0] * RANKS  # fragments of each rank that are whole
        self._reading = [False] * RANKS

    def may_read(self, rank: int, number: int) -> bool:
        """The fragments before it are whole. Malformed: it came before."""
        early = (number - self._next[rank]) % NUMBERS
        if early >= NUMBERS // 2 or (not early and self._reading[rank]):
            raise Malformed(f"fragment {number} of rank {rank} again")
        return not early

    def begin(self, rank: int) -> None:
        self._reading[rank] = True

    def end(self, rank: int, connection: Connection) -> None:
        """The fragment that this connection has read is whole: another one may have the next."""
        self._reading[rank] = False
        self._next[rank] = (self._next[rank] + 1) % NUMBERS
        for other in self.connections:
            if other is not connection and other.engine is not None:
                other.engine.wake(other)


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
        downlink_queue: DownlinkQueue,
    ) -> None:
        self._membership, self._limits, self._engines = membership, limits, engines
        self._receive_queue, self._admission = receive_queue, admission
        self._presence, self._warnings = presence, warnings
        self._streams: dict[tuple[Peer, StreamKind], IncomingStream] = {}  # each kind in its engine's thread only
        self._partial_messages = PartialMessages(PARTIAL_BLOBS * limits.blob_bytes)
        self._rates = {kind: SenderRates() for kind in STREAM_KINDS}
        self._shares = Shares(downlink_queue.queue_s)
        self.downlink = BusyRate()

    def engine(self, kind: StreamKind) -> Engine:
        return self._engines.reader(kind)

    def queue_s(self, now: float) -> float:
        """In this machine's downlink. In any thread."""
        return self._shares.queue_s(now)

    def disconnect(self, peer: Peer, kind: StreamKind) -> None:
        self.engine(kind).post(partial(self._disconnect, peer, kind))

    def wake_all(self) -> None:
        """The receive queue has space again."""
        for kind in STREAM_KINDS:
            self.engine(kind).post(partial(self._wake, kind))

    def receive(self, connection: Connection, stream: ByteStream, hello: Hello) -> Steps:
        peer, kind = hello.name, hello.kind
        if not hello.lane:
            self._disconnect(peer, kind)  # the new stream replaces the old one
            self._streams[peer, kind] = IncomingStream(hello.stream, self._limits, kind == "bulk")
        incoming = self._streams.get((peer, kind))
        if incoming is None or incoming.number != hello.stream or len(incoming.connections) >= MAX_LANES:
            self._admission.remove(connection)  # its stream has ended meanwhile, as the sender will see
            return
        incoming.connections.append(connection)
        self._share_with(incoming, stream, peer, kind)
        if self._membership.revoked(peer):
            raise HandshakeRefused("it was revoked during its handshake")
        self._presence.connected(peer)
        yield from self._read_frames(connection, stream, peer, kind, incoming)

    def failed(self, peer: Peer, kind: StreamKind, connection: Connection, error: Exception) -> None:
        self._admission.remove(connection)
        incoming = self._streams.get((peer, kind))
        if incoming is not None and connection in incoming.connections:
            self._disconnect(peer, kind)
        if isinstance(error, Malformed):
            self._warnings.warn("malformed messages", f"{peer} is dropped: it sent {error}")
            for each in STREAM_KINDS:
                self.disconnect(peer, each)
        self._presence.disconnected(peer, error, always=isinstance(error, Malformed))

    def _read_frames(
        self, connection: Connection, stream: ByteStream, peer: Peer, kind: StreamKind, incoming: IncomingStream
    ) -> Steps:
        bulk = kind == "bulk"
        head = memoryview(bytearray(FRAGMENT_HEAD_BYTES))
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
                rank, number, left, report = fragment(head)
                if incoming.tell is not None:
                    self._shares.heard(peer, report, time.monotonic())
                    self._tell_shares()
                yield from self._wait_for_turn(connection, incoming, rank, number)
            message = incoming.arriving[rank]
            if bulk:
                yield from self._read_fragment(stream, peer, message, left)
            else:
                yield from self._read_part(stream, peer, kind, message, left)
            if message.whole:
                self._partial_messages.remove(peer, kind, message.nbytes)
                incoming.arriving[rank] = Arriving(self._limits, bulk)
                self._receive_queue.put(Incoming(peer, *message.message(), message.nbytes), message.nbytes)
                rate.spend(time.monotonic(), 0 if bulk else message.nbytes)
            if bulk:
                incoming.end(rank, connection)
                self._shares.ended(peer)
                self._tell_shares()

    def _share_with(self, incoming: IncomingStream, stream: ByteStream, peer: Peer, kind: StreamKind) -> None:
        """With a sender on one connection: several are paced by their system alone."""
        if kind == "bulk" and len(incoming.connections) == 1:
            incoming.tell = stream.telling(lambda nbytes: self._shares.arrived(peer, nbytes, time.monotonic()))
        elif incoming.tell is not None:
            incoming.tell(share_told(math.inf, time.monotonic()))
            incoming.tell = None
            self._shares.forget(peer)

    def _tell_shares(self) -> None:
        for share in self._shares.told(time.monotonic()):
            incoming = self._streams.get((share.peer, "bulk"))
            if incoming is not None and incoming.tell is not None:
                incoming.tell(share_told(share.rate_Bps, time.monotonic()))

    def _wait_for_turn(self, connection: Connection, incoming: IncomingStream, rank: int, number: int) -> Steps:
        """Until the fragments before this one are whole."""
        until = time.monotonic() + EARLY_S
        while not incoming.may_read(rank, number):
            if time.monotonic() >= until:
                raise ConnectionError(f"what came before fragment {number} of rank {rank} is missing")
            connection.resume_at = until
            yield WaitFor.WOKEN
        connection.resume_at = None
        incoming.begin(rank)

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
            incoming = self._streams.get((peer, kind))
            if incoming is not None:
                self._disconnect(peer, kind)
                error = ConnectionError("too much of what it sends is unfinished")
                self.failed(peer, kind, incoming.connections[0], error)

        self._warnings.warn("unfinished messages", f"{peer} is dropped: too much of what it sends is unfinished")
        self.engine(kind).post(end)

    def _disconnect(self, peer: Peer, kind: StreamKind) -> None:
        incoming = self._streams.pop((peer, kind), None)
        if incoming is not None:
            if incoming.tell is not None:
                self._shares.forget(peer)
            self._partial_messages.remove(peer, kind)
            for connection in incoming.connections:
                self._admission.remove(connection)
                self.engine(kind).drop(connection)

    def _wake(self, kind: StreamKind) -> None:
        for (_, other), incoming in list(self._streams.items()):
            if other == kind:
                for connection in incoming.connections:
                    self.engine(kind).wake(connection)
