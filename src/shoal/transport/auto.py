"""TLS to peers that it reaches, libp2p streams to the others: one run of peers with and without open ports.

A carrier that combines the other two. The sender decides for its direction of each pair and tries TLS first: a peer behind a router
sends over TLS to one with an open port, and is answered over libp2p. A failed try costs DIRECT_S once, is reported, and the choice
holds while the stream is open. TLS is tried again when the peer's address changes, when libp2p does not reach it either, or with the
first new stream after AGAIN_S. That libp2p can reach a peer without an open
port, through a connection that this one has made, a relay or a punched hole, needs every peer to call every other's daemon.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

import msgspec

from shoal.core.messages import Peer
from shoal.transport import tls
from shoal.transport.base import Limits
from shoal.transport.daemon import Daemon, written
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Membership
from shoal.transport.libp2p import MAX_ROUTES, Libp2p, Route
from shoal.transport.relay import RelayRoute, Relays
from shoal.transport.streams.carrier import Opening
from shoal.transport.streams.engine import Connection
from shoal.transport.streams.streams import StreamTransport
from shoal.transport.tls import Tls

log = logging.getLogger(__name__)

DIRECT_S = 2.0  # for a TCP connection: answered by the other's kernel, and asked for twice within this time
AGAIN_S = 60.0


class Address(msgspec.Struct, frozen=True):
    direct: tls.Place
    streams: tuple[str, ...]  # libp2p multiaddrs


class DirectFailure(msgspec.Struct, frozen=True):
    """A peer could not be reached directly there."""

    address: tls.Hop
    reason: str
    until: float  # time.monotonic()


class AutoTransport(StreamTransport[tls.Hop | Route]):
    """`daemon`, made from this peer's identity, is started and closed with it and may be shared with a directory. `report` is
    called, from any thread, with messages for the user."""

    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        daemon: Daemon,
        place: tls.Address = ("127.0.0.1", 0),
        limits: Limits = Limits(),
        report: Callable[[str], None] = log.warning,
        relays: Relays | None = None,
    ) -> None:
        self._both = EitherCarrier(Tls(identity, *place, membership, relays), Libp2p(daemon), report)
        super().__init__(identity.name, membership, self._both, limits)
        daemon.revived.append(lambda: self._both.libp2p.again(self.listen, self._engines.control))

    async def start(self) -> None:
        await super().start()
        self._both.tls.start_relays(self)

    @property
    def address(self) -> Address:
        """Without a port that libp2p listens on there is still the peer's id: who has been called by it needs no more."""
        daemon = self._both.libp2p.daemon
        return Address(self._both.tls.address, daemon.addresses[:MAX_ROUTES] or (f"/p2p/{written(daemon.peer_id)}",))

    def learn(self, peer: Peer, address: Address) -> None:
        if peer == self.name:
            return
        self._both.tls.learn(peer, address.direct)
        route = self._both.libp2p.learn(peer, address.streams)
        if route is not None:
            self._engines.control.post(lambda: self._engines.control.adopt(self._both.libp2p.connect_daemons(route)))
        self.learned(peer)


class EitherCarrier:
    """The carrier. The node's thread and two engines read and write its table, each entry by one operation."""

    def __init__(self, direct: Tls, libp2p: Libp2p, report: Callable[[str], None]) -> None:
        self.tls, self.libp2p, self._report = direct, libp2p, report
        self._failed: dict[Peer, DirectFailure] = {}
        self._reported: dict[Peer, tls.Hop] = {}

    async def start(self) -> tuple[socket.socket, ...]:
        listening = await self.tls.start()
        try:
            return (*listening, *await self.libp2p.start())
        except BaseException:
            for each in listening:
                each.close()
            raise

    def route(self, peer: Peer) -> tls.Hop | Route | None:
        direct, route, failed = self.tls.route(peer), self.libp2p.route(peer), self._failed.get(peer)
        shut = failed is not None and failed.address == direct and time.monotonic() < failed.until
        return route if route is not None and (direct is None or shut) else direct

    def socket(self, route: tls.Hop | Route) -> socket.socket:
        return self.libp2p.socket(route) if isinstance(route, Route) else self.tls.socket(route)

    def dial(self, connection: Connection, route: tls.Hop | Route, peer: Peer) -> Opening:
        if isinstance(route, Route):
            return (yield from self.libp2p.dial(connection, route, peer))
        return (yield from self.tls.dial(connection, route, peer, DIRECT_S))

    def answer(self, connection: Connection) -> Opening:
        return (yield from (self.libp2p if connection.sock.family == socket.AF_UNIX else self.tls).answer(connection))

    def called(self, peer: Peer, host: str) -> None:
        self.tls.called(peer, host)

    def reached(self, peer: Peer, route: tls.Hop | Route) -> None:
        failed = self._failed.get(peer)
        if not isinstance(route, Route):
            self.tls.reached(peer, route)
            self._failed.pop(peer, None)
            if self._reported.pop(peer, None) is not None:
                self._report(f"{peer} is reached directly again: TLS to it from now on")
        elif failed is not None and self._reported.get(peer) != failed.address:
            self._reported[peer] = failed.address
            place = failed.address if isinstance(failed.address, RelayRoute) else "{}:{}".format(*failed.address)
            self._report(f"{peer} cannot be reached at {place} ({failed.reason}): libp2p to it instead of TLS")

    def failed(self, peer: Peer, route: tls.Hop | Route, reason: str) -> bool:
        if isinstance(route, Route):
            self._failed.pop(peer, None)
            return False
        if self.tls.failed(peer, route, reason):
            return True
        if self.libp2p.route(peer) is None:
            return False
        self._failed[peer] = DirectFailure(route, reason, time.monotonic() + AGAIN_S)
        return True

    def stalled(self, peer: Peer) -> None:
        self.tls.stalled(peer)

    def forget(self, peer: Peer) -> None:
        self.tls.forget(peer)
        self.libp2p.forget(peer)
        self._failed.pop(peer, None)
        self._reported.pop(peer, None)

    async def close(self) -> None:
        await self.tls.close()
        await self.libp2p.close()
