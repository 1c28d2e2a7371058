"""The contract of base.py over any network that carries streams of bytes whose other end has proven its key.

What is beneath (TLS over TCP, libp2p) is a Carrier: it listens, dials and says whose key the other end holds. Everything
else is decided here, once for all of them. A peer's membership is proven by the pass in its hello, and the other side must
hold the very name that was asked for. For each peer there are up to four streams: control and bulk, one way each, opened by
the sender when there is something to send. One way, because then a new stream simply replaces the old one and order cannot
suffer; apart, because then control never waits behind bulk. What is bulk goes by rank, in fragments. Four threads do the
work (engine.py): one for all control, one for bulk out, one for bulk in, and one for those who have not yet shown a pass: whatever
they do, members do not wait for it. How many may call is admission.py's; how fast one key may talk is decided here.

A stream that breaks takes what waits for it along and is reported as Lost; the next send tries again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from functools import partial
from typing import Generic, Protocol, TypeVar

from shoal.core.messages import RANKS, Message, Peer
from shoal.transport.base import MAX_CONTROL_BYTES, Blob, Incoming, Limits, Lost
from shoal.transport.budget import Allowance, Budget, Warnings, address_group
from shoal.transport.identity.identity import key_id_of
from shoal.transport.identity.invite import Membership
from shoal.transport.streams.admission import Admission, AdmittedConnection, PartialMessages
from shoal.transport.streams.engine import Connection, Engine, Steps, WaitFor
from shoal.transport.streams.handshake import (
    MAX_HELLO_BYTES,
    HandshakeRefused,
    check_hello,
    encode_hello,
    encode_rejection,
)
from shoal.transport.streams.receive_queue import ReceiveQueue, sender_of
from shoal.transport.streams.send_queue import Kind, QueuedBytes, SendQueue
from shoal.transport.wire import (
    FRAGMENT_BYTES,
    FRAGMENT_HEAD_BYTES,
    ORDINARY_BYTES,
    PREFIX_BYTES,
    Arriving,
    Malformed,
    encode,
    fragment,
    fragment_head,
)

log = logging.getLogger(__name__)

CONNECT_S = 5.0  # connection, handshake and hello together
LINGER_S = 1.0  # what `close` leaves for last words
QUEUED_CONTROL_BYTES = 4 * MAX_CONTROL_BYTES  # waiting for one peer
ALL_CONTROL_BYTES = 16 * QUEUED_CONTROL_BYTES  # waiting for all peers
SEND_QUEUES = (
    4096  # peers and kinds that something was sent to; those where nothing waits and nobody listens are forgotten
)
ACCEPTED = 16  # connections at once, before those that came earlier have their turn
PAUSE_S = 0.01  # before the next are accepted, when more come than may
# From one key: all messages' number, bytes of control, and of those that are large, which take the node's time out of proportion. A trainer
# sends 50 messages of 120 bytes for a microbatch of three stages; a leader of 1,000 peers tells each a View of 200 kB now and then.
PACE_MESSAGES = Allowance(per_s=4000.0, at_once=16_000.0)
PACE_BYTES = Allowance(per_s=2 << 20, at_once=16 << 20)
PACE_LARGE_BYTES = Allowance(per_s=512 << 10, at_once=8 << 20)
PARTIAL_BLOBS = 4  # of the largest size, that may have come in part, from all: 16 replicas' chunks of 256 MiB
PACES = 4096  # keys whose pace is remembered

_words = struct.Struct(">H")  # before a hello: its length
_KINDS: tuple[Kind, Kind] = ("control", "bulk")


class ByteStream(Protocol):
    """Bytes both ways, in steps (engine.py)."""

    def read(self, view: memoryview) -> Steps:
        """Fill `view`. ConnectionError when the other side has closed."""

    def write(self, view: memoryview) -> Steps: ...

    def listen(self) -> None:
        """Between writes: ConnectionError when the other side has closed; it has nothing else to say."""

    def paced(self) -> ByteStream:
        """For bulk, once both have said hello: the same stream, kept from filling a line that it shares with control."""


Opening = Generator[
    "WaitFor | Engine", None, "tuple[ByteStream, str]"
]  # the stream, and the key id its other end has proven


Route = TypeVar("Route")


class Carrier(Protocol[Route]):
    """What is beneath. A route to a peer is in the carrier's own terms: what `learn` was told of it."""

    async def start(self) -> tuple[socket.socket, ...]:
        """Listening sockets. ValueError when that cannot be."""

    def route(self, peer: Peer) -> Route | None:
        """The one to be gone next."""

    def socket(self, route: Route) -> socket.socket:
        """For `dial`, which connects it."""

    def dial(self, link: Connection, route: Route) -> Opening: ...

    def answer(self, link: Connection) -> Opening:
        """The link's socket was just accepted."""

    def reached(self, peer: Peer, route: Route) -> None:
        """By that route; in an engine's thread, as the next."""

    def failed(self, peer: Peer, route: Route, reason: str) -> bool:
        """There is no getting through that route. True: `route` tells another that should be gone at once."""

    def forget(self, peer: Peer) -> None: ...

    async def close(self) -> None: ...


class SenderRate:
    """How fast one key may talk."""

    def __init__(self) -> None:
        self._messages, self._bytes, self._large = Budget(PACE_MESSAGES), Budget(PACE_BYTES), Budget(PACE_LARGE_BYTES)

    def spend(self, now: float, nbytes: int) -> None:
        """For one message."""
        self._messages.spend(now, 1.0)
        self._bytes.spend(now, nbytes)
        self._large.spend(now, nbytes if nbytes > ORDINARY_BYTES else 0)

    def debt_s(self, now: float) -> float:
        """Seconds until the next may be read."""
        return max(self._messages.debt_s(now), self._bytes.debt_s(now), self._large.debt_s(now))


class StreamTransport(Generic[Route]):
    """`name` is that of the carrier's identity."""

    def __init__(self, name: Peer, membership: Membership, carrier: Carrier[Route], limits: Limits) -> None:
        self.name = name
        self._membership = membership
        self._carrier = carrier
        self._limits = limits
        self._control = Engine("shoal control")
        self._bulk_out = Engine("shoal bulk out", yields=True)
        self._bulk_in = Engine("shoal bulk in", yields=True)
        self._strangers = Engine("shoal strangers", yields=True)
        self._receive_queue = ReceiveQueue(on_space=self._resume)
        self._send_queues: dict[tuple[Peer, Kind], SendQueue] = {}
        self._incoming: dict[tuple[Peer, Kind], Connection] = {}  # each kind in its engine's thread only
        self._up: set[Peer] = set()  # node's thread only, as the next two
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._admission = Admission()
        self._partial_messages = PartialMessages(PARTIAL_BLOBS * limits.blob_bytes)
        self._queued_bytes = {"control": QueuedBytes(ALL_CONTROL_BYTES), "bulk": QueuedBytes(math.inf)}
        self._paces: dict[Kind, OrderedDict[str, SenderRate]] = {"control": OrderedDict(), "bulk": OrderedDict()}
        self._warnings = Warnings(log)
        self._spare: socket.socket | None = None

    # ------------------------------------------------------------------------------------------------- the contract

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        listeners = await self._carrier.start()
        self._spare = socket.socket()
        for listener in listeners:
            self.listen(listener)
        for engine in self._engines():
            engine.start()

    def listen(self, listener: socket.socket) -> None:
        """Accept what comes in there, too."""
        link = Connection(listener, lambda error: log.error("%s no longer accepts connections: %s", self.name, error))
        link.steps = self._accept(link)
        self._strangers.post(lambda: self._strangers.adopt(link))

    def send(self, peer: Peer, message: Message, blobs: tuple[Blob, ...] = ()) -> int:
        frame = encode(message, blobs, self._limits)
        if self._closed:
            return 0
        if peer == self.name:
            self._receive_queue.put(Incoming(peer, message, blobs), frame.nbytes)
            return 0
        if self._carrier.route(peer) is None:
            self._receive_queue.put(Lost(peer, "its address is not known"))
            return 0
        kind: Kind = "bulk" if frame.bulk else "control"
        box = self._send_queues.get((peer, kind))
        if box is None:
            box = self._new_send_queue(peer, kind)
        if not box.put(frame):
            self._warnings.warn(
                "messages dropped", f"too much waits for {peer}: {type(message).__name__} to it is dropped"
            )
            return 0
        self._sender(kind).post(lambda: self._serve(box))
        return frame.nbytes

    async def receive(self) -> Incoming | Lost:
        item = await self._receive_queue.take()
        if isinstance(item, Incoming):
            self._up.add(item.peer)
        return item

    def forget(self, peer: Peer) -> None:
        self._carrier.forget(peer)
        self._up.discard(peer)
        self._receive_queue.drop(lambda item: item.peer == peer)
        for kind in _KINDS:
            box = self._send_queues.pop((peer, kind), None)
            if box is not None:
                box.empty()
                self._sender(kind).post(partial(self._unlink, box))
            self._reader(kind).post(partial(self._hang_up, peer, kind))

    async def close(self) -> None:
        """Last words get a second to leave."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + LINGER_S
        while any(box.first() for box in self._send_queues.values()) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        for engine in self._engines():
            engine.stop()
        await self._carrier.close()
        if self._spare is not None:
            self._spare.close()

    # ------------------------------------------------------------------------------------------------------- sending

    def _new_send_queue(self, peer: Peer, kind: Kind) -> SendQueue:
        if len(self._send_queues) >= SEND_QUEUES:  # names are free, and a peer answers whoever asks
            self._send_queues = {one: box for one, box in self._send_queues.items() if not box.idle}
        limit_bytes = self._limits.queued_bytes if kind == "bulk" else QUEUED_CONTROL_BYTES
        box = self._send_queues[peer, kind] = SendQueue(peer, kind, limit_bytes, self._queued_bytes[kind])
        return box

    def _serve(self, box: SendQueue) -> None:
        """There may be something to send: connect, or tell the connection."""
        if box.link is not None:
            self._sender(box.kind).wake(box.link)
            return
        route = self._carrier.route(box.peer)
        if route is None or box.first() is None:
            return
        try:
            sock = self._carrier.socket(route)
        except OSError as error:  # no descriptor is left: as if the peer did not answer
            box.empty()
            self._warnings.warn("no file descriptors", f"{self.name} cannot call {box.peer}: {error}")
            return self._tell(partial(self._lose, box.peer, error, always=True))
        link = Connection(sock, lambda error: self._broken(box, link, route, error))
        link.steps = self._dial(link, box, route)
        link.deadline = time.monotonic() + CONNECT_S
        box.link = link
        self._sender(box.kind).adopt(link)

    def _dial(self, link: Connection, box: SendQueue, route: Route) -> Steps:
        stream, key = yield from self._carrier.dial(link, route)
        if key != key_id_of(box.peer):
            raise HandshakeRefused(f"another peer answers at its address (key {key})")
        yield from _say(stream, encode_hello(self.name, box.peer, box.kind, self._membership))
        hello = check_hello((yield from _hear(stream)), key, self.name, self._membership)
        if hello.name != box.peer:
            raise HandshakeRefused(f"{hello.name} answers at its address: it was restarted")
        link.deadline = None
        self._carrier.reached(box.peer, route)
        self._tell(lambda: self._up.add(box.peer))
        yield from self._send_frames(stream.paced() if box.kind == "bulk" else stream, box)

    def _send_frames(self, stream: ByteStream, box: SendQueue) -> Steps:
        while True:
            first = box.first()
            if first is None:
                stream.listen()
                yield WaitFor.READ
                continue
            frame, gone = first
            nbytes = frame.nbytes
            if box.kind == "bulk":  # a fragment, then whatever has the highest rank by then
                nbytes = min(FRAGMENT_BYTES, frame.nbytes - gone)
                yield from stream.write(fragment_head(frame.rank, nbytes))
            for piece in frame.pieces(gone, nbytes):
                yield from stream.write(piece)
            box.sent(frame, nbytes)
            yield WaitFor.AGAIN

    def _broken(self, box: SendQueue, link: Connection, route: Route, error: Exception) -> None:
        established = link.deadline is None
        if box.link is link:
            box.link = None
            if not established and self._carrier.failed(box.peer, route, str(error) or type(error).__name__):
                return self._serve(box)
            box.empty()
        self._tell(lambda: self._lose(box.peer, error, always=not established))

    def _unlink(self, box: SendQueue) -> None:
        if box.link is not None:
            self._sender(box.kind).drop(box.link)
            box.link = None

    # ----------------------------------------------------------------------------------------------------- receiving

    def _accept(self, listening: Connection) -> Steps:
        turn = 0
        while True:
            turn += 1
            if turn % ACCEPTED == 0:
                yield WaitFor.AGAIN
            try:
                sock, address = listening.sock.accept()
            except BlockingIOError:
                yield WaitFor.READ
                continue
            except OSError as error:  # the caller is gone again, or there are no file descriptors left
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away(listening.sock)
                yield from self._pause(listening)
                continue
            place = address_group(address[0]) if isinstance(address, tuple) else ""  # a libp2p daemon tells no address
            if self._closed or not self._admission.may_connect(place):
                sock.close()
                self._warnings.warn("connections refused", f"{self.name}: too many new connections from {place}")
                yield from self._pause(listening)
                continue
            sock.setblocking(False)
            link = Connection(sock, lambda error: None)
            link.failed = partial(self._stranger_failed, link, place)
            link.steps = self._answer(link)
            link.deadline = time.monotonic() + CONNECT_S
            gone = self._admission.add_pending(link, place)
            if gone is not None:
                self._strangers.drop(gone)
                self._warnings.warn("silent connections", f"{self.name}: too many who do not say who they are")
            self._strangers.adopt(link)

    def _pause(self, link: Connection) -> Steps:
        until = link.resume_at = time.monotonic() + PAUSE_S
        while time.monotonic() < until:
            yield WaitFor.WOKEN

    def _turn_away(self, listener: socket.socket) -> None:
        """No file descriptor is left: give up the spare one for as long as it takes to close the caller's connection, or it
        would wait, and this thread spin, for ever."""
        text = f"{self.name} has no file descriptors left for further connections; raise the limit (ulimit -n)"
        self._warnings.warn("no file descriptors", text)
        if self._spare is not None:
            self._spare.close()
            try:
                listener.accept()[0].close()
            except OSError:  # another thread was faster: the caller waits for its own time-out
                pass
        try:
            self._spare = socket.socket()
        except OSError:
            self._spare = None

    def _stranger_failed(self, link: Connection, place: str, error: Exception) -> None:
        self._admission.remove(link)
        self._warnings.warn("connections refused", f"{self.name} refused a connection from {place}: {error}")

    def _answer(self, link: Connection) -> Steps:
        stream, key = yield from self._carrier.answer(link)
        try:
            hello = check_hello((yield from _hear(stream)), key, self.name, self._membership)
            gone = self._enter(link, key, hello.name, hello.kind)
        except HandshakeRefused as refusal:
            yield from _say(stream, encode_rejection(refusal))
            raise HandshakeRefused(f"key {key}: {refusal}") from None
        link.failed = lambda error: self._hung_up(hello.name, hello.kind, link, error)
        for caller in gone:
            self._reader(caller.kind).post(partial(self._hang_up, caller.peer, caller.kind))
        yield from _say(stream, encode_hello(self.name, hello.name, hello.kind, self._membership))
        link.deadline = None
        yield self._reader(hello.kind)
        if not self._admission.is_admitted(link):
            raise ConnectionError("it gave way to another connection")
        if hello.kind == "bulk":
            stream = stream.paced()
        self._hang_up(hello.name, hello.kind)  # the new one replaces the old one
        self._incoming[hello.name, hello.kind] = link
        if self._membership.revoked(hello.name):
            raise HandshakeRefused("it was revoked while it came in")
        self._tell(lambda: self._up.add(hello.name))
        yield from self._read_frames(stream, hello.name, hello.kind)

    def _enter(self, link: Connection, key: str, peer: Peer, kind: Kind) -> list[AdmittedConnection]:
        try:
            return self._admission.admit(link, key, peer, kind)
        except ValueError as error:
            raise HandshakeRefused(str(error)) from None

    def _read_frames(self, stream: ByteStream, peer: Peer, kind: Kind) -> Steps:
        bulk = kind == "bulk"
        mark = memoryview(bytearray(FRAGMENT_HEAD_BYTES))
        arriving = [Arriving(self._limits, bulk) for _ in range(RANKS)]
        link = self._incoming[peer, kind]
        pace = self._pace(kind, sender_of(peer))
        while True:
            while (debt_s := pace.debt_s(now := time.monotonic())) > 0:  # its names and connections have one
                link.resume_at = now + debt_s
                yield WaitFor.WOKEN
            while self._receive_queue.full(bulk, peer):
                yield WaitFor.WOKEN
            place, left = 0, MAX_CONTROL_BYTES + PREFIX_BYTES
            if bulk:
                yield from stream.read(mark)
                place, left = fragment(mark)
            one = arriving[place]
            while left and not (one.whole and not bulk):
                view = one.room(min(left, FRAGMENT_BYTES))
                yield from stream.read(view)
                one.came(view.nbytes)
                left -= view.nbytes
                greediest = self._partial_messages.add(peer, kind, view.nbytes)
                if greediest is not None:
                    self._give_up(*greediest)
            if one.whole:
                self._partial_messages.over(peer, kind, one.nbytes)
                arriving[place] = Arriving(self._limits, bulk)
                self._receive_queue.put(Incoming(peer, *one.message(), one.nbytes), one.nbytes)
                pace.spend(time.monotonic(), 0 if bulk else one.nbytes)

    def _give_up(self, peer: Peer, kind: Kind) -> None:
        """Too much of what has come is unfinished: the connection that holds most of it ends."""

        def end() -> None:
            link = self._incoming.get((peer, kind))
            if link is not None:
                self._hang_up(peer, kind)
                self._hung_up(peer, kind, link, ConnectionError("too much of what it sends is unfinished"))

        self._warnings.warn("unfinished messages", f"{peer} is dropped: too much of what it sends is unfinished")
        self._reader(kind).post(end)

    def _pace(self, kind: Kind, key: str) -> SenderRate:
        """In the reader's thread. One for all that a key sends of a kind, whatever names it takes."""
        paces = self._paces[kind]
        pace = paces.setdefault(key, SenderRate())
        paces.move_to_end(key)
        if len(paces) > PACES:
            paces.popitem(last=False)
        return pace

    def _hung_up(self, peer: Peer, kind: Kind, link: Connection, error: Exception) -> None:
        self._admission.remove(link)
        if self._incoming.get((peer, kind)) is link:
            del self._incoming[peer, kind]
            self._partial_messages.over(peer, kind)
        if isinstance(error, Malformed):
            self._warnings.warn("malformed messages", f"{peer} is dropped: it sent {error}")
            for each in _KINDS:
                self._reader(each).post(partial(self._hang_up, peer, each))
        self._tell(lambda: self._lose(peer, error, always=isinstance(error, Malformed)))

    def _hang_up(self, peer: Peer, kind: Kind) -> None:
        old = self._incoming.pop((peer, kind), None)
        if old is not None:
            self._admission.remove(old)
            self._partial_messages.over(peer, kind)
            self._reader(kind).drop(old)

    def _resume(self) -> None:
        """There is room again in the inbox."""
        for kind in _KINDS:
            self._reader(kind).post(partial(self._wake_readers, kind))

    def _wake_readers(self, kind: Kind) -> None:
        for (_, other), link in list(self._incoming.items()):
            if other == kind:
                self._reader(kind).wake(link)

    # ------------------------------------------------------------------------------------------------------- private

    def _engines(self) -> tuple[Engine, ...]:
        return self._strangers, self._control, self._bulk_out, self._bulk_in

    def _sender(self, kind: Kind) -> Engine:
        return self._control if kind == "control" else self._bulk_out

    def _reader(self, kind: Kind) -> Engine:
        return self._control if kind == "control" else self._bulk_in

    def _lose(self, peer: Peer, error: Exception, always: bool) -> None:
        """In the node's thread. When a peer dies all its connections break: only the first is news."""
        if not self._closed and (always or peer in self._up):
            self._up.discard(peer)
            self._receive_queue.put(Lost(peer, str(error) or type(error).__name__))

    def _tell(self, call: Callable[[], object]) -> None:
        """Run in the node's thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            pass


def _say(stream: ByteStream, words: bytes) -> Steps:
    yield from stream.write(memoryview(_words.pack(len(words)) + words))


def _hear(stream: ByteStream) -> Generator[WaitFor | Engine, None, bytearray]:
    prefix = memoryview(bytearray(_words.size))
    yield from stream.read(prefix)
    (length,) = _words.unpack(prefix)
    if length > MAX_HELLO_BYTES:
        raise HandshakeRefused(f"a hello of {length} bytes")
    words = bytearray(length)
    yield from stream.read(memoryview(words))
    return words
