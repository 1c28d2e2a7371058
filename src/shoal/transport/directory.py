"""Who takes part in a run and where they are reached: the contract of every directory, the signed record, and the plain directory.

A record is signed by the peer it speaks of and expires; a directory passes records on but cannot make them. The plain
directory (`Gossip`) needs nothing but the address of one peer of the run: peers tell one another all the records they hold. It
serves local runs and small groups; a distributed hash table (dht.py) serves the others behind the same contract.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Protocol

import msgspec

from shoal.core.messages import Peer
from shoal.transport.identity import Identity, key_id, key_id_of, verify
from shoal.transport.invite import Membership

TTL_S = 90.0  # several announcements may be lost before a living peer is forgotten
MAX_SEALED_BYTES = 4096
MAX_RECORDS = 10_000
MAX_EXCHANGE_BYTES = 16 << 20
EXCHANGE_S = 3.0  # to connect, tell and be told
CONTACTS = 16  # peers told at once, besides the bootstrap ones


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One peer of one run. `addresses` are further ways to it, in words of the transport that reads them."""

    run: Annotated[str, msgspec.Meta(max_length=128)]
    peer: Peer
    host: Annotated[str, msgspec.Meta(max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    directory_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    expires_s: float = 0.0  # wall-clock seconds since 1970
    addresses: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=500)], ...], msgspec.Meta(max_length=16)] = ()


class Sealed(msgspec.Struct, frozen=True, array_like=True):
    """A record as it travels: its bytes, the key it is signed with, and the pass that admits that key to the run."""

    body: bytes
    public: bytes
    signature: bytes
    proof: bytes


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

    async def peers(self) -> list[Record]:
        """Records of the run that have not expired."""


def seal(identity: Identity, membership: Membership, record: Record) -> bytes:
    body = msgspec.msgpack.encode(record)
    signature = identity.sign("record", body)
    return msgspec.msgpack.encode(Sealed(body, identity.public, signature, membership.proof))


def unseal(data: bytes, membership: Membership, now: float) -> Record:
    """The record, checked: its size, signature, run, expiry, and that its peer belongs to the run. ValueError says what is wrong."""
    record = opened(data, membership, now)
    if (revoked := membership.revoked(record.peer)) is not None:
        raise ValueError(f"{record.peer}: {revoked.words}")
    return record


def opened(data: bytes, membership: Membership, now: float) -> Record:
    """The same without a look at the revoked."""
    if len(data) > MAX_SEALED_BYTES:
        raise ValueError(f"a record of {len(data)} bytes; at most {MAX_SEALED_BYTES}")
    try:
        sealed = msgspec.msgpack.decode(data, type=Sealed)
        record = msgspec.msgpack.decode(sealed.body, type=Record)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not a record: {error}") from None
    key = key_id(sealed.public)
    if key_id_of(record.peer) != key:
        raise ValueError(f"{record.peer}: signed with another peer's key")
    if not verify(sealed.public, "record", sealed.body, sealed.signature):
        raise ValueError(f"{record.peer}: the signature is wrong")
    if record.run != membership.run:
        raise ValueError(f"{record.peer} takes part in another run")
    if not now < record.expires_s <= now + 10 * TTL_S:
        raise ValueError(f"{record.peer}: the record has expired, or a clock is wrong by minutes")
    membership.check_pass(sealed.proof, record.peer, now)
    return record


class Gossip:
    """The plain directory. `own` is this peer's record; its expiry and directory port are filled in here."""

    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        own: Record,
        bootstrap: tuple[str, ...],
        learn: Callable[[Record], None],
    ) -> None:
        self.identity, self.membership = identity, membership
        self.own, self.bootstrap, self._learn = own, bootstrap, learn
        self._held: dict[Peer, tuple[Record, bytes]] = {}
        self._told: set[str] = set()  # addresses that have heard of this peer
        self._server: asyncio.Server | None = None
        self._rng = random.Random(own.peer)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.own.host, 0)
        self.own = msgspec.structs.replace(self.own, directory_port=self._server.sockets[0].getsockname()[1])

    @property
    def addresses(self) -> tuple[str, ...]:
        """What a newcomer needs."""
        return (f"{self.own.host}:{self.own.directory_port}",)

    async def announce(self) -> None:
        self.own = msgspec.structs.replace(self.own, expires_s=time.time() + TTL_S)
        self._held[self.own.peer] = (self.own, seal(self.identity, self.membership, self.own))
        self._told.clear()
        await self._exchange()

    async def peers(self) -> list[Record]:
        await self._exchange()
        self._drop_revoked()
        now = time.time()
        return [record for record, _ in self._held.values() if record.expires_s > now]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _drop_revoked(self) -> None:
        for peer in [peer for peer in self._held if self.membership.revoked(peer)]:
            del self._held[peer]

    async def _exchange(self) -> None:
        """Ask the bootstrap peers and some others; then those that are new and have not heard of this peer."""
        await self._ask_all(dict.fromkeys((*self.bootstrap, *self._some(self._contacts()))))
        await self._ask_all(self._some([address for address in self._contacts() if address not in self._told]))

    def _contacts(self) -> list[str]:
        now = time.time()
        return [
            f"{record.host}:{record.directory_port}"
            for record, _ in self._held.values()
            if record.expires_s > now and record.peer != self.own.peer
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
                    self._tell(writer)
                    self._hear(await _read(reader))
                    self._told.add(address)
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            return  # gone, or it talks nonsense: another contact will do

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(EXCHANGE_S):
                heard = await _read(reader)
                self._tell(writer)
                await writer.drain()
                self._hear(heard)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    def _tell(self, writer: asyncio.StreamWriter) -> None:
        self._drop_revoked()
        now = time.time()
        told = msgspec.msgpack.encode([data for record, data in self._held.values() if record.expires_s > now])
        writer.write(len(told).to_bytes(4, "big") + told)

    def _hear(self, told: list[bytes]) -> None:
        now = time.time()
        for data in told[:MAX_RECORDS]:
            try:
                record = unseal(data, self.membership, now)
            except ValueError:
                continue  # expired, of another run, or forged: not passed on either
            held = self._held.get(record.peer)
            if held is None or record.expires_s > held[0].expires_s:
                self._held[record.peer] = (record, data)
                self._learn(record)
        if len(self._held) > MAX_RECORDS:
            self._held = {peer: kept for peer, kept in self._held.items() if kept[0].expires_s > now}


async def _read(reader: asyncio.StreamReader) -> list[bytes]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_EXCHANGE_BYTES:
        raise ValueError(f"{size} bytes of records; at most {MAX_EXCHANGE_BYTES}")
    try:
        return msgspec.msgpack.decode(await reader.readexactly(size), type=list[bytes])
    except msgspec.DecodeError as error:
        raise ValueError(f"not a list of records: {error}") from None
