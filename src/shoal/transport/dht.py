"""The distributed directory: signed records in a Kademlia table that the peers of the run keep among themselves.

Behind the contract of directory.py, on hivemind's DHT in this process and this peer's libp2p daemon (daemon.py), which may
be shared with the transport. All records of a run lie under one key of the table, each under its peer's name as subkey, on
the twenty peers nearest to that key. Whoever stores or hands on a record cannot make one: every peer checks what it is asked
to keep and what it is told (signature, pass, name, expiry, size), and what fails is neither kept nor believed.

Whether a record counts depends on the record alone and not on the moment, as far as honest peers make them: hivemind throws
away all records of an answer when one of them is refused, so that peers whose clocks differ must not differ here. Likewise the record
of a peer that was revoked is passed on by those who have not heard of it, and is no fault; it is only never believed. And a peer whose own
pass is over announces nothing until a renewal has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from shoal.core.messages import Peer
from shoal.transport.daemon import Daemon, hivemind, multiaddr, parsed_address, written
from shoal.transport.directory import MAX_RECORDS, MAX_SEALED_BYTES, TTL_S, Record, opened, seal
from shoal.transport.identity import Identity
from shoal.transport.invite import Membership

log = logging.getLogger(__name__)

REPLICAS = 20  # peers that keep the records: with 16 of them none was lost when 5 were killed at once
ANSWER_S = 3.0  # from one peer of the table
LOOK_UP_S = 10.0  # a whole look-up or announcement
JOIN_S = 10.0  # for bootstrap peers to answer
JOIN_AGAIN_S = 6.0  # libp2p calls nobody again within 5 s of a failure
CHECKED = 4096  # records remembered as checked: signatures are dear when every look-up brings all again


class Dht:
    """`own` is this peer's record; its expiry is filled in here, and its libp2p addresses when it carries any."""

    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        own: Record,
        bootstrap: tuple[str, ...],
        learn: Callable[[Record], None],
        daemon: Daemon,
    ) -> None:
        self.identity, self.membership, self.own = identity, membership, own
        self.bootstrap, self._learn, self._daemon = bootstrap, learn, daemon
        self._key = f"shoal/{membership.run}"
        self._held: dict[Peer, Record] = {}
        self._check = functools.lru_cache(CHECKED)(self._checked)
        self._p2p: Any = None
        self._node: Any = None
        self._started = False
        self._contacts: tuple[str, ...] = ()  # libp2p addresses of peers of the table, as last seen
        daemon.revived.append(self._again)

    async def start(self) -> None:
        await self._daemon.start()
        self._started = True
        if self.bootstrap:
            await self._call_bootstrap()
        await self._begin(self._bootstrap_ids())

    async def _begin(self, initial: list[str]) -> None:
        try:
            self._p2p = await hivemind("p2p").P2P.replicate(multiaddr(f"/unix{self._daemon.control}"))
            self._node = await hivemind("dht.node").DHTNode.create(
                p2p=self._p2p,
                node_id=self._node.node_id if self._node is not None else None,  # the others know it under that one
                initial_peers=initial,
                num_replicas=REPLICAS,
                bucket_size=REPLICAS,
                wait_timeout=ANSWER_S,
                cache_locally=False,  # a look-up asks the others, always
                cache_nearest=0,
                cache_on_store=False,
                cache_refresh_before_expiry=0,
                record_validator=_validator(self._accept),
                ensure_bootstrap_success=False,  # they have answered above
                strict=False,
            )
        except (OSError, EOFError, hivemind("p2p").P2PDaemonError) as error:
            raise ValueError(f"the distributed directory cannot start: {error}") from error

    async def close(self) -> None:
        if not self._started:
            return
        self._started = False
        await self._leave()
        await self._daemon.close()

    async def _leave(self) -> None:
        if self._node is not None and not self._daemon.ended:
            with contextlib.suppress(OSError, hivemind("p2p").P2PDaemonError):  # it ends just now
                async with asyncio.timeout(ANSWER_S):
                    await self._node.shutdown()
        if self._p2p is not None:
            await self._p2p.shutdown()

    async def _again(self) -> None:
        """Another daemon runs. hivemind's objects belong to the one before, so the table is entered anew, by way of those that were in
        it; what is known of others stays."""
        if not self._started:
            return
        contacts = tuple(dict.fromkeys((*self._contacts, *self.bootstrap)))
        with contextlib.suppress(OSError, EOFError, hivemind("p2p").P2PDaemonError):  # its daemon is gone
            async with asyncio.timeout(ANSWER_S):
                await self._node.protocol.shutdown()
        self._node.is_alive = False
        for name in ("_read_task", "_write_task"):  # they have failed with their daemon, and nobody asks them why
            task = getattr(self._p2p._client.control, name, None)
            if task is not None:
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
        with contextlib.suppress(OSError, EOFError):
            await self._p2p.shutdown()
        await asyncio.gather(*(self._daemon.connect(each, ANSWER_S) for each in contacts), return_exceptions=True)
        await self._begin(sorted({f"/p2p/{each.rpartition('/p2p/')[2]}" for each in contacts}))
        await self.announce()

    async def _note_contacts(self) -> None:
        """For the day on which the daemon ends."""
        found = [f"{way}/p2p/{info.peer_id.to_base58()}" for info in await self._p2p.list_peers() for way in info.addrs]
        self._contacts = tuple(found[:MAX_RECORDS])

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._daemon.addresses

    async def announce(self) -> None:
        grant = self.membership.grant
        if grant is not None and grant.ends_s <= self.membership.clock():
            return
        own = msgspec.structs.replace(self.own, expires_s=time.time() + TTL_S)
        if own.addresses:
            await self._refresh()
            own = msgspec.structs.replace(own, addresses=self._daemon.addresses)
        self.own = self._held[own.peer] = own
        sealed = seal(self.identity, self.membership, own)
        await self._ask(lambda: self._node.store(self._key, sealed, own.expires_s, subkey=own.peer))
        await self._ask(self._note_contacts)

    async def peers(self) -> list[Record]:
        """What the look-up brings passes `_accept`."""
        if not self._acquainted and self.bootstrap:
            await self._ask(self._meet_bootstrap)
        await self._ask(lambda: self._node.get(self._key, latest=True))
        now = time.time()
        revoked = self.membership.revoked
        self._held = {peer: kept for peer, kept in self._held.items() if kept.expires_s > now and not revoked(peer)}
        return list(self._held.values())

    # ------------------------------------------------------------------------------------------------------- private

    @property
    def _acquainted(self) -> bool:
        return bool(self._node.protocol.routing_table.uid_to_peer_id)

    def _bootstrap_ids(self) -> list[str]:
        """Without the way to them: the daemon knows it by now."""
        return [f"/p2p/{written(parsed_address(address)[0])}" for address in self.bootstrap]

    async def _call_bootstrap(self) -> None:
        """Until one answers: a busy machine may be slow to listen. ValueError when none does, with what each said."""
        for address in self.bootstrap:
            parsed_address(address)
        try:
            return await self._call_once()
        except ValueError as first:
            await asyncio.sleep(JOIN_AGAIN_S)
            try:
                await self._call_once()
            except ValueError:
                raise first from None

    async def _call_once(self) -> None:
        calls = [asyncio.create_task(self._daemon.connect(address, JOIN_S)) for address in self.bootstrap]
        try:
            faults: list[str] = []
            for call in asyncio.as_completed(calls):
                try:
                    await call
                    return
                except OSError as error:
                    faults.append(_short(error))
        finally:
            for each in calls:
                each.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        raise ValueError(
            f"none of the bootstrap peers answers: {', '.join(self.bootstrap)} ({'; '.join(dict.fromkeys(faults))}). "
            "Is the run still going, and are its ports open? A new invite has newer addresses"
        )

    async def _meet_bootstrap(self) -> None:
        """All contacts are gone (a cable was pulled): begin again."""
        await asyncio.gather(
            *(self._daemon.connect(address, ANSWER_S) for address in self.bootstrap), return_exceptions=True
        )
        for address in self.bootstrap:
            await self._node.protocol.call_ping(hivemind("p2p").PeerID(parsed_address(address)[0]))

    async def _refresh(self) -> None:
        try:
            await self._daemon.refresh()
        except OSError as error:
            log.warning("the libp2p daemon does not tell its addresses: %s", error)

    async def _ask(self, call: Callable[[], Any]) -> None:
        try:
            async with asyncio.timeout(LOOK_UP_S):
                await call()
        except (OSError, EOFError, hivemind("p2p").P2PDaemonError) as error:
            log.warning("the distributed directory does not answer: %s", error or type(error).__name__)

    def _accept(self, key: bytes, subkey: bytes, value: bytes, expires_s: float) -> bool:
        """Is this a record that a member of the run made of itself? For every one that is stored here or looked up."""
        if key != hivemind("dht.routing").DHTID.generate(self._key).to_bytes() or len(value) > MAX_SEALED_BYTES + 8:
            return False
        try:
            record = self._check(bytes(value), expires_s)
            peer = msgspec.msgpack.decode(subkey, type=str)
        except (ValueError, msgspec.MsgspecError) as error:
            log.debug("a record is refused: %s", error)
            return False
        now = time.time()
        if peer != record.peer or record.expires_s > now + 10 * TTL_S:
            return False
        if self.membership.revoked(peer):
            return True
        held = self._held.get(peer)
        if held is None and len(self._held) >= MAX_RECORDS:
            return False
        if record.expires_s > now and (held is None or record.expires_s > held.expires_s) and peer != self.own.peer:
            self._held[peer] = record
            self._learn(record)
        return True

    def _checked(self, value: bytes, expires_s: float) -> Record:
        """ValueError says what is wrong. Signed and passed as of the time when it was made."""
        record = opened(msgspec.msgpack.decode(value, type=bytes), self.membership, expires_s - TTL_S)
        if record.expires_s != expires_s:
            raise ValueError(f"{record.peer}: stored until another time than it says")
        return record


def _validator(accept: Callable[[bytes, bytes, bytes, float], bool]) -> Any:
    """hivemind asks it about every record that is stored here or looked up."""

    class Validator(hivemind("dht.crypto").RecordValidatorBase):  # type: ignore[misc]
        def validate(self, record: Any) -> bool:
            return accept(record.key, record.subkey, record.value, record.expiration_time)

    return Validator()


def _short(error: OSError) -> str:
    """The last of libp2p's words says why; before it come those of every layer."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error).strip().splitlines()[-1].rpartition("dial ")[2].strip(" *\t")[:200]
