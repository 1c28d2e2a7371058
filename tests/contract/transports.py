"""The networks that the contract test runs over. To add one: a class with these members, and a line in NETS."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shoal.core.messages import PROTOCOL
from shoal.transport.auto import AutoTransport
from shoal.transport.base import Limits, Lost, Unknown
from shoal.transport.daemon import Daemon, multiaddr, parsed_address
from shoal.transport.emulated.faulty import Faulty
from shoal.transport.emulated.memory import Hub, MemoryTransport
from shoal.transport.emulated.shaped import AccessLink, Reachable, Shaped
from shoal.transport.hivemind_parts import hivemind
from shoal.transport.identity.identity import Identity, client_context
from shoal.transport.identity.invite import Authority, Membership, read_invite
from shoal.transport.libp2p import PROTOCOL_NAME, Libp2pTransport
from shoal.transport.streams.carrier import LANES, lanes_of
from shoal.transport.streams.handshake import Hello, Rejection
from shoal.transport.tls import TlsTransport
from shoal.transport.wire import fragment_head

ATTEMPTS = 5
LOOK_S = 0.5  # between two looks whether a sender was told that its peer is lost
LINK = AccessLink(delay_s=0.005, up_Bps=200e6, down_Bps=200e6)


class Net(Protocol):
    """One run's network. `secure`: peers prove who they are and that they belong (`knock` is there)."""

    secure: bool

    def make(self, identity: Identity, limits: Limits = Limits(), port: int = 0) -> Reachable:
        """A transport, not yet started."""

    async def inject(self, identity: Identity, victim: Any, raw: bytes, kind: str) -> None:
        """Bytes that no honest peer sends, from an admitted peer; returns when the victim has hung up."""

    async def knock(self, victim: Any, identity: Identity, **changes: Any) -> str:
        """Open a connection as that peer with a changed hello (name, proof, run, protocol); the reason for refusing, or ''."""

    def membership(self, identity: Identity, expires: float | None = None) -> Membership: ...

    def port(self, transport: Any) -> int:
        """Where it listens; `make` takes it again."""


class MemoryNet:
    secure = False

    def __init__(self) -> None:
        self.hub = Hub()

    def make(self, identity: Identity, limits: Limits = Limits(), port: int = 0) -> Reachable:
        return MemoryTransport(self.hub, identity.name, limits)

    def port(self, transport: Any) -> int:
        return 0

    async def inject(self, identity: Identity, victim: Any, raw: bytes, kind: str) -> None:
        self.hub.carry(identity.name, victim.name, raw)


class RealNet:
    """With a run, hence with passes."""

    secure = True

    def __init__(self) -> None:
        self.authority = Authority.new()
        self.invite = read_invite(self.authority.invite((), time.time() + 3600, "contract"), now=0.0)

    def membership(self, identity: Identity, expires: float | None = None) -> Membership:
        """All by one invite; a pass that ends at another time is of an invite of its own."""
        if expires is None:
            return self.invite.membership(identity)
        return read_invite(self.authority.invite((), expires, "contract"), now=0.0).membership(identity)

    def _on_stream(self, raw: bytes, kind: str) -> bytes:
        return bytes(fragment_head(0, 0, len(raw))) + raw if kind == "bulk" else raw

    def _hello(self, identity: Identity, victim: Any, kind: Any) -> Hello:
        membership = self.membership(identity)
        return Hello(PROTOCOL, self.authority.run, identity.name, victim.name, kind, membership.proof)


class TlsNet(RealNet):
    def make(self, identity: Identity, limits: Limits = Limits(), port: int = 0) -> Reachable:
        return TlsTransport(identity, self.membership(identity), port=port, limits=limits)

    def port(self, transport: Any) -> int:
        return transport.address[1]

    async def inject(self, identity: Identity, victim: Any, raw: bytes, kind: str) -> None:
        hello, raw = self._hello(identity, victim, kind), self._on_stream(raw, kind)
        await asyncio.to_thread(self._inject, identity, victim.address, raw, hello)

    async def knock(self, victim: Any, identity: Identity, **changes: Any) -> str:
        hello = msgspec.structs.replace(self._hello(identity, victim, "control"), **changes)
        return await asyncio.to_thread(self._knock, identity, victim.address, hello)

    def _inject(self, identity: Identity, address: tuple[str, int], raw: bytes, hello: Hello) -> None:
        with _dial(identity, address) as sock:
            assert isinstance(_exchange(sock, hello), Hello)
            try:
                sock.sendall(raw)
                while sock.recv(1):
                    pass
            except ConnectionError:
                pass

    def _knock(self, identity: Identity, address: tuple[str, int], hello: Hello) -> str:
        with _dial(identity, address) as sock:
            answer = _exchange(sock, hello)
            return answer.reason if isinstance(answer, Rejection) else ""


class CubicNet(TlsNet):
    """On a system without BBR, where bulk has several connections."""

    def make(self, identity: Identity, limits: Limits = Limits(), port: int = 0) -> Reachable:
        transport = super().make(identity, limits, port)
        carrier: Any = transport._carrier  # type: ignore[attr-defined]
        carrier.socket = partial(_cubic, carrier.socket)
        return transport


def _cubic(plain: Callable[[Any], socket.socket], route: Any) -> socket.socket:
    sock = plain(route)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    assert lanes_of(sock) == LANES
    return sock


class Libp2pNet(RealNet):
    def make(self, identity: Identity, limits: Limits = Limits(), port: int = 0) -> Reachable:
        membership = self.membership(identity)
        return Libp2pTransport(identity.name, membership, Daemon(identity, port=port), limits)

    def port(self, transport: Any) -> int:
        return int(transport.address[0].split("/")[4])

    async def inject(self, identity: Identity, victim: Any, raw: bytes, kind: str) -> None:
        async with self._opened(identity, victim, self._hello(identity, victim, kind)) as (answer, reader, writer):
            assert isinstance(answer, Hello)
            writer.write(self._on_stream(raw, kind))
            with suppress(ConnectionError):
                await reader.read()

    async def knock(self, victim: Any, identity: Identity, **changes: Any) -> str:
        hello = msgspec.structs.replace(self._hello(identity, victim, "control"), **changes)
        async with self._opened(identity, victim, hello) as (answer, _, _):
            return answer.reason if isinstance(answer, Rejection) else ""

    @asynccontextmanager
    async def _opened(self, identity: Identity, victim: Any, hello: Hello) -> Any:
        """A stream through a daemon of its own, as hivemind itself opens it."""
        daemon = Daemon(identity)
        await daemon.start()
        try:
            try:
                await daemon.connect(victim.address[0], 60)
            except OSError as error:
                raise Vanished(f"a stranger's daemon does not reach {victim.name}: {error}") from None
            p2p = await hivemind("p2p").P2P.replicate(multiaddr(f"/unix{daemon.control}"))
            peer_id = hivemind("p2p").PeerID(parsed_address(victim.address[0])[0])
            _, reader, writer = await p2p.call_binary_stream_handler(peer_id, PROTOCOL_NAME)
            words = msgspec.msgpack.encode(hello)
            writer.write(struct.pack(">H", len(words)) + words)
            (length,) = struct.unpack(">H", await reader.readexactly(2))
            yield msgspec.msgpack.decode(await reader.readexactly(length), type=Hello | Rejection), reader, writer
            writer.close()
            await p2p.shutdown()
        finally:
            await daemon.close()


class AutoNet(TlsNet):
    """Both at once; rogues and strangers come over TLS."""

    def make(self, identity: Identity, limits: Limits = Limits(), port: int = 0) -> Reachable:
        return AutoTransport(
            identity, self.membership(identity), Daemon(identity), place=("127.0.0.1", port), limits=limits
        )

    def port(self, transport: Any) -> int:
        return int(transport.address.direct[1])

    async def inject(self, identity: Identity, victim: Any, raw: bytes, kind: str) -> None:
        hello, raw = self._hello(identity, victim, kind), self._on_stream(raw, kind)
        await asyncio.to_thread(self._inject, identity, victim.address.direct, raw, hello)

    async def knock(self, victim: Any, identity: Identity, **changes: Any) -> str:
        hello = msgspec.structs.replace(self._hello(identity, victim, "control"), **changes)
        return await asyncio.to_thread(self._knock, identity, victim.address.direct, hello)


class ShapedNet:
    """Another network behind a modelled link."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.secure = inner.secure

    def make(self, identity: Identity, limits: Limits = Limits(), port: int = 0) -> Reachable:
        return Shaped(self.inner.make(identity, limits, port), LINK, limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class FaultyNet:
    """Another network whose links nobody has cut or slowed: it must make no difference."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.secure = inner.secure

    def make(self, identity: Identity, limits: Limits = Limits(), port: int = 0) -> Reachable:
        return Faulty(self.inner.make(identity, limits, port), Path("/nonexistent/faults.json"), limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


NETS = {
    "memory": MemoryNet,
    "tls": TlsNet,
    "cubic-tls": CubicNet,
    "shaped-memory": lambda: ShapedNet(MemoryNet()),
    "shaped-tls": lambda: ShapedNet(TlsNet()),
    "faulty-memory": lambda: FaultyNet(MemoryNet()),
    "libp2p": Libp2pNet,
    "auto": AutoNet,
}


@asynccontextmanager
async def started(*transports: Any) -> Any:
    """Start them, tell each where the others are, and close them in the end."""
    try:
        for transport in transports:
            await transport.start()
        introduce(*transports)
        yield transports
    finally:
        for transport in transports:
            await transport.close()


def introduce(*transports: Any) -> None:
    for one in transports:
        for other in transports:
            if one is not other:
                one.learn(other.name, other.address)


class Vanished(AssertionError):
    """What the contract allows over libp2p, and says: a message is gone, and somebody was told Lost. The story is repeated."""


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Until nothing vanishes on the way, as then all of what it says must hold; pytest's own timeout ends it."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return asyncio.run(story())
        except Vanished:
            if attempt == ATTEMPTS:
                raise


async def take(transport: Any, *senders: Any) -> Any:
    """The next message that arrives, however long that takes on a machine that is busy; pytest's own timeout ends it.

    `senders`: where a Lost of this peer may come instead."""
    receiving = asyncio.ensure_future(transport.receive())
    try:
        while not receiving.done():
            await asyncio.wait([receiving], timeout=LOOK_S)
            for sender in () if receiving.done() else senders:
                _refuse_loss(transport, sender, _told(sender, transport.name))
    finally:
        receiving.cancel()
    item = receiving.result()
    _refuse_loss(transport, transport, item if isinstance(item, Lost) else None)
    return item


async def lost(transport: Any, peer: str) -> Lost:
    """The next Lost; nothing else than a request to look that peer up may come before it."""
    item = await transport.receive()
    if item == Unknown(peer):
        item = await transport.receive()
    assert isinstance(item, Lost) and item.peer == peer, item
    return item


def _told(sender: Any, peer: str) -> Lost | None:
    waiting = (item for item, _ in list(sender._receive_queue._lanes[0]))
    return next((item for item in waiting if isinstance(item, Lost) and item.peer == peer), None)


def _refuse_loss(to: Any, sender: Any, loss: Lost | None) -> None:
    if loss is not None:
        kind = Vanished if isinstance(to, Libp2pTransport) else AssertionError
        raise kind(f"{to.name}: nothing arrives, as {sender.name} was told: {loss}")


def _dial(identity: Identity, address: tuple[str, int]) -> ssl.SSLSocket:
    sock = socket.create_connection(address, timeout=60)
    return client_context(identity).wrap_socket(sock)


def _exchange(sock: ssl.SSLSocket, hello: Hello) -> Hello | Rejection:
    words = msgspec.msgpack.encode(hello)
    sock.sendall(struct.pack(">H", len(words)) + words)
    with sock.makefile("rb") as file:
        (length,) = struct.unpack(">H", file.read(2))
        return msgspec.msgpack.decode(file.read(length), type=Hello | Rejection)
