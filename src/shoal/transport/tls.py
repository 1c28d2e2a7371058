"""TLS 1.3 over TCP between peers that reach one another directly: the network of real runs.

A carrier (streams/carrier.py): it dials and accepts TCP connections; a peer proves its key by its certificate.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket

from shoal.core.messages import Peer
from shoal.transport import addresses
from shoal.transport.base import Limits
from shoal.transport.budget import Warnings
from shoal.transport.identity.identity import Identity, certificate_key_id, client_context, key_id_of, server_context
from shoal.transport.identity.invite import Membership
from shoal.transport.streams.carrier import Opening
from shoal.transport.streams.engine import Channel, Connection, Steps, WaitFor
from shoal.transport.streams.streams import StreamTransport

log = logging.getLogger(__name__)

DEAD_LINE_MS = 10_000  # sent bytes not acknowledged for this long: the line is dead
ADDRESSES = 4096  # remembered; the one updated longest ago is forgotten, as peers that live are announced again
UNSENT_BYTES = 128 << 10  # the system takes no more than it can send soon: what waits there cannot be overtaken

Address = tuple[str, int]
Place = tuple[str, int, *tuple[str, ...]]  # a host, a port, and further hosts of the same machine


class TlsTransport(StreamTransport[Address]):
    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits = Limits(),
    ) -> None:
        self._tls = Tls(identity, host, port)
        super().__init__(identity.name, membership, self._tls, limits)

    @property
    def address(self) -> Address:
        return self._tls.address

    def learn(self, peer: Peer, address: Place) -> None:
        """Where that peer is reached, as IP addresses. Names are not looked up; they count as not known."""
        if peer != self.name:
            self._tls.learn(peer, address)


class Tls:
    """The carrier, with the addresses of peers."""

    def __init__(self, identity: Identity, host: str, port: int) -> None:
        self._asked: Address = (host, port)
        self._dialling = client_context(identity)
        self._answering = server_context(identity)
        self._places: dict[Peer, Place] = {}  # the host to try next first
        self._tries: dict[Peer, int] = {}  # hosts of a peer that have failed since one was reached
        self._bound: Address | None = None
        self._warnings = Warnings(log)

    async def start(self) -> tuple[socket.socket, ...]:
        host, port = self._asked
        family, where = await resolved(host, port)
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
        return (listener,)

    def route(self, peer: Peer) -> Address | None:
        place = self._places.get(peer)
        return place[:2] if place is not None else None

    def socket(self, route: Address) -> socket.socket:
        family = socket.AF_INET6 if ":" in route[0] else socket.AF_INET
        return _tuned(socket.socket(family, socket.SOCK_STREAM))

    def dial(self, connection: Connection, route: Address) -> Opening:
        yield from connect(connection.sock, route)
        return (yield from self.greet(connection))

    def greet(self, connection: Connection) -> Opening:
        """TLS on a connection that this side has made."""
        channel = Channel(connection, self._dialling, server_side=False)
        yield from channel.handshake()
        return channel, certificate_key_id(channel.certificate())

    def answer(self, connection: Connection) -> Opening:
        _tuned(connection.sock)
        channel = Channel(connection, self._answering, server_side=True)
        yield from channel.handshake()
        return channel, certificate_key_id(channel.certificate())

    def reached(self, peer: Peer, route: Address) -> None:
        self._tries.pop(peer, None)

    def failed(self, peer: Peer, route: Address, reason: str) -> bool:
        """The other hosts of that peer's machine are tried in turn, each once."""
        place = self._places.get(peer)
        if place is None:
            return False
        if place[:2] != route:  # the peer's other stream has failed there, too, and turned to the next
            return True
        tries = self._tries[peer] = self._tries.get(peer, 0) + 1
        host, port, *others = place
        if tries > len(others):
            self._tries.pop(peer, None)
            return False
        rest: tuple[str, ...] = (*others[1:], host)
        self._places[peer] = (others[0], port, *rest)
        return True

    def forget(self, peer: Peer) -> None:
        self._places.pop(peer, None)
        self._tries.pop(peer, None)

    async def close(self) -> None:
        """The listening socket and the connections belong to the engines."""

    @property
    def address(self) -> Address:
        """Where others reach this peer: what the directory should announce."""
        assert self._bound is not None, "not started"
        host, port = self._bound
        return addresses.announced(host)[0], port

    def learn(self, peer: Peer, address: Place) -> None:
        host, port, *others = address
        try:
            for each in (host, *others):
                ipaddress.ip_address(each)
            key_id_of(peer)
        except ValueError as error:
            self._warnings.warn("useless addresses", f"the address of {peer} is of no use: {error}")
            return
        if 0 < port < 2**16:
            known = self._places.pop(peer, None)
            same = known is not None and sorted(map(str, known)) == sorted(map(str, address))
            self._places[peer] = known if known is not None and same else address
            if len(self._places) > ADDRESSES:
                self._places.pop(next(iter(self._places)), None)


async def resolved(host: str, port: int) -> tuple[int, Address]:
    """The address family, and a name as a number."""
    try:
        return (socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET), (host, port)
    except ValueError:  # a name
        pass
    try:
        answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(f"network.host = '{host}' is no address of this machine: {error}") from None
    return answers[0][0], (str(answers[0][4][0]), port)


def connect(sock: socket.socket, address: Address) -> Steps:
    code = sock.connect_ex(address)
    while code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
        yield WaitFor.WRITE
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


def _tuned(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wishes = (  # a dead line is noticed within about ten seconds where the system lets us say so
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", DEAD_LINE_MS),
        ("TCP_NOTSENT_LOWAT", UNSENT_BYTES),
        ("TCP_CONGESTION", b"bbr"),  # holds its rate on long lines with losses, where cubic falls to a tenth
    )
    for name, value in wishes:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        except (AttributeError, OSError):  # this system does not know it, or does not allow it
            continue
    return sock
