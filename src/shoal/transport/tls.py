"""TLS 1.3 over TCP between peers that reach one another directly: the network of real runs.

A carrier (streams/carrier.py): it dials and accepts TCP connections; a peer proves its key by its certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import time
from typing import Any

from shoal.core.messages import Peer
from shoal.transport import addresses, relay
from shoal.transport.base import Limits
from shoal.transport.budget import Warnings
from shoal.transport.directory.records import RELAY
from shoal.transport.identity.identity import Identity, certificate_key_id, client_context, key_id_of, server_context
from shoal.transport.identity.invite import Membership
from shoal.transport.relay import RelayRoute, Relays
from shoal.transport.streams import handshake
from shoal.transport.streams.carrier import Detached, Opening, tuned
from shoal.transport.streams.channel import Channel, PlainStream
from shoal.transport.streams.engine import Connection, Steps, WaitFor
from shoal.transport.streams.streams import StreamTransport

log = logging.getLogger(__name__)

ADDRESSES = 4096  # remembered; the one updated longest ago is forgotten, as peers that live are announced again

DIRECT_S = 1.0  # for a TCP connection to a peer that waits at relays: it has no open port, as a rule
NARROW_BYTES = 1180  # of a segment: every tunnel carries 1,280 bytes with its headers, as IPv6 demands it
DETACHED = "it is a relayed connection"

Address = tuple[str, int]
Hop = Address | RelayRoute
Place = tuple[str, int, *tuple[str, ...]]  # a host, a port, further hosts of the same machine, and relays (records.py)


class TlsTransport(StreamTransport[Hop]):
    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits = Limits(),
        relays: Relays | None = None,
    ) -> None:
        self._tls = Tls(identity, host, port, membership, relays)
        super().__init__(identity.name, membership, self._tls, limits)

    async def start(self) -> None:
        await super().start()
        self._tls.start_relays(self)

    @property
    def address(self) -> Address:
        return self._tls.address

    def learn(self, peer: Peer, address: Place) -> None:
        """Where that peer is reached, as IP addresses. Names are not looked up; they count as not known."""
        if peer != self.name:
            self._tls.learn(peer, address)
            self.learned(peer)


class Tls:
    """The carrier, with the addresses of peers."""

    def __init__(
        self, identity: Identity, host: str, port: int, membership: Membership, relays: Relays | None = None
    ) -> None:
        self._asked: Address = (host, port)
        self._identity, self._membership, self._relays = identity, membership, relays
        self._dialling = client_context(identity)
        self._answering = server_context(identity)
        self._routes: dict[Peer, list[Hop]] = {}  # the one to try next first
        self._tries: dict[Peer, int] = {}  # routes to a peer that have failed since one worked
        self._narrow: set[Peer] = set()  # peers to which large packets may vanish
        self._bound: Address | None = None
        self._warnings = Warnings(log)

    def start_relays(self, transport: StreamTransport[Any]) -> None:
        if self._relays is not None and self._bound is not None:
            bound = self._bound[0]
            self._relays.moved.append(transport.moved)
            self._relays.start(transport.take, lambda: addresses.announced(bound))

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

    def route(self, peer: Peer) -> Hop | None:
        routes = self._routes.get(peer)
        return routes[0] if routes else None

    def socket(self, route: Hop) -> socket.socket:
        family = socket.AF_INET6 if ":" in _place(route)[0] else socket.AF_INET
        return tuned(socket.socket(family, socket.SOCK_STREAM))

    def dial(self, connection: Connection, route: Hop, peer: Peer, direct_s: float = handshake.CONNECT_S) -> Opening:
        """`direct_s`: for the TCP connection alone."""
        if peer in self._narrow:
            with contextlib.suppress(AttributeError, OSError):  # this system does not know it
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, NARROW_BYTES)
        if not isinstance(route, RelayRoute):
            relayed = any(isinstance(each, RelayRoute) for each in self._routes.get(peer, ()))
            connection.deadline = time.monotonic() + (min(direct_s, DIRECT_S) if relayed else direct_s)
        yield from connect(connection.sock, _place(route))
        connection.deadline = time.monotonic() + handshake.CONNECT_S
        if isinstance(route, RelayRoute):
            yield from self._call(PlainStream(connection), route.key, peer)
        return (yield from self.greet(connection))

    def _call(self, stream: PlainStream, key: str, peer: Peer) -> Steps:
        """Have the relay with that key join this connection with one of that peer's."""
        yield from stream.write(memoryview(relay.CALL))
        nonce = bytearray(relay.NONCE_BYTES)
        yield from stream.read(memoryview(nonce))
        yield from stream.write(memoryview(relay.request(self._identity, self._membership, key, bytes(nonce), peer)))
        joined = bytearray(len(relay.JOINED))
        yield from stream.read(memoryview(joined))
        if joined != relay.JOINED:
            raise ConnectionError("it is no relay")

    def greet(self, connection: Connection) -> Opening:
        """TLS on a connection that this side has made."""
        channel = Channel(connection, self._dialling, server_side=False)
        yield from channel.handshake()
        return channel, certificate_key_id(channel.certificate())

    def answer(self, connection: Connection) -> Opening:
        tuned(connection.sock)
        if self._relays is not None and not connection.relayed:
            while (first := _first_byte(connection.sock)) is None:
                yield WaitFor.READ
            if first == relay.CALL:
                self._relays.serve(connection.sock.dup())
                raise Detached(DETACHED)
        channel = Channel(connection, self._answering, server_side=True)
        yield from channel.handshake()
        if self._relays is not None and not connection.relayed:
            self._relays.answered(connection)
        return channel, certificate_key_id(channel.certificate())

    def called(self, peer: Peer, host: str) -> None:
        """A peer whose machine has another address by now is reached there, before the directory says so. Not at a router's."""
        routes = self._routes.get(peer)
        if not host or not routes or any(isinstance(each, RelayRoute) or each[0] == host for each in routes):
            return
        known, private = _place(routes[0]), ipaddress.ip_address(host).is_private
        if ipaddress.ip_address(known[0]).is_private == private:
            self._routes[peer] = [(host, known[1]), *routes]
            self._tries.pop(peer, None)

    def reached(self, peer: Peer, route: Hop) -> None:
        self._tries.pop(peer, None)
        if self._relays is not None and not isinstance(route, RelayRoute):
            if not any(isinstance(each, RelayRoute) for each in self._routes.get(peer, ())):
                self._relays.reached(peer, *route)

    def failed(self, peer: Peer, route: Hop, reason: str) -> bool:
        """The other routes to that peer are tried in turn, each once."""
        routes = self._routes.get(peer)
        self.stalled(peer)  # perhaps: a handshake's packets are large, too
        if self._relays is not None and not isinstance(route, RelayRoute):
            self._relays.lost(peer, *route)
        if not routes:
            return False
        if routes[0] != route:  # the peer's other stream has failed there, too, and turned to the next
            return True
        tries = self._tries[peer] = self._tries.get(peer, 0) + 1
        if tries >= len(routes):
            self._tries.pop(peer, None)
            return False
        self._routes[peer] = [*routes[1:], route]
        return True

    def stalled(self, peer: Peer) -> None:
        """A tunnel on the way may drop packets of full size without a word: the next connections have smaller ones."""
        if len(self._narrow) < ADDRESSES:
            self._narrow.add(peer)

    def forget(self, peer: Peer) -> None:
        self._narrow.discard(peer)
        self._routes.pop(peer, None)
        self._tries.pop(peer, None)

    async def close(self) -> None:
        """The listening socket and the connections belong to the engines."""
        if self._relays is not None:
            self._relays.close()

    @property
    def address(self) -> Address:
        """Where others reach this peer: what the directory should announce."""
        assert self._bound is not None, "not started"
        host, port = self._bound
        return addresses.announced(host)[0], port

    def learn(self, peer: Peer, address: Place) -> None:
        host, port, *others = address
        relays = [each for each in others if each.startswith(RELAY)]
        hosts = [host, *(each for each in others if each not in relays)]
        try:
            for each in hosts:
                ipaddress.ip_address(each)
            key_id_of(peer)
        except ValueError as error:
            self._warnings.warn("useless addresses", f"the address of {peer} is of no use: {error}")
            return
        if 0 < port < 2**16:
            routes: list[Hop] = [(each, port) for each in hosts]
            routes += filter(None, map(relay.route, relays))
            known = self._routes.pop(peer, None)
            same = known is not None and sorted(map(str, known)) == sorted(map(str, routes))
            self._routes[peer] = known if known is not None and same else routes
            if len(self._routes) > ADDRESSES:
                self._routes.pop(next(iter(self._routes)), None)


def _place(route: Hop) -> Address:
    return (route.host, route.port) if isinstance(route, RelayRoute) else route


def _first_byte(sock: socket.socket) -> bytes | None:
    """None: nothing has arrived yet."""
    try:
        return sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return None


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
