"""Who takes part in a run and where they are reached: the contract of every directory, the signed record, and the plain directory.

A record is signed by the peer it speaks of and expires; a directory passes records on but cannot make them. The plain
directory (`Gossip`) needs nothing but the address of one peer of the run: peers tell one another all the records they hold. It
serves local runs and small groups; a distributed hash table (dht.py) serves the others behind the same contract.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec

from shoal.core.messages import Peer
from shoal.transport.identity import Identity, key_id, key_id_of, verify

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
    """A record as it travels: its bytes, the key it is signed with, and what admits that key to the run."""

    body: bytes
    public: bytes
    signature: bytes
    admission: bytes = b""


class Directory(Protocol):
    """Both calls may take seconds; neither raises for a network that does not answer."""

    async def announce(self) -> None:
        """Tell of this peer; called again well within TTL_S."""

    async def peers(self) -> list[Record]:
        """Records of the run that have not expired."""

    def find(self, peer: Peer) -> Record | None:
        """What is known of that peer, without asking anybody."""


def seal(identity: Identity, record: Record, admission: bytes = b"") -> bytes:
    body = msgspec.msgpack.encode(record)
    return msgspec.msgpack.encode(
        Sealed(body=body, public=identity.public, signature=identity.sign("record", body), admission=admission)
    )


def unseal(data: bytes, run: str, now: float, admits: Callable[[Sealed], bool] | None = None) -> Record:
    """The record, checked: its size, signature, run and expiry. ValueError says what is wrong."""
    if len(data) > MAX_SEALED_BYTES:
        raise ValueError(f"a record of {len(data)} bytes; at most {MAX_SEALED_BYTES}")
    try:
        sealed = msgspec.msgpack.decode(data, type=Sealed)
        record = msgspec.msgpack.decode(sealed.body, type=Record)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a record: {error}") from None
    if key_id_of(record.peer) != key_id(sealed.public):
        raise ValueError(f"{record.peer}: signed with another peer's key")
    if not verify(sealed.public, "record", sealed.body, sealed.signature):
        raise ValueError(f"{record.peer}: the signature is wrong")
    if record.run != run:
        raise ValueError(f"{record.peer} takes part in another run")
    if not now < record.expires_s <= now + 10 * TTL_S:
        raise ValueError(f"{record.peer}: the record has expired, or a clock is wrong by minutes")
    if admits is not None and not admits(sealed):
        raise ValueError(f"{record.peer} was not admitted to this run")
    return record


class Gossip:
    """The plain directory. `own` is this peer's record; its expiry and directory port are filled in here."""

    def __init__(
        self,
        identity: Identity,
        own: Record,
        bootstrap: tuple[str, ...],
        admission: bytes = b"",
        admits: Callable[[Sealed], bool] | None = None,
    ) -> None:
        self.identity, self.own, self.bootstrap = identity, own, bootstrap
        self.admission, self.admits = admission, admits
        self._held: dict[Peer, tuple[Record, bytes]] = {}
        self._server: asyncio.Server | None = None
        self._rng = random.Random(own.peer)

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, self.own.host, port)
        self.own = msgspec.structs.replace(self.own, directory_port=self._server.sockets[0].getsockname()[1])

    @property
    def addresses(self) -> tuple[str, ...]:
        """What a newcomer needs."""
        return (f"{self.own.host}:{self.own.directory_port}",)

    async def announce(self) -> None:
        self.own = msgspec.structs.replace(self.own, expires_s=time.time() + TTL_S)
        self._held[self.own.peer] = (self.own, seal(self.identity, self.own, self.admission))
        await self._exchange()

    async def peers(self) -> list[Record]:
        await self._exchange()
        now = time.time()
        return [record for record, _ in self._held.values() if record.expires_s > now]

    def find(self, peer: Peer) -> Record | None:
        held = self._held.get(peer)
        return held[0] if held is not None else None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _exchange(self) -> None:
        now = time.time()
        known = [
            f"{record.host}:{record.directory_port}"
            for record, _ in self._held.values()
            if record.expires_s > now and record.peer != self.own.peer
        ]
        contacts = dict.fromkeys((*self.bootstrap, *self._rng.sample(known, min(CONTACTS, len(known)))))
        await asyncio.gather(*(self._ask(address) for address in contacts))

    async def _ask(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(EXCHANGE_S):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    self._tell(writer)
                    self._hear(await _read(reader))
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
        now = time.time()
        told = msgspec.msgpack.encode([data for record, data in self._held.values() if record.expires_s > now])
        writer.write(len(told).to_bytes(4, "big") + told)

    def _hear(self, told: list[bytes]) -> None:
        now = time.time()
        for data in told[:MAX_RECORDS]:
            try:
                record = unseal(data, self.own.run, now, self.admits)
            except ValueError:
                continue  # expired, of another run, or forged: not passed on either
            held = self._held.get(record.peer)
            if held is None or record.expires_s > held[0].expires_s:
                self._held[record.peer] = (record, data)
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
