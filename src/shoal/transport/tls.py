"""TLS 1.3 over TCP between peers that reach one another directly: the network of real runs.

For runtime, behind the contract of base.py. A peer proves its key by its certificate, and its membership by the pass in
its hello; the other side must hold the very name that was asked for. For each peer there are up to four connections:
control and bulk, one way each, opened by the sender when there is something to send. One way, because then a new
connection simply replaces the old one and order cannot suffer; apart, because then control never waits behind bulk.
Three threads do the work (engine.py): one for all control, one for bulk out, one for bulk in.

A connection that breaks takes what waits for it along and is reported as Lost; the next send tries again.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Literal

from shoal.core.messages import Message, Peer
from shoal.transport.base import MAX_CONTROL_BYTES, Blob, Incoming, Limits, Lost
from shoal.transport.engine import Channel, Engine, Link, Steps, Want
from shoal.transport.hello import MAX_HELLO_BYTES, Refusal, check_hello, encode_hello, encode_no
from shoal.transport.identity import Identity, certificate_key_id, client_context, key_id_of, server_context
from shoal.transport.inbox import Inbox
from shoal.transport.invite import Membership
from shoal.transport.wire import (
    PREFIX_BYTES,
    Frame,
    Malformed,
    blobs_of,
    buffers,
    decode_head,
    encode,
    head_bytes,
)

log = logging.getLogger(__name__)

CONNECT_S = 5.0  # connection, handshake and hello together
LINGER_S = 1.0  # what `close` leaves for last words
UNKNOWN = 128  # connections that have not yet said who they are
QUEUED_CONTROL_BYTES = 4 * MAX_CONTROL_BYTES  # waiting for one peer
DEAD_LINE_MS = 10_000  # sent bytes not acknowledged for this long: the line is dead

Kind = Literal["control", "bulk"]
Address = tuple[str, int]
_words = struct.Struct(">H")  # before a hello: its length
_KINDS: tuple[Kind, Kind] = ("control", "bulk")


class _Box:
    """What waits for one peer on one kind of connection, and that connection. Filled by the node's thread, emptied by the
    engine's."""

    def __init__(self, peer: Peer, kind: Kind, limit_bytes: int) -> None:
        self.peer = peer
        self.kind: Kind = kind
        self.link: Link | None = None  # engine's thread only
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()

    def put(self, frame: Frame) -> bool:
        """False: too much waits already, the frame vanishes. One frame is always taken."""
        with self._lock:
            if self._frames and self._bytes + frame.nbytes > self._limit_bytes:
                return False
            self._frames.append(frame)
            self._bytes += frame.nbytes
            return True

    def first(self) -> Frame | None:
        """Stays in the box until `sent`."""
        with self._lock:
            return self._frames[0] if self._frames else None

    def sent(self, frame: Frame) -> None:
        with self._lock:
            if self._frames and self._frames[0] is frame:  # not when the box was emptied meanwhile
                self._frames.popleft()
                self._bytes -= frame.nbytes

    def empty(self) -> None:
        with self._lock:
            self._frames.clear()
            self._bytes = 0


class TlsTransport:
    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits = Limits(),
    ) -> None:
        self.name = identity.name
        self._membership = membership
        self._asked: Address = (host, port)
        self._limits = limits
        self._dialling = client_context(identity)
        self._answering = server_context(identity)
        self._control = Engine("shoal control")
        self._bulk_out = Engine("shoal bulk out")
        self._bulk_in = Engine("shoal bulk in")
        self._inbox = Inbox(on_room=self._resume)
        self._addresses: dict[Peer, Address] = {}
        self._boxes: dict[tuple[Peer, Kind], _Box] = {}
        self._incoming: dict[tuple[Peer, Kind], Link] = {}  # each kind in its engine's thread only
        self._up: set[Peer] = set()  # node's thread only, as the next two
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._unknown = 0  # control engine's thread only
        self._bound: Address | None = None
        self._spare: socket.socket | None = None

    # ------------------------------------------------------------------------------------------------- the contract

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        listener = await self._listen()
        self._spare = socket.socket()
        link = Link(listener, lambda error: log.error("%s no longer accepts connections: %s", self.name, error))
        link.steps = self._accept(link)
        self._control.post(lambda: self._control.adopt(link))
        for engine in self._engines():
            engine.start()

    def send(self, peer: Peer, message: Message, blobs: tuple[Blob, ...] = ()) -> None:
        frame = encode(message, blobs, self._limits)
        if self._closed:
            return
        if peer == self.name:
            self._inbox.put(Incoming(peer, message, blobs), frame.nbytes)
            return
        if peer not in self._addresses:
            self._inbox.put(Lost(peer, "its address is not known"))
            return
        kind: Kind = "bulk" if frame.bulk else "control"
        box = self._boxes.get((peer, kind))
        if box is None:
            limit_bytes = self._limits.queued_bytes if frame.bulk else QUEUED_CONTROL_BYTES
            box = self._boxes[peer, kind] = _Box(peer, kind, limit_bytes)
        if box.put(frame):
            self._sender(kind).post(lambda: self._serve(box))
        else:
            log.warning("too much waits for %s: %s to it is dropped", peer, type(message).__name__)

    async def receive(self) -> Incoming | Lost:
        item = await self._inbox.take()
        if isinstance(item, Incoming):
            self._up.add(item.peer)
        return item

    def forget(self, peer: Peer) -> None:
        self._addresses.pop(peer, None)
        self._up.discard(peer)
        self._inbox.drop(lambda item: item.peer == peer)
        for kind in _KINDS:
            box = self._boxes.pop((peer, kind), None)
            if box is not None:
                box.empty()
                self._sender(kind).post(lambda box=box: self._unlink(box))  # type: ignore[misc]
            self._reader(kind).post(lambda kind=kind: self._hang_up(peer, kind))  # type: ignore[misc]

    async def close(self) -> None:
        """Last words get a second to leave."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + LINGER_S
        while any(box.first() for box in self._boxes.values()) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        for engine in self._engines():
            engine.stop()
        if self._spare is not None:
            self._spare.close()

    # ------------------------------------------------------------------------------------------------- the address book

    @property
    def address(self) -> Address:
        """Where others reach this peer: what the directory should announce."""
        assert self._bound is not None, "not started"
        host, port = self._bound
        return (_outward(host), port) if ipaddress.ip_address(host).is_unspecified else (host, port)

    def learn(self, peer: Peer, address: Address) -> None:
        """Where that peer is reached, as an IP address. Others are not looked up; they count as not known."""
        host, port = address
        try:
            ipaddress.ip_address(host)
            key_id_of(peer)
        except ValueError as error:
            log.warning("the address of %s is of no use: %s", peer, error)
            return
        if peer != self.name and 0 < port < 2**16:
            self._addresses[peer] = (host, port)

    # ------------------------------------------------------------------------------------------------------- sending

    def _serve(self, box: _Box) -> None:
        """There may be something to send: connect, or tell the connection."""
        if box.link is not None:
            self._sender(box.kind).wake(box.link)
            return
        address = self._addresses.get(box.peer)
        if address is None or box.first() is None:
            return
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        link = Link(_tuned(socket.socket(family, socket.SOCK_STREAM)), lambda error: self._broken(box, link, error))
        link.steps = self._dial(link, box, address)
        link.deadline = time.monotonic() + CONNECT_S
        box.link = link
        self._sender(box.kind).adopt(link)

    def _dial(self, link: Link, box: _Box, address: Address) -> Steps:
        yield from _connect(link.sock, address)
        channel = Channel(link, self._dialling, server_side=False)
        yield from channel.handshake()
        key = certificate_key_id(channel.certificate())
        if key != key_id_of(box.peer):
            raise Refusal(f"another peer answers at {address[0]}:{address[1]} (key {key})")
        yield from _say(channel, encode_hello(self.name, box.peer, box.kind, self._membership))
        hello = check_hello((yield from _hear(channel)), key, self.name, self._membership)
        if hello.name != box.peer:
            raise Refusal(f"{hello.name} answers at its address: it was restarted")
        link.deadline = None
        self._tell(lambda: self._up.add(box.peer))
        yield from self._send_frames(channel, box)

    def _send_frames(self, channel: Channel, box: _Box) -> Steps:
        while True:
            frame = box.first()
            if frame is None:
                channel.listen()
                yield Want.READ
                continue
            for part in frame.parts:
                yield from channel.write(part)
            box.sent(frame)
            yield Want.AGAIN

    def _broken(self, box: _Box, link: Link, error: Exception) -> None:
        if box.link is link:
            box.link = None
            box.empty()
        established = link.deadline is None
        self._tell(lambda: self._lose(box.peer, error, always=not established))

    def _unlink(self, box: _Box) -> None:
        if box.link is not None:
            self._sender(box.kind).drop(box.link)
            box.link = None

    # ----------------------------------------------------------------------------------------------------- receiving

    async def _listen(self) -> socket.socket:
        host, port = self._asked
        family, where = await _resolved(host, port)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if os.name == "posix":  # elsewhere it would let two processes share the port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(256)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise ValueError(
                    f"network.port = {port}: taken on {host}; choose another, or 0 for any free one"
                ) from None
            raise ValueError(f"cannot listen on {host}:{port}: {error}; check network.host and network.port") from None
        listener.setblocking(False)
        self._bound = listener.getsockname()[:2]
        return listener

    def _accept(self, listening: Link) -> Steps:
        while True:
            try:
                sock, _ = listening.sock.accept()
            except BlockingIOError:
                yield Want.READ
                continue
            except OSError as error:  # the caller is gone again, or there are no file descriptors left
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away(listening.sock)
                yield Want.READ
                continue
            if self._unknown >= UNKNOWN or self._closed:
                sock.close()
                continue
            self._unknown += 1
            link = Link(_tuned(sock), self._stranger_failed)
            link.steps = self._answer(link)
            link.deadline = time.monotonic() + CONNECT_S
            self._control.adopt(link)

    def _turn_away(self, listener: socket.socket) -> None:
        """No file descriptor is left: give up the spare one for as long as it takes to close the caller's connection, or it
        would wait, and this thread spin, for ever."""
        log.error("%s has no file descriptors left for further connections; raise the limit (ulimit -n)", self.name)
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

    def _stranger_failed(self, error: Exception) -> None:
        self._unknown -= 1
        log.warning("%s refused a connection: %s", self.name, error)

    def _answer(self, link: Link) -> Steps:
        channel = Channel(link, self._answering, server_side=True)
        yield from channel.handshake()
        key = certificate_key_id(channel.certificate())
        try:
            hello = check_hello((yield from _hear(channel)), key, self.name, self._membership)
        except Refusal as refusal:
            yield from _say(channel, encode_no(str(refusal)))
            raise Refusal(f"key {key}: {refusal}") from None
        yield from _say(channel, encode_hello(self.name, hello.name, hello.kind, self._membership))
        link.deadline = None
        self._unknown -= 1
        link.failed = lambda error: self._hung_up(hello.name, hello.kind, link, error)
        if hello.kind == "bulk":
            yield self._bulk_in
        self._hang_up(hello.name, hello.kind)  # the new one replaces the old one
        self._incoming[hello.name, hello.kind] = link
        self._tell(lambda: self._up.add(hello.name))
        yield from self._read_frames(channel, hello.name, hello.kind)

    def _read_frames(self, channel: Channel, peer: Peer, kind: Kind) -> Steps:
        prefix = memoryview(bytearray(PREFIX_BYTES))
        while True:
            while self._inbox.full(kind == "bulk"):
                yield Want.WOKEN
            yield from channel.read(prefix)
            data = memoryview(bytearray(head_bytes(prefix)))
            yield from channel.read(data)
            head = decode_head(data, self._limits)
            if head.blobs and kind == "control":
                raise Malformed(f"{type(head.message).__name__} with blobs among control messages")
            memory = buffers(head)
            for part in memory:
                yield from channel.read(part)
            nbytes = data.nbytes + sum(part.nbytes for part in memory)
            self._inbox.put(Incoming(peer, head.message, blobs_of(head, memory)), nbytes)

    def _hung_up(self, peer: Peer, kind: Kind, link: Link, error: Exception) -> None:
        if self._incoming.get((peer, kind)) is link:
            del self._incoming[peer, kind]
        if isinstance(error, Malformed):
            log.warning("%s is dropped: it sent %s", peer, error)
            for each in _KINDS:
                self._reader(each).post(lambda each=each: self._hang_up(peer, each))  # type: ignore[misc]
        self._tell(lambda: self._lose(peer, error, always=isinstance(error, Malformed)))

    def _hang_up(self, peer: Peer, kind: Kind) -> None:
        old = self._incoming.pop((peer, kind), None)
        if old is not None:
            self._reader(kind).drop(old)

    def _resume(self) -> None:
        """There is room again in the inbox."""
        for kind in _KINDS:
            self._reader(kind).post(lambda kind=kind: self._wake_readers(kind))  # type: ignore[misc]

    def _wake_readers(self, kind: Kind) -> None:
        for (_, other), link in list(self._incoming.items()):
            if other == kind:
                self._reader(kind).wake(link)

    # ------------------------------------------------------------------------------------------------------- private

    def _engines(self) -> tuple[Engine, Engine, Engine]:
        return self._control, self._bulk_out, self._bulk_in

    def _sender(self, kind: Kind) -> Engine:
        return self._control if kind == "control" else self._bulk_out

    def _reader(self, kind: Kind) -> Engine:
        return self._control if kind == "control" else self._bulk_in

    def _lose(self, peer: Peer, error: Exception, always: bool) -> None:
        """In the node's thread. When a peer dies all its connections break: only the first is news."""
        if not self._closed and (always or peer in self._up):
            self._up.discard(peer)
            self._inbox.put(Lost(peer, str(error) or type(error).__name__))

    def _tell(self, call: Callable[[], object]) -> None:
        """Run in the node's thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            pass


async def _resolved(host: str, port: int) -> tuple[int, Address]:
    try:
        return (socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET), (host, port)
    except ValueError:  # a name
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(f"network.host = '{host}' is no address of this machine: {error}") from None
    return found[0][0], (str(found[0][4][0]), port)


def _connect(sock: socket.socket, address: Address) -> Steps:
    code = sock.connect_ex(address)
    while code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
        yield Want.WRITE
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code and not _connected(sock):
            code = errno.EINPROGRESS
    if code:
        raise OSError(code, os.strerror(code))


def _connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _say(channel: Channel, words: bytes) -> Steps:
    yield from channel.write(memoryview(_words.pack(len(words)) + words))


def _hear(channel: Channel) -> Generator[Want | Engine, None, bytearray]:
    prefix = memoryview(bytearray(_words.size))
    yield from channel.read(prefix)
    (length,) = _words.unpack(prefix)
    if length > MAX_HELLO_BYTES:
        raise Refusal(f"a hello of {length} bytes")
    words = bytearray(length)
    yield from channel.read(memoryview(words))
    return words


def _tuned(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wishes = (  # a dead line is noticed within about ten seconds where the system lets us say so
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", DEAD_LINE_MS),
        ("TCP_CONGESTION", b"bbr"),  # holds its rate on long lines with losses, where cubic falls to a tenth
    )
    for name, value in wishes:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        except (AttributeError, OSError):  # this system does not know it, or does not allow it
            continue
    return sock


def _outward(host: str) -> str:
    """This machine's address on the way out, for a peer that listens on all of them."""
    family, far = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))  # sends nothing: only asks for the route
            return str(probe.getsockname()[0])
        except OSError:  # no way out of this machine
            return "::1" if ":" in host else "127.0.0.1"
