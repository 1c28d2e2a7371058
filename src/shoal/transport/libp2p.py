"""libp2p streams between peers: for peers without a port that others can reach, through relays and punched holes.

A carrier (streams/carrier.py) that uses this peer's libp2p daemon (daemon.py). To open a stream we connect to the daemon, and that
connection becomes the stream. For an incoming stream the daemon connects to us and states first which libp2p peer is at the other
end; libp2p has checked that this peer's id holds its key. hivemind's Python handles no byte of it, so the daemon's speed is the limit.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import msgspec

from shoal.core.messages import Peer
from shoal.transport.base import Limits
from shoal.transport.budget import Warnings
from shoal.transport.congestion.windows import ACK_BYTES, CEILING_BYTES, CongestionWindow
from shoal.transport.daemon import Daemon, check_length, framed, multiaddr, parsed, parsed_address, protobuf, public_key
from shoal.transport.identity.identity import key_id, key_id_of
from shoal.transport.identity.invite import Membership
from shoal.transport.streams import handshake
from shoal.transport.streams.carrier import Opening
from shoal.transport.streams.channel import PlainStream
from shoal.transport.streams.engine import Connection, Engine, Steps, WaitFor
from shoal.transport.streams.streams import StreamTransport
from shoal.transport.streams.uplink import QUANTUM_BYTES, Uplink

log = logging.getLogger(__name__)

PROTOCOL_NAME = "/shoal/stream/2"
MAX_ROUTES = 16
PEERS = 4096  # whose routes are remembered; the ones updated longest ago are forgotten
SOCKET_BYTES = 1 << 20  # of one unix socket's buffer, as far as the system allows
_ACK = memoryview(b"\6")

Address = tuple[str, ...]  # libp2p multiaddrs of one peer, each with its peer id at the end


class Route(msgspec.Struct, frozen=True):
    """Requests to the daemon: connect to the peer, open a stream. Encoded once."""

    connect: bytes
    open: bytes


class Libp2pTransport(StreamTransport[Route]):
    """`daemon`, made from this peer's identity, is started and closed with it and may be shared with a directory."""

    def __init__(self, name: Peer, membership: Membership, daemon: Daemon, limits: Limits = Limits()) -> None:
        self._libp2p = Libp2p(daemon)
        super().__init__(name, membership, self._libp2p, limits)
        daemon.revived.append(lambda: self._libp2p.again(self.listen, self._engines.control))

    @property
    def address(self) -> Address:
        return self._libp2p.daemon.addresses[:MAX_ROUTES]

    def learn(self, peer: Peer, address: Address) -> None:
        """Where that peer is reached, as libp2p multiaddrs. Those of a peer with another key count for nothing.

        We connect at once: a peer without an open port is reached by those that it has called, and by nobody else but
        through relays."""
        route = self._libp2p.learn(peer, address) if peer != self.name else None
        if route is not None:
            self._engines.control.post(lambda: self._engines.control.adopt(self._libp2p.connect_daemons(route)))
        self.learned(peer)


class Libp2p:
    """The carrier, with the routes to peers."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self._routes: dict[Peer, Route] = {}
        self._started = False
        self._warnings = Warnings(log)

    async def start(self) -> tuple[socket.socket, ...]:
        await self.daemon.start()
        self._started = True
        listener = self._listener()
        await self._register()
        return (listener,)

    async def again(self, listen: Callable[[socket.socket], None], control: Engine) -> None:
        """Another daemon runs: register with it, and connect it to the peers of the one before."""
        if not self._started:
            return
        if not self._place.exists():  # it was removed with the old daemon's directory
            listen(self._listener())
        await self._register()
        for route in list(self._routes.values()):
            control.post(partial(self._call_from, control, route))

    @property
    def _place(self) -> Path:
        return self.daemon.directory / "streams"

    def _listener(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._place))
        listener.listen(256)
        listener.setblocking(False)
        return listener

    async def _register(self) -> None:
        pb = protobuf()
        addr = multiaddr(f"/unix{self._place}").to_bytes()
        handler = pb.StreamHandlerRequest(addr=addr, proto=[PROTOCOL_NAME], balanced=False)
        await self.daemon.ask(pb.Request(type=pb.Request.STREAM_HANDLER, streamHandler=handler), handshake.CONNECT_S)

    def route(self, peer: Peer) -> Route | None:
        return self._routes.get(peer)

    def socket(self, route: Route) -> socket.socket:
        return _tuned(socket.socket(socket.AF_UNIX))

    def dial(self, connection: Connection, route: Route, peer: Peer) -> Opening:
        stream = DaemonStream(connection)
        yield from self._connect(stream, route)
        yield from stream.write(memoryview(route.open))
        opened = parsed((yield from _reply(stream)))
        return stream, key_id(public_key(opened.streamInfo.peer))

    def _call_from(self, control: Engine, route: Route) -> None:
        control.adopt(self.connect_daemons(route))

    def connect_daemons(self, route: Route) -> Connection:
        """Connect the daemons; opens no stream."""
        connection = Connection(self.socket(route), lambda error: log.debug("a peer cannot be called: %s", error))
        connection.steps = self._connect(DaemonStream(connection), route)
        connection.deadline = time.monotonic() + handshake.CONNECT_S
        return connection

    def answer(self, connection: Connection) -> Opening:
        _tuned(connection.sock)
        stream = DaemonStream(connection)
        info = protobuf().StreamInfo.FromString(bytes((yield from _reply(stream))))
        return stream, key_id(public_key(info.peer))

    def learn(self, peer: Peer, address: Address) -> Route | None:
        """The route to that peer, when this is news."""
        before = self._routes.get(peer)
        key = key_id_of(peer)
        ids: dict[bytes, list[bytes]] = {}
        for each in address[:MAX_ROUTES]:
            try:
                peer_id, packed_address = parsed_address(each)
                if key_id(public_key(peer_id)) != key:
                    raise ValueError(f"'{each}' leads to another peer")
            except ValueError as error:
                self._warnings.warn("useless addresses", f"an address of {peer} is of no use: {error}")
                continue
            ids.setdefault(peer_id, []).extend([packed_address] if packed_address else [])
        for peer_id, routes in ids.items():  # at most one: the key is the id
            self._routes.pop(peer, None)
            self._routes[peer] = _route(peer_id, routes)
            if len(self._routes) > PEERS:
                self._routes.pop(next(iter(self._routes)), None)
        route = self._routes.get(peer)
        return route if route != before else None

    def called(self, peer: Peer, host: str) -> None:
        return

    def reached(self, peer: Peer, route: Route) -> None:
        return

    def failed(self, peer: Peer, route: Route, reason: str) -> bool:
        return False  # there is no other

    def stalled(self, peer: Peer) -> None:
        return

    def forget(self, peer: Peer) -> None:
        self._routes.pop(peer, None)

    async def close(self) -> None:
        if self._started:
            self._started = False
            await self.daemon.close()

    def _connect(self, stream: DaemonStream, route: Route) -> Steps:
        stream.connect(self.daemon.control)
        yield from stream.write(memoryview(route.connect))
        parsed((yield from _reply(stream)))


class DaemonStream(PlainStream):
    """A connection to this peer's daemon: libp2p encrypts what the daemon exchanges with others."""

    def connect(self, path: str) -> None:
        """To our own daemon: at once, or not at all."""
        code = self._sock.connect_ex(path)
        if code:
            raise OSError(code, f"this peer's libp2p daemon does not answer: {os.strerror(code)}")

    def paced(self, uplink: Uplink | None) -> WindowedStream:
        return WindowedStream(self)


class WindowedStream:
    """One way only: the reader acknowledges, the writer keeps within its window (congestion/windows.py)."""

    def __init__(self, plain: DaemonStream) -> None:
        self._plain = plain
        self._window = CongestionWindow()
        self._unacknowledged = ACK_BYTES  # bytes to be read before the next acknowledgement

    def read(self, view: memoryview) -> Steps:
        while view:
            part, view = view[: self._unacknowledged], view[self._unacknowledged :]
            yield from self._plain.read(part)
            self._unacknowledged -= part.nbytes
            if not self._unacknowledged:
                self._unacknowledged = ACK_BYTES
                yield from self._plain.write(_ACK)

    def write(self, view: memoryview) -> Steps:
        turn = 0
        while view:
            self.check_open()
            part = view[: self._window.room_bytes()]
            if not part:
                yield WaitFor.READ
                continue
            view = view[part.nbytes :]
            self._window.sent(part.nbytes, time.monotonic())  # before it is: what waits for the daemon waits too
            yield from self._plain.write(part)
            turn += part.nbytes
            if turn >= QUANTUM_BYTES:
                turn = 0
                yield WaitFor.AGAIN

    def check_open(self) -> None:
        words = self._plain.received(CEILING_BYTES // ACK_BYTES)
        if words:
            self._window.acknowledged(len(words), time.monotonic())

    def paced(self, uplink: Uplink | None) -> WindowedStream:
        return self

    def telling(self, arrived: Callable[[int], None]) -> None:
        """Its window follows the round trip of all that the daemons hold."""


def _reply(stream: DaemonStream) -> Generator[WaitFor | Engine, None, bytearray]:
    """The daemon's answer, which follows its length."""
    byte = bytearray(1)
    length = shift = 0
    while True:
        yield from stream.read(memoryview(byte))
        length |= (byte[0] & 127) << shift
        shift += 7
        check_length(length)
        if byte[0] < 128:
            break
    reply = bytearray(length)
    yield from stream.read(memoryview(reply))
    return reply


def _route(peer_id: bytes, routes: list[bytes]) -> Route:
    pb = protobuf()
    patience = max(1, int(handshake.CONNECT_S))
    connect = pb.ConnectRequest(peer=peer_id, addrs=routes, timeout=patience)
    opening = pb.StreamOpenRequest(peer=peer_id, proto=[PROTOCOL_NAME], timeout=patience)
    return Route(
        framed(pb.Request(type=pb.Request.CONNECT, connect=connect).SerializeToString()),
        framed(pb.Request(type=pb.Request.STREAM_OPEN, streamOpen=opening).SerializeToString()),
    )


def _tuned(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    return sock
