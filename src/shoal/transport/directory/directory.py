"""Where the peers of a run are found: the contract of every directory, and the plain directory.

A directory passes signed records on (records.py) but cannot make them. The plain directory (`Gossip`) needs nothing but the address
of one peer of the run: a caller brings its own record and a few others, and is told all that are held. Only who brings a good record
is told anything. It serves local runs and small groups; a distributed hash table (dht.py) serves the others behind the same
contract. All of it runs in a thread of its own (background_loop.py), as anybody can call.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Protocol

import msgspec

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

TOLD = 4  # records that a caller brings: its own, and some of others
MAX_TOLD_BYTES = TOLD * (MAX_SEALED_BYTES + 8) + 8
MAX_ANSWER_BYTES = MAX_RECORDS_BYTES + 8 * MAX_RECORDS
EXCHANGE_S = 3.0  # to connect, tell and be told
CONTACTS = 16  # peers told at once, besides the bootstrap ones
CALLERS = 128  # that have not yet told anything; then the oldest of the address with most of them gives way
ANSWERED = 128  # that are being told
EVERY = 32  # records heard, before others have their turn
REFUSED_S = 0.002  # pause after a caller that may not come
# Calls. 400 peers behind one address that have just been started ask twice a second whoever founded the run.
CALLS_FROM_ONE = Allowance(per_s=200.0, at_once=2000.0)
CALLS_FROM_ALL = Allowance(per_s=400.0, at_once=4000.0)
RECORDS_FROM_ONE, RECORDS_FROM_ALL = PER_ADDRESS, ALL_ADDRESSES  # verifications of what callers bring
# Verifications of what was asked for, by the address asked: at first all records are new, three signatures each.
ASKED_ONE = Allowance(per_s=200.0, at_once=3.0 * MAX_RECORDS)
ASKED_ALL = Allowance(per_s=500.0, at_once=6.0 * MAX_RECORDS)


class Directory(Protocol):
    """Both calls may take seconds; neither raises for a network that does not answer. Every record that comes to be known is
    handed at once to the `learn` that the directory was made with, so that the transport knows the way."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Bootstrap addresses for newcomers, as an invite carries them."""

    async def start(self) -> None:
        """Listen. ValueError names a port that is taken."""

    async def close(self) -> None: ...

    async def announce(self) -> None:
        """Tell of this peer; called again well within TTL_S."""

    async def peers(self) -> list[PeerRecord]:
        """Records of the run that have not expired."""


class Gossip:
    """The plain directory. `own` is this peer's record; its expiry and directory port are filled in here. `learn` is called in the
    loop that `start` was called in."""

    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        own: PeerRecord,
        bootstrap: tuple[str, ...],
        learn: Callable[[PeerRecord], None],
    ) -> None:
        self.identity, self.membership = identity, membership
        self.own, self.bootstrap = own, bootstrap
        self._background = BackgroundLoop("shoal directory")
        self._records = Records(
            membership,
            lambda record: self._background.tell(lambda: learn(record)),
            from_one=RECORDS_FROM_ONE,
            from_all=RECORDS_FROM_ALL,
        )
        self._asked = Budgets(ASKED_ONE, ASKED_ALL)
        self._calls = Budgets(CALLS_FROM_ONE, CALLS_FROM_ALL)
        self._unverified_callers: dict[
            asyncio.Task[None], str
        ] = {}  # that have told nothing yet, the oldest first, with their address
        self._answered = 0
        self._answer: tuple[float, bytes] = (0.0, b"")  # until when it is used again, and what all are told
        self._answer_version = 0  # of the authority's list, when that was made
        self._sealed = b""  # this peer's record
        self._told: set[str] = set()  # addresses that have heard of this peer
        self._listener: socket.socket | None = None
        self._work: set[asyncio.Task[None]] = set()
        self._rng = random.Random(own.peer)

    async def start(self) -> None:
        family, where = await resolved(self.own.host, 0)
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind(where)
            self._listener.listen(256)
        except OSError as error:
            self._listener.close()
            raise ValueError(f"cannot listen on {self.own.host}: {error}; check network.host") from None
        self._listener.setblocking(False)
        self.own = msgspec.structs.replace(self.own, directory_port=self._listener.getsockname()[1])
        self._background.start()
        await self._background.run(self._begin(self._listener))

    @property
    def addresses(self) -> tuple[str, ...]:
        """What a newcomer needs."""
        return (f"{self.own.host}:{self.own.directory_port}",)

    async def announce(self) -> None:
        await self._background.run(self._announce())

    async def peers(self) -> list[PeerRecord]:
        return await self._background.run(self._peers())

    async def close(self) -> None:
        self._background.close()
        if self._listener is not None:
            self._listener.close()

    # ---------------------------------------------------------------------------------------------- in the thread aside

    async def _begin(self, listener: socket.socket) -> None:
        self._renew()
        self._start(self._accept(listener))

    def _start(self, work: Coroutine[object, None, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _renew(self) -> None:
        self.own = msgspec.structs.replace(self.own, expires_s=time.time() + TTL_S)
        self._sealed = seal(self.identity, self.membership, self.own)
        self._records.own(self.own, self._sealed)

    async def _announce(self) -> None:
        self._renew()
        self._told.clear()
        await self._exchange()

    async def _peers(self) -> list[PeerRecord]:
        if self.own.expires_s < time.time() + TTL_S / 2:  # nobody would be told anything for one that has ended
            self._renew()
        await self._exchange()
        return self._records.fresh(time.time())

    async def _exchange(self) -> None:
        """Ask the bootstrap peers and some others; then those that are new and have not heard of this peer."""
        await self._ask_all(dict.fromkeys((*self.bootstrap, *self._some(self._contacts()))))
        await self._ask_all(self._some([address for address in self._contacts() if address not in self._told]))

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
                    writer.write(self._bring())
                    size = _announced(await reader.readexactly(4), MAX_ANSWER_BYTES)
                    await self._hear(_decoded(await reader.readexactly(size))[:MAX_RECORDS], address, self._asked)
                    self._told.add(address)
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError, OverflowError, asyncio.IncompleteReadError):
            return  # gone, or it talks nonsense: another contact will do

    def _bring(self) -> bytes:
        """This peer's record, which entitles it to an answer, and some of others', in case that they have called nobody."""
        others = [held.data for peer, held in self._records.held.items() if peer != self.own.peer]
        some = self._rng.sample(others, min(TOLD - 1, len(others)))
        return _framed([self._sealed, *some])

    # -------------------------------------------------------------------------------------------------- being called

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError:  # the caller is gone again, or no file descriptor is left
                await asyncio.sleep(EXCHANGE_S / 30)
                continue
            place = address_group(address[0])
            if not self._calls.take(place, time.monotonic()):
                sock.close()
                await asyncio.sleep(REFUSED_S)
                continue
            if len(self._unverified_callers) >= CALLERS:
                self._turn_away()
            task = self._start(self._serve(sock, place))
            self._unverified_callers[task] = place
            await asyncio.sleep(0)  # accepting does not wait, and would keep others from their turn

    def _turn_away(self) -> None:
        counts = Counter(self._unverified_callers.values())
        crowded = max(counts, key=lambda place: (counts[place], place))
        oldest = next(task for task, place in self._unverified_callers.items() if place == crowded)
        self._unverified_callers.pop(oldest)
        oldest.cancel()

    async def _serve(self, sock: socket.socket, place: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(EXCHANGE_S):
                size = _announced(await _received(sock, 4), MAX_TOLD_BYTES)
                brought = _decoded(await _received(sock, size))[:TOLD]
                good = await self._hear(brought, place)
                self._forget_caller()
                if good is None or self._answered >= ANSWERED:
                    return
                self._answered += 1
                try:
                    await loop.sock_sendall(sock, self._all() if good else _framed([self._sealed]))
                finally:
                    self._answered -= 1
        except (OSError, TimeoutError, ValueError):
            return
        finally:
            self._forget_caller()
            sock.close()

    def _forget_caller(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._unverified_callers.pop(task, None)

    def _all(self) -> bytes:
        """What every caller is told; made once a second at most, as anybody can ask."""
        now, version = time.monotonic(), self.membership.standing.version
        if now >= self._answer[0] or version != self._answer_version:
            self._records.fresh(time.time())
            self._answer, self._answer_version = (now + 1.0, b""), version
        if not self._answer[1]:
            self._answer = (self._answer[0], _framed([held.data for held in self._records.held.values()]))
        return self._answer[1]

    async def _hear(self, told: list[bytes], source: str, budgets: Budgets | None = None) -> bool | None:
        """Is any of them believed? What is expired, of another run or forged is not passed on either. None: not even one of a peer that was
        revoked, which is told of me alone: it learns from my transport why it is refused."""
        good: bool | None = None
        for number, data in enumerate(told):
            if number % EVERY == EVERY - 1:
                await asyncio.sleep(0)
            before = len(self._records.held)
            try:
                self._records.hear(data, source, time.time(), budgets=budgets)
                good = True
            except NotWelcome:
                good = good or False
            except ValueError:
                continue
            if len(self._records.held) != before:
                self._answer = (self._answer[0], b"")
        return good


def _framed(records: list[bytes]) -> bytes:
    told = msgspec.msgpack.encode(records)
    return len(told).to_bytes(4, "big") + told


def _announced(prefix: bytes, most: int) -> int:
    size = int.from_bytes(prefix, "big")
    if size > most:
        raise ValueError(f"{size} bytes of records; at most {most}")
    return size


def _decoded(data: bytes) -> list[bytes]:
    try:
        return msgspec.msgpack.decode(data, type=list[bytes])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a list of records: {error}") from None


async def _received(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    found = bytearray()
    while len(found) < size:
        piece = await loop.sock_recv(sock, size - len(found))
        if not piece:
            raise ConnectionError("closed by the other side")
        found += piece
    return bytes(found)
