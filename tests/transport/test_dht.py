"""The distributed directory: several tables on this machine; what is forged is neither kept nor believed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from shoal.transport.budget import Allowance
from shoal.transport.daemon import Daemon, written
from shoal.transport.directory import dht
from shoal.transport.directory.dht import Dht
from shoal.transport.directory.directory import MAX_SEALED_BYTES, TTL_S, PeerRecord, Sealed, seal
from shoal.transport.directory.records import KEY_RECORDS
from shoal.transport.hivemind_parts import hivemind
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Authority, Membership, read_invite

RUN = Authority.new()
INVITE = read_invite(RUN.invite((), time.time() + 3600), time.time())


class Peer:
    """A directory with what it has told of others."""

    def __init__(self, bootstrap: tuple[str, ...] = (), addresses: tuple[str, ...] = ()) -> None:
        self.identity = Identity.new()
        self.membership = INVITE.membership(self.identity)
        self.daemon = Daemon(self.identity)
        self.learnt: list[PeerRecord] = []
        own = PeerRecord(INVITE.run, self.identity.name, "127.0.0.1", 4242, addresses=addresses)
        self.directory = Dht(self.identity, self.membership, own, bootstrap, self.learnt.append, self.daemon)

    @property
    def name(self) -> str:
        return self.identity.name

    async def names(self) -> set[str]:
        return {record.peer for record in await self.directory.peers()}


@asynccontextmanager
async def swarm(count: int) -> Any:
    """All have announced themselves, one after the other, by way of the first."""
    peers: list[Peer] = []
    try:
        for _ in range(count):
            peers.append(Peer(peers[0].directory.addresses if peers else ()))
            await peers[-1].directory.start()
            await peers[-1].directory.announce()
        yield peers
    finally:
        for peer in peers:
            await peer.directory.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def until(names: set[str], peer: Peer) -> None:
    """pytest's own timeout ends it."""
    while not names <= await peer.names():
        await asyncio.sleep(0.05)


def record_of(identity: Identity, **changes: Any) -> PeerRecord:
    record = PeerRecord(INVITE.run, identity.name, "127.0.0.1", 1, expires_s=time.time() + TTL_S)
    return msgspec.structs.replace(record, **changes)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs this may be very busy."""
    for name in ("ANSWER_S", "LOOK_UP_S", "JOIN_S"):
        monkeypatch.setattr(dht, name, 60.0)


def test_peers_find_one_another_and_are_told_of_at_once(patience: None) -> None:
    async def story() -> None:
        async with swarm(4) as peers:
            names = {peer.name for peer in peers}
            for peer in peers:
                await until(names, peer)
                assert {record.peer for record in peer.learnt} == names - {peer.name}
                assert {record.port for record in peer.learnt} == {4242}
                assert len(peer.learnt) == len(names) - 1, "the same record was told of twice"

    run(story)


@pytest.mark.slow
def test_a_newcomer_finds_those_that_live_when_others_were_killed() -> None:
    async def story() -> None:
        async with swarm(5) as peers:
            for victim in peers[1:3]:
                victim.daemon._pause_s = 3600.0  # it is not started again
                victim.daemon._process.stdin.close()  # its shell kills the daemon
            while not all(victim.daemon.ended for victim in peers[1:3]):
                await asyncio.sleep(0.01)
            newcomer = Peer((*peers[1].directory.addresses, *peers[4].directory.addresses))
            await newcomer.directory.start()
            await newcomer.directory.announce()
            await until({peers[0].name, peers[3].name, peers[4].name}, newcomer)
            for peer in (peers[0], peers[3], peers[4]):
                await until({newcomer.name}, peer)
            assert peers[1].name in await peers[1].names(), (
                "a table whose daemon is gone neither raises nor forgets itself"
            )
            await newcomer.directory.close()

    run(story)


def test_a_record_carries_the_libp2p_addresses_when_the_transport_is_reached_by_them(patience: None) -> None:
    async def story() -> None:
        a = Peer(addresses=("/p2p/to-be-filled-in",))
        await a.directory.start()
        await a.directory.announce()
        assert (await a.directory.peers())[0].addresses == a.daemon.addresses
        assert written(a.daemon.peer_id) in a.daemon.addresses[0]
        await a.directory.close()

    run(story)


def test_forged_and_foreign_records_are_neither_kept_nor_believed(patience: None) -> None:
    me, other = Identity.new(), Identity.new()
    mine = INVITE.membership(me)
    elsewhere = read_invite(Authority.new().invite((), time.time() + 60), 0.0)
    guest, guests = Identity(me.key), Identity(me.key)  # the same key with other invites
    abroad = elsewhere.membership(guest)
    foreign = record_of(guest, run=elsewhere.run)
    honest = record_of(me)
    sealed = msgspec.msgpack.decode(seal(me, mine, honest), type=Sealed)
    late = read_invite(RUN.invite((), time.time() - 3600), 0.0).membership(guests)
    INVITE.membership(other)
    forgeries: dict[str, tuple[bytes, float, str]] = {
        "of another peer": (seal(me, mine, record_of(other)), honest.expires_s, other.name),
        "under another name": (seal(me, mine, honest), honest.expires_s, other.name),
        "without a pass": (seal(me, Membership(INVITE.run, b""), honest), honest.expires_s, me.name),
        "with another's pass": (seal(me, INVITE.membership(other), honest), honest.expires_s, me.name),
        "with a pass that had ended": (seal(guests, late, record_of(guests)), honest.expires_s, guests.name),
        "of another run": (seal(guest, abroad, foreign), foreign.expires_s, guest.name),
        "with a changed body": (
            msgspec.msgpack.encode(
                msgspec.structs.replace(sealed, body=msgspec.msgpack.encode(msgspec.structs.replace(honest, port=2)))
            ),
            honest.expires_s,
            me.name,
        ),
        "kept beyond its time": (seal(me, mine, honest), honest.expires_s + 60, me.name),
        "for years": (seal(me, mine, record_of(me, expires_s=time.time() + 1e8)), time.time() + 1e8, me.name),
        "oversized": (bytes(MAX_SEALED_BYTES + 1), honest.expires_s, me.name),
        "nonsense": (b"\xc1", honest.expires_s, me.name),
    }

    async def story() -> None:
        async with swarm(2) as (a, b):
            key = hivemind("dht.routing").DHTID.generate(a.directory._key)
            rogue = await _rogue(a)
            for what, (value, expires_s, name) in forgeries.items():
                assert await _store(rogue, a, (key, name, value, expires_s)) is False, what
            assert (
                await _store(
                    rogue, a, (hivemind("dht.routing").DHTID.generate("other"), me.name, b"x", time.time() + 9)
                )
                is False
            )
            # A table that keeps them all the same and hands them on is not believed.
            for what, (value, expires_s, name) in forgeries.items():
                packed = rogue.protocol.serializer.dumps(value)
                rogue.protocol.storage.store(key, packed, expires_s, subkey=name)
                assert await b.names() == {a.name, b.name}, what
            assert await _store(rogue, a, (key, me.name, seal(me, mine, honest), honest.expires_s)) is True
            await until({me.name}, b)
            await rogue.p2p.shutdown()
            await rogue.daemon.close()

    run(story)


def test_a_record_that_has_expired_is_forgotten(patience: None) -> None:
    me = Identity.new()
    mine = INVITE.membership(me)

    async def story() -> None:
        async with swarm(1) as (a,):
            record = record_of(me, expires_s=time.time() + 1.0)
            value = hivemind("utils").MSGPackSerializer.dumps(seal(me, mine, record))
            subkey = hivemind("utils").MSGPackSerializer.dumps(me.name)
            key = hivemind("dht.routing").DHTID.generate(a.directory._key).to_bytes()
            a.directory._accept(key, subkey, value, record.expires_s)
            while me.name in await a.names():
                await asyncio.sleep(0.05)
            assert time.time() > record.expires_s
            assert a.directory._accept(key, subkey, value, record.expires_s), (
                "a record that has just expired must not spoil the answer that it comes with"
            )
            assert me.name not in await a.names()

    run(story)


def test_a_revoked_peers_record_is_passed_on_by_who_has_not_heard_and_believed_by_nobody_else(patience: None) -> None:
    me = Identity.new()
    mine = INVITE.membership(me)
    word = RUN.pass_list(1, (), (RUN.revoked(me.key_id, 1.0),))

    async def story() -> None:
        async with swarm(2) as (a, b):
            key = hivemind("dht.routing").DHTID.generate(a.directory._key)
            rogue = await _rogue(a)
            record = record_of(me)
            entry = (key, me.name, seal(me, mine, record), record.expires_s)
            assert await _store(rogue, a, entry) is True
            await until({me.name}, a)
            await until({me.name}, b)
            b.membership.take_list(word)
            await b.directory._background.run(forget(b))
            await until({a.name}, b)  # the answer that brings it brings the others too
            assert me.name in a.directory._node.protocol.storage.get(key).value.data
            assert await b.names() == {a.name} and await _store(rogue, b, entry) is False
            a.membership.take_list(word)
            assert await a.names() == {a.name, b.name}, "its pass was checked a moment ago"
            later = record_of(me, expires_s=record.expires_s + 1)
            for again in (entry, (key, me.name, seal(me, mine, later), later.expires_s)):
                assert await _store(rogue, a, again) is False
            assert me.name not in a.directory._node.protocol.storage.get(key).value.data
            await rogue.p2p.shutdown()
            await rogue.daemon.close()

    run(story)


def test_an_unreachable_bootstrap_peer_is_named_with_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "JOIN_AGAIN_S", 0.01)  # nobody begins to listen there meanwhile

    async def story() -> None:
        address = f"/ip4/127.0.0.1/tcp/1/p2p/{written(Daemon(Identity.new()).peer_id)}"
        newcomer = Peer((address,))
        with pytest.raises(ValueError, match=rf"{address} .*refused.*new invite"):
            await newcomer.directory.start()
        await newcomer.directory.close()

    run(story)


@pytest.mark.parametrize("address", ["10.0.0.1:4242", "/ip4/10.0.0.1/tcp/4242", "/ip4/10.0.0.1/tcp/4242/p2p/xyz", ""])
def test_a_bootstrap_address_of_another_kind_is_refused_by_name(address: str) -> None:
    async def story() -> None:
        newcomer = Peer((address,))
        with pytest.raises(ValueError, match="is no libp2p address"):
            await newcomer.directory.start()
        await newcomer.directory.close()

    run(story)


async def _rogue(victim: Peer) -> Any:
    """A table that checks nothing, known to `victim`'s."""
    daemon = Daemon(Identity.new())
    await daemon.start()
    await daemon.connect(victim.daemon.addresses[0], 60)
    p2p = await hivemind("p2p").P2P.replicate(hivemind("utils.multiaddr").Multiaddr(f"/unix{daemon.control}"))
    node = await hivemind("dht.node").DHTNode.create(p2p=p2p, initial_peers=[f"/p2p/{written(victim.daemon.peer_id)}"])
    node.daemon = daemon
    return node


async def _store(rogue: Any, victim: Peer, entry: tuple[Any, str, bytes, float]) -> bool:
    """Did `victim` keep it?"""
    key, name, value, expires_s = entry
    packed = rogue.protocol.serializer.dumps(value)
    peer_id = hivemind("p2p").PeerID(victim.daemon.peer_id)
    answer = await rogue.protocol.call_store(peer_id, [key], [packed], [expires_s], [name])
    assert answer is not None, "no answer"
    return bool(answer[0])


async def forget(peer: Peer) -> None:
    for name in list(peer.directory._records.held):
        peer.directory._records._drop(name)


@pytest.mark.slow
def test_a_peer_whose_daemon_was_killed_is_in_the_table_again() -> None:
    """Also the first, which has nobody to begin with: it remembers whom it was connected to."""

    async def story() -> None:
        async with swarm(3) as peers:
            names = {peer.name for peer in peers}
            for peer in peers:
                await until(names, peer)
                await peer.directory.announce()
            for victim in (peers[0], peers[2]):
                killed = victim.daemon._process.pid
                victim.daemon._process.stdin.close()  # its shell kills the daemon
                while victim.daemon._process.pid == killed or victim.daemon.ended:
                    await asyncio.sleep(0.02)
                await victim.directory._background.run(forget(victim))
                await victim.directory.announce()
                await until(names, victim)
            newcomer = Peer(peers[0].directory.addresses)  # the address that was told before: it is the same
            try:
                await newcomer.directory.start()
                await newcomer.directory.announce()
                await until(names | {newcomer.name}, newcomer)
                for peer in peers:
                    await until({newcomer.name}, peer)
            finally:
                await newcomer.directory.close()

    run(story)


def test_a_call_beyond_what_strangers_have_is_refused_before_it_is_parsed(
    patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    none, few = Allowance(1e9, 1e9), Allowance(per_s=1e-9, at_once=100_000.0)
    monkeypatch.setattr(dht, "STRANGERS", dht.CallBudgets((none, none), (few, few), (none, none)))
    records = [record_of(Identity.new()) for _ in range(100)]
    values = [seal(Identity.new(), Membership(INVITE.run, b"x" * 300), one) for one in records]

    async def story() -> None:
        async with swarm(2) as (a, b):
            key = hivemind("dht.routing").DHTID.generate(a.directory._key)
            rogue = await _rogue(a)
            victim = hivemind("p2p").PeerID(a.daemon.peer_id)
            answers = []
            for _ in range(10):
                packed = [rogue.protocol.serializer.dumps(value) for value in values]
                ends, names = [one.expires_s for one in records], [one.peer for one in records]
                answers.append(await rogue.protocol.call_store(victim, [key] * 100, packed, ends, names))
            assert answers[0] == [False] * 100 and answers[-1] is None
            await until({a.name, b.name}, b)  # members have a budget of their own
            await rogue.p2p.shutdown()
            await rogue.daemon.close()

    run(story)


def test_many_names_of_one_key_are_not_kept_and_spoil_no_look_up(patience: None) -> None:
    me = Identity.new()
    mine = INVITE.membership(me)

    async def story() -> None:
        async with swarm(2) as (a, b):
            key = hivemind("dht.routing").DHTID.generate(a.directory._key)
            rogue = await _rogue(a)
            for number in range(40):  # a stranger has 60 calls
                name = Identity(me.key, f"{number:x}")
                INVITE.membership(name)
                record = record_of(name)
                entry = (key, name.name, seal(name, mine, record), record.expires_s)
                await _store(rogue, a, entry)
                packed = rogue.protocol.serializer.dumps(entry[2])
                rogue.protocol.storage.store(key, packed, entry[3], subkey=entry[1])  # and hands all of them on
            kept = a.directory._node.protocol.storage.get(key).value
            assert len(kept) <= 2 + KEY_RECORDS
            for peer in (a, b):
                names = await peer.names()
                assert {a.name, b.name} <= names and len(names) <= 2 + KEY_RECORDS
            await rogue.p2p.shutdown()
            await rogue.daemon.close()

    run(story)


def test_a_record_that_is_stored_again_and_again_is_kept_once(patience: None) -> None:
    me = Identity.new()
    mine = INVITE.membership(me)
    record = record_of(me)

    async def story() -> None:
        async with swarm(1) as (a,):
            key = hivemind("dht.routing").DHTID.generate(a.directory._key)
            rogue = await _rogue(a)
            entry = (key, me.name, seal(me, mine, record), record.expires_s)
            assert await _store(rogue, a, entry) is True
            for _ in range(20):
                assert await _store(rogue, a, entry) is False
            assert len(a.directory._node.protocol.storage.get(key).value.expiration_heap) <= 3
            await rogue.p2p.shutdown()
            await rogue.daemon.close()

    run(story)
