"""Where the peers of a run are found: the contract of every directory, and the plain directory.

A directory forwards signed records (records.py) but cannot forge them. The plain directory (`Gossip`) needs only the address of one
peer of the run: a caller sends its own record and a few others, and receives all that are held, provided one of its records is valid.
It serves local runs and small groups; a distributed hash table (dht.py) serves the others behind the same contract. All of it runs in
a background loop (background_loop.py), as anybody can call.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from shoal.escaping import UNDECODABLE
from shoal.transport.budget import Allowance, Budgets, address_group
from shoal.transport.directory.background_loop import BackgroundLoop
from shoal.transport.directory.records import (
    ALL_ADDRESSES,
    MAX_RECORDS,
    MAX_RECORDS_BYTES,
    MAX_SEALED_BYTES,
    PER_ADDRESS,
    TTL_S,
    PeerRecord,
    Records,
    Sealed,
    seal,
    unseal,
)
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Membership
from shoal.transport.identity.passes import NotWelcome
from shoal.transport.tls import resolved

__all__ = ["MAX_RECORDS", "MAX_SEALED_BYTES", "TTL_S", "Directory", "Gossip", "PeerRecord", "Sealed", "seal", "unseal"]

SENT = 4  # records that a caller sends: its own, and some of others
MAX_SENT_BYTES = SENT * (MAX_SEALED_BYTES + 8) + 8
MAX_ANSWER_BYTES = MAX_RECORDS_BYTES + 8 * MAX_RECORDS
EXCHANGE_S = 3.0  # to connect, send and receive
CONTACTS = 16  # peers called at once, besides the bootstrap ones
CALLERS = 128  # that have not sent a valid record yet; beyond it the oldest of the busiest address is dropped
ANSWERED = 128  # answers being sent
EVERY = 32  # records checked before other tasks have their turn
REFUSED_S = 0.002  # pause after a caller was refused
# Calls. 400 peers behind one address that have just been started ask twice a second whoever founded the run.
CALLS_FROM_ONE = Allowance(per_s=200.0, at_once=2000.0)
CALLS_FROM_ALL = Allowance(per_s=400.0, at_once=4000.0)
RECORDS_FROM_ONE, RECORDS_FROM_ALL = PER_ADDRESS, ALL_ADDRESSES  # verifications of what callers send
# Verifications of what was asked for, by the address asked: at first all records are new, three signatures each.
ASKED_ONE = Allowance(per_s=200.0, at_once=3.0 * MAX_RECORDS)
ASKED_ALL = Allowance(per_s=500.0, at_once=6.0 * MAX_RECORDS)


class Directory(Protocol):
    """Both calls may take seconds; neither raises for a network that does not answer. Every new record is
    handed at once to the `learn` that the directory was made with, so that the transport knows the address."""

    own: PeerRecord  # as announced next
    membership: Membership

    @property
    def addresses(self) -> tuple[str, ...]:
        """Bootstrap addresses for newcomers, as an invite carries them."""

    async def start(self) -> None:
        """Listen. ValueError names a port that is taken."""

    async def close(self) -> None: ...

    async def announce(self) -> None:
        """Announce this peer; called again well within TTL_S."""

    async def peers(self) -> list[PeerRecord]:
        """Records of the run that have not expired."""


class AnswerCache:
    """The answer to every caller, made once a second at most, as anybody can ask; empty when it has to be made."""

    def __init__(self) -> None:
        self.data = b""
        self._until_s = 0.0
        self._version = 0  # of the authority's list, when the answer was made

    def check(self, now: float, version: int) -> None:
        if now >= self._until_s or version != self._version:
            self.data, self._until_s, self._version = b"", now + 1.0, version


class Callers:
    """Bounds what unknown callers cost: calls by address, callers that have not sent a valid record yet, answers being sent."""

    def __init__(self) -> None:
        self.unverified: dict[asyncio.Task[None], str] = {}  # with the address, the oldest first
        self._calls = Budgets(CALLS_FROM_ONE, CALLS_FROM_ALL)
        self._answering = 0

    def admits(self, place: str, now: float) -> bool:
        return self._calls.take(place, now)

    def make_room(self) -> None:
        """For one more caller."""
        if len(self.unverified) < CALLERS:
            return
        counts = Counter(self.unverified.values())
        crowded = max(counts, key=lambda place: (counts[place], place))
        oldest = next(task for task, place in self.unverified.items() if place == crowded)
        self.unverified.pop(oldest)
        oldest.cancel()

    def forget_current(self) -> None:
        """The task that runs has verified its caller, or ends."""
        task = asyncio.current_task()
        assert task is not None
        self.unverified.pop(task, None)

    async def answer(self, sock: socket.socket, data: Callable[[], bytes]) -> None:
        """Send it, unless too many answers are being sent."""
        if self._answering >= ANSWERED:
            return
        self._answering += 1
        try:
            await asyncio.get_running_loop().sock_sendall(sock, data())
        finally:
            self._answering -= 1


class Gossip:
    """The plain directory. `own` is this peer's record, without its expiry and directory port, which are set here. `learn` is called in the
    loop that `start` was called in."""

    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        own: PeerRecord,
        bootstrap: tuple[str, ...],
        learn: Callable[[PeerRecord], None],
        bound: str = "",
        port: int = 0,
    ) -> None:
        """`bound`: the address to listen on; '': the record's host. `port`: 0 is any."""
        self._port = port
        self.identity, self.membership = identity, membership
        self.own, self.bootstrap, self._bound = own, bootstrap, bound or own.host
        self._background = BackgroundLoop("shoal directory")
        self._records = Records(
            membership,
            lambda record: self._background.call_in_owner(lambda: learn(record)),
            from_one=RECORDS_FROM_ONE,
            from_all=RECORDS_FROM_ALL,
        )
        self._asked = Budgets(ASKED_ONE, ASKED_ALL)
        self._callers = Callers()
        self._answer = AnswerCache()
        self._sealed = b""  # this peer's record
        self._informed: set[str] = set()  # addresses that this peer's record was sent to
        self._listener: socket.socket | None = None
        self._rng = random.Random(own.peer)

    async def start(self) -> None:
        family, where = await resolved(self._bound, self._port)
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        # Connections of the session before may linger
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(where)
            self._listener.listen(256)
        except OSError as error:
            self._listener.close()
            raise ValueError(
                f"cannot listen on {self._bound}, port {self._port}: {error}; check network.host and network.port"
            ) from None
        self._listener.setblocking(False)
        self.own = msgspec.structs.replace(self.own, directory_port=self._listener.getsockname()[1])
        self._background.start()
        await self._background.run(self._begin(self._listener))

    @property
    def addresses(self) -> tuple[str, ...]:
        """What a newcomer needs."""
        return tuple(f"{host}:{self.own.directory_port}" for host in self.own.hosts)

    async def announce(self) -> None:
        await self._background.run(self._announce())

    async def peers(self) -> list[PeerRecord]:
        return await self._background.run(self._peers())

    async def close(self) -> None:
        self._background.close()
        if self._listener is not None:
            self._listener.close()

    # -------------------------------------------------------------------------------------------- in the background

    async def _begin(self, listener: socket.socket) -> None:
        self._renew()
        self._background.create_task(self._accept(listener))

    def _renew(self) -> None:
        self.own = msgspec.structs.replace(self.own, expires_s=time.time() + TTL_S)
        self._sealed = seal(self.identity, self.membership, self.own)
        self._records.own(self.own, self._sealed)

    async def _announce(self) -> None:
        self._renew()
        self._informed.clear()
        await self._exchange()

    async def _peers(self) -> list[PeerRecord]:
        if self.own.expires_s < time.time() + TTL_S / 2:  # an expired record gets no answer
            self._renew()
        await self._exchange()
        return self._records.fresh(time.time())

    async def _exchange(self) -> None:
        """Ask the bootstrap peers and some others; then new ones that do not have this peer's record yet."""
        await self._ask_all(dict.fromkeys((*self.bootstrap, *self._some(self._contacts()))))
        await self._ask_all(self._some([address for address in self._contacts() if address not in self._informed]))

    def _contacts(self) -> list[str]:
        return [
            f"{record.host}:{record.directory_port}"
            for record in self._records.fresh(time.time())
            if record.peer != self.own.peer
        ]

    def _some(self, contacts: list[str]) -> list[str]:
        return self._rng.sample(contacts, min(CONTACTS, len(contacts)))

    async def _ask_all(self, contacts: Iterable[str]) -> None:
        await asyncio.gather(*(self._ask(address) for address in contacts))

    async def _ask(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(EXCHANGE_S):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(self._own_records())
                    size = _announced(await reader.readexactly(4), MAX_ANSWER_BYTES)
                    await self._check(_decoded(await reader.readexactly(size))[:MAX_RECORDS], address, self._asked)
                    self._informed.add(address)
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError, OverflowError, asyncio.IncompleteReadError):
            return  # it is down, or its answer is malformed: another contact will do

    def _own_records(self) -> bytes:
        """This peer's record, which entitles it to an answer, and some of others, in case they have called nobody."""
        others = [held.data for peer, held in self._records.held.items() if peer != self.own.peer]
        some = self._rng.sample(others, min(SENT - 1, len(others)))
        return _framed([self._sealed, *some])

    # -------------------------------------------------------------------------------------------------- being called

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError:  # the caller has closed already, or no file descriptor is left
                await asyncio.sleep(EXCHANGE_S / 30)
                continue
            place = address_group(address[0])
            if not self._callers.admits(place, time.monotonic()):
                sock.close()
                await asyncio.sleep(REFUSED_S)
                continue
            self._callers.make_room()
            task = self._background.create_task(self._serve(sock, place))
            self._callers.unverified[task] = place
            await asyncio.sleep(0)  # accepting does not wait, and would keep others from their turn

    async def _serve(self, sock: socket.socket, place: str) -> None:
        try:
            async with asyncio.timeout(EXCHANGE_S):
                size = _announced(await _received(sock, 4), MAX_SENT_BYTES)
                records = _decoded(await _received(sock, size))[:SENT]
                valid = await self._check(records, place)
                self._callers.forget_current()
                if valid is not None:
                    await self._callers.answer(sock, self._all if valid else lambda: _framed([self._sealed]))
        except (OSError, TimeoutError, ValueError):
            return
        finally:
            self._callers.forget_current()
            sock.close()

    def _all(self) -> bytes:
        """The answer to every caller."""
        self._answer.check(time.monotonic(), self.membership.standing.version)
        if not self._answer.data:
            self._records.fresh(time.time())
            self._answer.data = _framed([held.data for held in self._records.held.values()])
        return self._answer.data

    async def _check(self, records: list[bytes], source: str, budgets: Budgets | None = None) -> bool | None:
        """True: one of them is valid. False: only because its peer was revoked none is; such a peer receives this peer's record alone, as
        its transport then learns why it is refused. None: none is. Only valid records are forwarded."""
        valid: bool | None = None
        for number, data in enumerate(records):
            if number % EVERY == EVERY - 1:
                await asyncio.sleep(0)
            before = len(self._records.held)
            try:
                self._records.add(data, source, time.time(), budgets=budgets)
                valid = True
            except NotWelcome:
                valid = valid or False
            except ValueError:
                continue
            if len(self._records.held) != before:
                self._answer.data = b""
        return valid


def _framed(records: list[bytes]) -> bytes:
    encoded = msgspec.msgpack.encode(records)
    return len(encoded).to_bytes(4, "big") + encoded


def _announced(prefix: bytes, most: int) -> int:
    size = int.from_bytes(prefix, "big")
    if size > most:
        raise ValueError(f"{size} bytes of records; at most {most}")
    return size


def _decoded(data: bytes) -> list[bytes]:
    try:
        return msgspec.msgpack.decode(data, type=list[bytes])
    except UNDECODABLE as error:
        raise ValueError(f"not a list of records: {error}") from None


async def _received(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < size:
        piece = await loop.sock_recv(sock, size - len(received))
        if not piece:
            raise ConnectionError("closed by the other side")
        received += piece
    return bytes(received)
