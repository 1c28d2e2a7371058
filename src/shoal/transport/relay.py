"""Relays: how a peer that nobody reaches directly (behind a router or a firewall) is reached, through a peer that both reach.

A peer without an open port keeps a few waiting connections at relays: peers that it has reached itself. Its record in the directory
names them. Whoever cannot reach it directly connects to a relay and asks for that peer; the relay joins both connections and passes
bytes. TLS runs from end to end, so a relay reads nothing. Every peer of a run with a TLS port is a relay; connections and bytes per
second have bounds.

On the port for TLS a relayed connection begins with CALL, where TLS has its own first byte. The relay answers with a nonce, and the
caller with a signed request (`Request`) and its pass. The signature names the relay that it is for, by its key: no other relay accepts it.
Then the relay says WAIT to a peer that waits, and JOINED to both ends; it closes whatever it refuses. For tls.py, in a background loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import msgspec

from shoal.core.messages import Peer
from shoal.escaping import UNDECODABLE
from shoal.transport.addresses import is_loopback
from shoal.transport.budget import Allowance, Budget
from shoal.transport.directory.background_loop import BackgroundLoop
from shoal.transport.directory.records import RELAY
from shoal.transport.identity.identity import Identity, key_id, key_id_of, verify
from shoal.transport.identity.invite import Membership
from shoal.transport.streams.carrier import tuned
from shoal.transport.streams.engine import Connection

log = logging.getLogger(__name__)

CALL, WAIT, JOINED = b"\x01", b"\x02", b"\x03"
NONCE_BYTES = 16
MAX_REQUEST_BYTES = 2048
OPENING_S = 5.0  # for the nonce, the request and the other end together
RELAYS = 2  # at which a peer waits
WAITING = 3  # connections of one peer at one relay: a caller's two streams, and one more
WAITING_PEERS = 64  # at one relay
OPENINGS = 64  # connections at one relay that nobody has vouched for yet, or that wait for their other end
CIRCUITS = 128  # joined connections at one relay: 64 peers that control one another, and more
CALLER_CIRCUITS = 32  # of these, asked for by one peer: 16 peers that it reaches through this relay
IDLE_S = 300.0  # a joined connection that carries nothing for so long is closed; peers in use greet one another
PIECE_BYTES = 64 << 10
RATE = Allowance(per_s=25e6, at_once=4e6)  # bytes that a relay passes in all: 200 Mbit/s
SILENT_S = 5.0  # a peer that has reached others for so long and was reached by nobody stands behind a firewall
CHECK_S = 0.5  # between two looks at whether relays are needed
REPORT_BYTES = 100e6  # passed between two words to the user

_length = struct.Struct(">H")


class Request(msgspec.Struct, frozen=True, array_like=True):
    """`target`: the peer to be joined with; '': the sender waits for callers. Signed with the id of the relay's key and its nonce."""

    name: Peer
    target: Annotated[str, msgspec.Meta(max_length=128)]
    public: bytes
    proof: bytes
    signature: bytes


_REQUESTS = msgspec.msgpack.Decoder(Request)


class RelayRoute(msgspec.Struct, frozen=True):
    host: str
    port: int
    key: str  # id of the relay's

    def __str__(self) -> str:
        return f"relay {self.host}:{self.port}"

    @property
    def text(self) -> str:
        """As a record names it."""
        return f"{RELAY}{self.host}/{self.port}/{self.key}"


def route(text: str) -> RelayRoute | None:
    """A relay as a record names it; None: it is no usable one."""
    host, port, key = [*text.removeprefix(RELAY).split("/"), "", ""][:3]
    try:
        ipaddress.ip_address(host)
        return RelayRoute(host, int(port), key) if 0 < int(port) < 2**16 and key else None
    except ValueError:
        return None


def request(identity: Identity, membership: Membership, relay: str, nonce: bytes, target: Peer) -> bytes:
    """With its length before it. `relay`: the id of its key."""
    signature = identity.sign("relay", relay.encode() + nonce + target.encode())
    data = msgspec.msgpack.encode(Request(identity.name, target, identity.public, membership.proof, signature))
    return _length.pack(len(data)) + data


def checked(data: bytes, relay: str, nonce: bytes, membership: Membership) -> Request:
    """ValueError says why the relay with that key refuses the request."""
    try:
        asked = _REQUESTS.decode(data)
    except UNDECODABLE:
        raise ValueError("a malformed request to a relay") from None
    if key_id_of(asked.name) != key_id(asked.public):
        raise ValueError(f"{asked.name}: a request with another peer's key")
    if not verify(asked.public, "relay", relay.encode() + nonce + asked.target.encode(), asked.signature):
        raise ValueError(f"{asked.name}: the request's signature is wrong, or for another relay")
    membership.check(asked.proof, asked.name, membership.clock())
    return asked


class RelayService:
    """Joins callers' connections with those that wait here. `tell` receives words for the user, in any thread. In one loop."""

    def __init__(self, key: str, membership: Membership, tell: Callable[[str], None]) -> None:
        self.key = key  # id of this peer's
        self.passed_bytes = 0
        self.circuits = 0  # joined now
        self._callers: Counter[Peer] = Counter()  # who asked for them
        self._membership, self._tell = membership, tell
        self._budget = Budget(RATE)
        self._reported_bytes = 0
        self._opening = 0
        self._waiting: dict[Peer, deque[socket.socket]] = {}
        self._arrived = asyncio.Event()  # another connection waits

    def close(self) -> None:
        for sockets in self._waiting.values():
            for each in sockets:
                each.close()

    async def serve(self, sock: socket.socket) -> None:
        """Until that connection ends, or waits here."""
        loop, keep = asyncio.get_running_loop(), False
        try:
            with self._admitted():
                async with asyncio.timeout(OPENING_S):
                    await _received(sock, len(CALL))
                    nonce = os.urandom(NONCE_BYTES)
                    await loop.sock_sendall(sock, nonce)
                    (nbytes,) = _length.unpack(await _received(sock, _length.size))
                    if nbytes > MAX_REQUEST_BYTES:
                        raise ValueError(f"a request of {nbytes} bytes to a relay")
                    asked = checked(await _received(sock, nbytes), self.key, nonce, self._membership)
                    if not asked.target:
                        keep = await self._wait(sock, asked.name)
                        return
                    if self._callers[asked.name] >= CALLER_CIRCUITS:
                        raise ValueError(f"{asked.name}: {CALLER_CIRCUITS} of its connections pass this relay already")
                    other = await self._other_end(asked.target)
                    await loop.sock_sendall(other, JOINED)
                    await loop.sock_sendall(sock, JOINED)
            await self._join(asked.name, sock, other)
        except (OSError, ValueError) as error:  # TimeoutError too
            log.debug("a relayed connection is refused: %s", error or type(error).__name__)
        finally:
            if not keep:
                sock.close()

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        """The listener's own bound ends where the relay takes a connection over."""
        if self._opening >= OPENINGS:
            raise ValueError("too many connections begin at this relay")
        self._opening += 1
        try:
            yield
        finally:
            self._opening -= 1

    async def _wait(self, sock: socket.socket, peer: Peer) -> bool:
        """Keep it for a caller, where there is room."""
        if peer not in self._waiting and len(self._waiting) >= WAITING_PEERS:
            self._forget_closed()
        if peer not in self._waiting and len(self._waiting) >= WAITING_PEERS:
            raise ValueError("too many peers wait at this relay")
        sockets = self._waiting.setdefault(peer, deque())
        while len(sockets) >= WAITING:
            sockets.popleft().close()  # the peer knows best which of its connections live
        sockets.append(sock)
        await asyncio.get_running_loop().sock_sendall(sock, WAIT)
        self._arrived.set()
        self._arrived = asyncio.Event()
        return True

    def _forget_closed(self) -> None:
        """Peers that have left are asked for by nobody, and would keep their places."""
        for peer, sockets in list(self._waiting.items()):
            for sock in [each for each in sockets if not _is_open(each)]:
                sockets.remove(sock)
                sock.close()
            if not sockets:
                del self._waiting[peer]

    async def _other_end(self, peer: Peer) -> socket.socket:
        if self.circuits >= CIRCUITS:
            raise ValueError("too many connections pass this relay")
        while True:
            sockets = self._waiting.get(peer)
            while sockets:
                sock = sockets.popleft()
                if not sockets:
                    self._waiting.pop(peer, None)
                if _is_open(sock):
                    return sock
                sock.close()
            await self._arrived.wait()

    async def _join(self, caller: Peer, one: socket.socket, other: socket.socket) -> None:
        self.circuits += 1
        self._callers[caller] += 1
        try:
            async with asyncio.timeout(IDLE_S) as idle:
                directions = [asyncio.create_task(self._pass(*pair, idle)) for pair in ((one, other), (other, one))]
                try:
                    await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for each in directions:
                        each.cancel()
                    await asyncio.gather(*directions, return_exceptions=True)
        finally:
            self.circuits -= 1
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]
            other.close()

    async def _pass(self, source: socket.socket, target: socket.socket, idle: asyncio.Timeout) -> None:
        loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(PIECE_BYTES))
        while nbytes := await loop.sock_recv_into(source, buffer):
            idle.reschedule(loop.time() + IDLE_S)
            self.passed_bytes += nbytes  # before they are sent: nobody has received bytes that are not counted
            await loop.sock_sendall(target, buffer[:nbytes])
            self._budget.spend(now := time.monotonic(), nbytes)
            if self.passed_bytes - self._reported_bytes >= REPORT_BYTES:
                self._reported_bytes = self.passed_bytes
                self._tell(
                    f"{self.passed_bytes / 1e6:,.0f} MB passed as a relay for peers without an open port, {self.circuits} connections now"
                )
            if (debt_s := self._budget.debt_s(now)) > 0:
                await asyncio.sleep(debt_s)


class Relays:
    """This peer as a relay (`service`), and waiting at others' relays where it needs that."""

    def __init__(self, identity: Identity, membership: Membership, tell: Callable[[str], None] = log.info) -> None:
        self._announce: Callable[[tuple[str, ...]], None] = lambda routes: None
        # Called in the owner's loop: other addresses from now on
        self.moved: list[Callable[[tuple[str, ...]], None]] = []
        self.service = RelayService(identity.key_id, membership, tell)
        self._identity, self._membership = identity, membership
        self._loop = BackgroundLoop("shoal relay")
        self._reached: dict[RelayRoute, float] = {}  # peers that may be relays, directly: since when
        self._callers: set[Connection] = set()  # connections by which others have reached this peer directly
        self._answered_at = float("-inf")  # when there last was one
        self._accepted: Counter[RelayRoute] = Counter()  # connections that wait at those relays
        self._refused: dict[RelayRoute, float] = {}  # until when
        self._take: Callable[[socket.socket], None] = socket.socket.close
        self._hosts: Callable[[], tuple[str, ...]] = tuple
        self._offers: set[asyncio.Task[None]] = set()
        self._open = False

    def hear(self, announce: Callable[[tuple[str, ...]], None]) -> None:
        """From now on `announce` receives what this peer's record should name: at once what it should name by now. In the owner's loop."""
        self._announce = announce
        if routes := self._routes():
            announce(routes)

    def start(self, take: Callable[[socket.socket], None], hosts: Callable[[], tuple[str, ...]]) -> None:
        """`take` gets each connection that a caller has reached this peer through; `hosts` are this machine's own addresses."""
        self._take, self._hosts, self._open = take, hosts, True
        self._loop.start()
        self._loop.post(lambda: self._loop.create_task(self._look()))

    def close(self) -> None:
        self._open = False
        self._loop.close()
        self.service.close()

    # ------------------------------------------------------------------------------------------- from engines' threads

    def reached(self, peer: Peer, host: str, port: int) -> None:
        """That peer was reached there directly."""
        place = RelayRoute(host, port, key_id_of(peer))
        if place not in self._reached and len(self._reached) < WAITING_PEERS:
            self._reached[place] = time.monotonic()

    def lost(self, peer: Peer, host: str, port: int) -> None:
        self._reached.pop(RelayRoute(host, port, key_id_of(peer)), None)

    def answered(self, connection: Connection) -> None:
        """Somebody has reached this peer directly."""
        self._callers.add(connection)

    def serve(self, sock: socket.socket) -> None:
        """A connection to this peer's port that begins with CALL. It is the relay's from now on."""
        if self._open:
            self._loop.post(lambda: self._loop.create_task(self.service.serve(sock)))
        else:
            sock.close()

    async def _look(self) -> None:
        """Keep as many connections waiting as this peer needs."""
        named: tuple[str, ...] = ()
        hosts = self._hosts()
        tasks: Counter[RelayRoute] = Counter()
        while True:
            await asyncio.sleep(CHECK_S)
            if (now := self._hosts()) != hosts and not all(map(is_loopback, now)):
                hosts = now
                self._move(hosts)
            for place in self._chosen() if self._unreachable() else ():
                while tasks[place] < WAITING:
                    tasks[place] += 1
                    task = self._loop.create_task(self._offer(place))
                    self._offers.add(task)
                    task.add_done_callback(self._offers.discard)
                    task.add_done_callback(lambda _, place=place: tasks.subtract([place]))  # type: ignore[misc]
            if (routes := self._routes()) != named:
                named = routes
                self._loop.call_in_owner(lambda routes=routes: self._announce(routes))  # type: ignore[misc]

    def _routes(self) -> tuple[str, ...]:
        """By which others reach this peer now."""
        return tuple(place.text for place, count in tuple(self._accepted.items()) if count > 0)

    def _move(self, hosts: tuple[str, ...]) -> None:
        """This machine has other addresses: whatever waits elsewhere under the old ones waits in vain."""
        self._membership.seen = ""
        for task in list(self._offers):
            task.cancel()
        for call in self.moved:
            self._loop.call_in_owner(partial(call, hosts))

    def _unreachable(self) -> bool:
        """Others see another address than this machine's; or nobody calls, not any more where a port was closed in mid-run."""
        seen = self._membership.seen
        if seen and seen not in self._hosts() and not ipaddress.ip_address(seen).is_loopback:
            return True
        self._callers -= {each for each in tuple(self._callers) if each.closed}
        if self._callers:
            self._answered_at = time.monotonic()
        first = min(self._reached.values(), default=float("inf"))
        return time.monotonic() - max(first, self._answered_at) > SILENT_S

    def _chosen(self) -> list[RelayRoute]:
        now = time.monotonic()
        usable = [place for place in list(self._reached) if self._refused.get(place, 0.0) <= now]
        return sorted(usable, key=lambda place: -self._accepted[place])[:RELAYS]

    async def _offer(self, place: RelayRoute) -> None:
        """One connection that waits at a relay, until a caller has come by it or it breaks."""
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        sock, counted = tuned(socket.socket(family, socket.SOCK_STREAM)), False
        try:
            async with asyncio.timeout(OPENING_S):
                await loop.sock_connect(sock, (place.host, place.port))
                await loop.sock_sendall(sock, CALL)
                nonce = await _received(sock, NONCE_BYTES)
                await loop.sock_sendall(sock, request(self._identity, self._membership, place.key, nonce, ""))
                if await _received(sock, len(WAIT)) != WAIT:
                    raise ConnectionError("it is no relay")
            self._accepted[place] += 1
            counted = True
            if await _received(sock, len(JOINED)) == JOINED:
                self._take(sock)
                sock = None  # type: ignore[assignment]
        except OSError as error:  # TimeoutError too
            log.debug("%s: %s", place, error or type(error).__name__)
            self._refused[place] = time.monotonic() + OPENING_S
        finally:
            self._accepted[place] -= counted
            if sock is not None:
                sock.close()


def _is_open(sock: socket.socket) -> bool:
    """It says nothing while it waits."""
    with contextlib.suppress(OSError):
        try:
            return bool(sock.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
    return False


async def _received(sock: socket.socket, nbytes: int) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < nbytes:
        piece = await loop.sock_recv(sock, nbytes - len(received))
        if not piece:
            raise ConnectionError("closed by the other side")
        received += piece
    return received
