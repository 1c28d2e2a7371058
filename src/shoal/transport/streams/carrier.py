"""The network beneath the streams: what streams.py asks of TLS over TCP and of libp2p.

A Carrier listens, dials, and says whose key the other end of a connection holds. tls.py, libp2p.py and auto.py implement it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

from shoal.core.messages import Peer
from shoal.transport.streams.engine import Connection, Engine, Steps, WaitFor
from shoal.transport.streams.uplink import BBR, UNSENT_BYTES, Uplink

CONGESTION = BBR  # where the system has it: holds its rate on long lines with losses, where cubic falls to a tenth
LANES = 4  # connections of a stream of bulk without it: each recovers from its own losses
DEAD_LINE_MS = 10_000  # sent bytes not acknowledged for this long: the line is dead


class ByteStream(Protocol):
    """Bytes in both directions, in steps (engine.py)."""

    def read(self, view: memoryview) -> Steps:
        """Fill `view`. ConnectionError when the other side has closed."""

    def write(self, view: memoryview) -> Steps: ...

    def check_open(self) -> None:
        """Between writes: ConnectionError when the other side has closed; it sends nothing else than shares of its line."""

    def telling(self, arrived: Callable[[int], None]) -> Callable[[bytes], None] | None:
        """For a receiver of bulk: what tells the sender its share (wire.share_told). None: the sender cannot be told. `arrived` is called
        with each number of bytes that comes."""

    def paced(self, uplink: Uplink | None) -> ByteStream:
        """For bulk, after the handshake: the same stream, which leaves room for control on a line that both share. `uplink`: what a
        sender shares with its other connections."""


Authenticated = tuple[ByteStream, str]  # a stream, and the key id that its other end has proven
Opening = Generator["WaitFor | Engine", None, Authenticated]
Route = TypeVar("Route")


class Detached(ConnectionError):
    """The carrier keeps an accepted connection for a purpose of its own."""


class Carrier(Protocol[Route]):
    """The network beneath. The type of a route to a peer is the carrier's own: what it derived from `learn`'s address."""

    async def start(self) -> tuple[socket.socket, ...]:
        """Listening sockets. ValueError when the carrier cannot listen."""

    def route(self, peer: Peer) -> Route | None:
        """The route to try next."""

    def socket(self, route: Route) -> socket.socket:
        """A socket for `dial`, which connects it."""

    def dial(self, connection: Connection, route: Route, peer: Peer) -> Opening: ...

    def answer(self, connection: Connection) -> Opening:
        """Authenticate a connection that was just accepted."""

    def called(self, peer: Peer, host: str) -> None:
        """A peer that has proven itself calls from that host; '' where the network does not say. In the listener's thread."""

    def reached(self, peer: Peer, route: Route) -> None:
        """The route works. Called in an engine's thread, like `failed`."""

    def failed(self, peer: Peer, route: Route, reason: str) -> bool:
        """The route does not work. True: `route` now returns another one, to be tried at once."""

    def stalled(self, peer: Peer) -> None:
        """A connection to that peer stood, and what was sent on it did not arrive. In an engine's thread."""

    def forget(self, peer: Peer) -> None: ...

    async def close(self) -> None: ...


def tuned(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wishes = (  # a dead line is noticed within about ten seconds where the system lets us say so
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", DEAD_LINE_MS),
        ("TCP_NOTSENT_LOWAT", UNSENT_BYTES),
        ("TCP_CONGESTION", CONGESTION),
    )
    for name, value in wishes:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        except (AttributeError, OSError):  # this system does not know it, or does not allow it
            continue
    return sock


def lanes_of(sock: socket.socket) -> int:
    """Connections for bulk to the other end of this one."""
    try:
        used = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    except (AttributeError, OSError):  # not TCP, or a system that does not say
        return 1
    return 1 if used == BBR else LANES
