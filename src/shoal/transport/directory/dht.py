"""The distributed directory: signed records in a Kademlia table that the peers of the run keep together.

It implements the contract of directory.py with hivemind's DHT in this process and this peer's libp2p daemon (daemon.py), which
the transport may share. All records of a run lie under one key of the table, each under its peer's name as subkey, on the twenty
peers nearest to that key. A peer that stores or forwards a record cannot forge one: every peer checks each record that it is asked
to store and each that it receives (signature, pass, name, expiry, size), and rejects what fails.

hivemind discards all records of an answer when one is rejected. Here only the rejected ones are left out, since a budget limits how
many are verified (records.py). hivemind's part runs in a background loop (background_loop.py), as any libp2p peer can call it; the
number and size of calls are bounded before a byte is parsed. Peers that do not yet know of a revocation still forward the record of
a revoked peer; peers that know of it reject the record. A peer whose own pass has expired announces nothing until it is renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from shoal.core.messages import Peer
from shoal.escaping import UNDECODABLE
from shoal.transport.budget import Allowance, Budgets
from shoal.transport.daemon import Daemon, multiaddr, parsed_address, public_key, written
from shoal.transport.directory.background_loop import BackgroundLoop
from shoal.transport.directory.records import (
    MAX_ADDRESSES,
    MAX_RECORDS,
    MAX_SEALED_BYTES,
    TTL_S,
    PeerRecord,
    Records,
    seal,
)
from shoal.transport.hivemind_parts import hivemind
from shoal.transport.identity.identity import Identity, key_id
from shoal.transport.identity.invite import Membership

log = logging.getLogger(__name__)

REPLICAS = 20  # peers that keep the records: with 16 of them none was lost when 5 were killed at once
ANSWER_S = 3.0  # from one peer of the table
LOOK_UP_S = 10.0  # a whole look-up or announcement
JOIN_S = 10.0  # for bootstrap peers to answer
JOIN_AGAIN_S = 6.0  # libp2p calls nobody again within 5 s of a failure


class CallBudgets(msgspec.Struct, frozen=True):
    """What callers have of this peer: calls, their bytes, and verifications of signatures, for each and for all."""

    calls: tuple[Allowance, Allowance]
    nbytes: tuple[Allowance, Allowance]
    verified: tuple[Allowance, Allowance]


# Peers with a record here, and peers that were asked. 400 peers that look for others ask twice a second; at first all records are new,
# three signatures each.
MEMBERS = CallBudgets(
    (Allowance(50.0, 400.0), Allowance(400.0, 4000.0)),
    (Allowance(256 << 10, 4 << 20), Allowance(2 << 20, 16 << 20)),
    (Allowance(200.0, 3.0 * MAX_RECORDS), Allowance(500.0, 6.0 * MAX_RECORDS)),
)
# All others. A libp2p peer id costs no more than a handshake. A newcomer calls a few times and sends its own record; 400 may start at once.
STRANGERS = CallBudgets(
    (Allowance(5.0, 60.0), Allowance(100.0, 2500.0)),
    (Allowance(16 << 10, 128 << 10), Allowance(512 << 10, 4 << 20)),
    (Allowance(1.0, 12.0), Allowance(150.0, 1500.0)),
)


class Spent:
    """What callers have used of CallBudgets."""

    def __init__(self, budgets: CallBudgets) -> None:
        self.calls, self.nbytes, self.verified = (
            Budgets(*pair) for pair in (budgets.calls, budgets.nbytes, budgets.verified)
        )


# The sender of the records being checked, and its budgets; None: a peer that was asked for them.
_source: contextvars.ContextVar[tuple[str, Spent] | None] = contextvars.ContextVar("source", default=None)


class Dht:
    """`own` is this peer's record; its expiry is filled in here, and its libp2p addresses when it carries any."""

    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        own: PeerRecord,
        bootstrap: tuple[str, ...],
        learn: Callable[[PeerRecord], None],
        daemon: Daemon,
    ) -> None:
        self.identity, self.membership, self.own = identity, membership, own
        self.bootstrap, self._daemon = bootstrap, daemon
        self._key = f"shoal/{membership.run}"
        self._background = BackgroundLoop("shoal directory")
        self._records = Records(
            membership, lambda record: self._background.call_in_owner(lambda: learn(record)), self._remove
        )
        self._members, self._strangers = Spent(MEMBERS), Spent(STRANGERS)
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
        self._background.start()
        await self._background.run(self._begin(self._bootstrap_ids()))

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
        self._guard()

    async def close(self) -> None:
        if not self._started:
            return
        self._started = False
        if self._p2p is not None:
            await self._background.run(self._shut())
        self._background.close()
        await self._daemon.close()

    async def _again(self) -> None:
        """Another daemon runs. hivemind's objects belong to the one before, so the table is entered anew, by way of those that were in
        it; what is known of others stays."""
        if not self._started or self._p2p is None:
            return
        contacts = tuple(dict.fromkeys((*self._contacts, *self.bootstrap)))
        await self._background.run(self._give_up())
        await asyncio.gather(*(self._daemon.connect(each, ANSWER_S) for each in contacts), return_exceptions=True)
        await self._background.run(self._begin(sorted({f"/p2p/{each.rpartition('/p2p/')[2]}" for each in contacts})))
        await self.announce()

    async def _shut(self) -> None:
        if self._node is not None and not self._daemon.ended:
            with contextlib.suppress(OSError, hivemind("p2p").P2PDaemonError):  # it ends just now
                async with asyncio.timeout(ANSWER_S):
                    await self._node.shutdown()
        await self._p2p.shutdown()

    async def _give_up(self) -> None:
        """Release what belongs to a daemon that has ended."""
        if self._node is not None:
            with contextlib.suppress(OSError, EOFError, hivemind("p2p").P2PDaemonError):
                async with asyncio.timeout(ANSWER_S):
                    await self._node.protocol.shutdown()
            self._node.is_alive = False
        for name in ("_read_task", "_write_task"):  # they have failed with their daemon, and nobody asks them why
            task = getattr(self._p2p._client.control, name, None)
            if task is not None:
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
        with contextlib.suppress(OSError, EOFError):
            await self._p2p.shutdown()

    async def _note_contacts(self) -> None:
        """For the day on which the daemon ends."""
        routes = [
            f"{way}/p2p/{info.peer_id.to_base58()}" for info in await self._p2p.list_peers() for way in info.addrs
        ]
        self._contacts = tuple(routes[:MAX_RECORDS])

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._daemon.addresses

    async def announce(self) -> None:
        grant = self.membership.grant
        if grant is not None and grant.ends_s <= self.membership.clock():
            return
        if self.own.multiaddrs:
            await self._refresh()
        own = msgspec.structs.replace(self.own, expires_s=time.time() + TTL_S)
        if own.multiaddrs:
            others = (*own.hosts[1:], *own.relays, *self._daemon.addresses)
            own = msgspec.structs.replace(own, addresses=others[:MAX_ADDRESSES])
        self.own = own
        await self._background.run(self._store(own, seal(self.identity, self.membership, own)))

    async def peers(self) -> list[PeerRecord]:
        """What the look-up returns passes `_accept`."""
        if self.bootstrap and not await self._background.run(self._is_acquainted()):
            await asyncio.gather(
                *(self._daemon.connect(address, ANSWER_S) for address in self.bootstrap), return_exceptions=True
            )
            await self._background.run(self._ask(self._meet_bootstrap))
        return await self._background.run(self._look_up())

    # ---------------------------------------------------------------------------------------------- in the thread aside

    async def _store(self, own: PeerRecord, sealed: bytes) -> None:
        self._records.own(own, sealed)
        await self._ask(lambda: self._node.store(self._key, sealed, own.expires_s, subkey=own.peer))
        await self._ask(self._note_contacts)

    async def _look_up(self) -> list[PeerRecord]:
        await self._ask(lambda: self._node.get(self._key, latest=True))
        return self._records.fresh(time.time())

    # ------------------------------------------------------------------------------------------------------- private

    async def _is_acquainted(self) -> bool:
        return bool(self._node.protocol.routing_table.uid_to_peer_id)

    def _bootstrap_ids(self) -> list[str]:
        """Without their addresses: the daemon knows those already."""
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
        """All contacts are lost (a cable was pulled): join the table again."""
        for address in self.bootstrap:
            await self._node.protocol.call_ping(hivemind("p2p").PeerID(parsed_address(address)[0]))

    async def _refresh(self) -> None:
        try:
            await self._daemon.refresh()
        except OSError as error:
            log.warning("the libp2p daemon does not state its addresses: %s", error)

    async def _ask(self, call: Callable[[], Any]) -> None:
        try:
            async with asyncio.timeout(LOOK_UP_S):
                await call()
        except (OSError, EOFError, hivemind("p2p").P2PDaemonError) as error:
            log.warning("the distributed directory does not answer: %s", error or type(error).__name__)

    def _guard(self) -> None:
        """Calls of others pass `_guarded` before hivemind parses them, and what is refused of an answer does not spoil the rest."""
        calls = self._p2p._client.control.unary_handlers
        for name, answer in list(calls.items()):
            calls[name] = self._guarded(answer)
        self._node.protocol._validate_dictionary = self._prune

    def _guarded(self, answer: Callable[[bytes, Any], Awaitable[bytes]]) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def guarded(request: bytes, remote_id: Any) -> bytes:
            now, (caller, spent) = time.monotonic(), self._caller(remote_id.to_bytes())
            if not spent.calls.take(caller, now) or not spent.nbytes.take(caller, now, len(request)):
                raise ConnectionError("too many calls")
            _source.set((caller, spent))
            return await answer(request, remote_id)

        return guarded

    def _caller(self, peer_id: bytes) -> tuple[str, Spent]:
        try:
            key = key_id(public_key(peer_id))
        except ValueError:  # no key of ours: all of those are one stranger
            return "", self._strangers
        return key, self._members if self._records.holds(key) else self._strangers

    def _prune(self, key: bytes, dictionary: Any) -> bool:
        """Instead of hivemind's own check, which refuses all for one."""
        with dictionary.freeze():
            wrong = [
                subkey
                for subkey, (value, expires_s) in dictionary.items()
                if not self._accept(key, self._node.protocol.serializer.dumps(subkey), value, expires_s)
            ]
        for subkey in wrong:
            del dictionary[subkey]
        return True

    def _remove(self, peer: Peer) -> None:
        """Its record has made room for another's."""
        if self._node is None:
            return
        stored = self._node.protocol.storage.get(hivemind("dht.routing").DHTID.generate(self._key))
        if stored is not None and not isinstance(stored.value, bytes):
            del stored.value[peer]

    def _accept(self, key: bytes, subkey: bytes, value: bytes, expires_s: float) -> bool:
        """Is this a record that a member of the run made of itself? For every one that is stored here or looked up."""
        if key != hivemind("dht.routing").DHTID.generate(self._key).to_bytes() or len(value) > MAX_SEALED_BYTES + 8:
            return False
        try:
            data = msgspec.msgpack.decode(value, type=bytes)
            peer = msgspec.msgpack.decode(subkey, type=str)
            caller, spent = _source.get() or ("asked", self._members)
            self._records.add(data, caller, time.time(), (peer, expires_s), spent.verified)
        except (ValueError, *UNDECODABLE) as error:
            log.debug("a record is refused: %s", error)
            return False
        return not self._kept(peer, expires_s)

    def _kept(self, peer: Peer, expires_s: float) -> bool:
        """A repeated store: hivemind's table remembers each one until the record expires."""
        if _source.get() is None:
            return False
        stored = self._node.protocol.storage.get(hivemind("dht.routing").DHTID.generate(self._key))
        if stored is None or isinstance(stored.value, bytes):
            return False
        one = stored.value.get(peer)
        return one is not None and one.expiration_time >= expires_s


def _validator(accept: Callable[[bytes, bytes, bytes, float], bool]) -> Any:
    """hivemind asks it about every record that is stored here or looked up."""

    class Validator(hivemind("dht.crypto").RecordValidatorBase):  # type: ignore[misc]  # hivemind has no annotations
        def validate(self, record: Any) -> bool:
            return accept(record.key, record.subkey, record.value, record.expiration_time)

    return Validator()


def _short(error: OSError) -> str:
    """libp2p's last words are the reason; before them stand those of every layer."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error).strip().splitlines()[-1].rpartition("dial ")[2].strip(" *\t")[:200]
