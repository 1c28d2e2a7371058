"""Records are believed only when signed by the peer they speak of, of this run, admitted and fresh; gossip spreads them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from shoal.transport.budget import Allowance
from shoal.transport.directory import directory
from shoal.transport.directory.directory import MAX_SEALED_BYTES, TTL_S, Gossip, PeerRecord, Sealed, seal, unseal
from shoal.transport.directory.records import KEY_RECORDS
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Authority, Membership, read_invite

LONG_S = 60.0


class Someone:
    """A member of a run."""

    def __init__(self, authority: Authority) -> None:
        self.identity = Identity.new()
        text = authority.invite((), time.time() + 3600)
        self.membership: Membership = read_invite(text, 0.0).membership(self.identity)

    def record(self, **fields: object) -> PeerRecord:
        record = PeerRecord(self.membership.run, self.identity.name, "127.0.0.1", 5, expires_s=time.time() + TTL_S)
        return msgspec.structs.replace(record, **fields)

    def seal(self, **fields: object) -> bytes:
        return seal(self.identity, self.membership, self.record(**fields))


@pytest.fixture
def authority() -> Authority:
    return Authority.new()


@pytest.fixture
def ann(authority: Authority) -> Someone:
    return Someone(authority)


@pytest.fixture
def bob(authority: Authority) -> Someone:
    return Someone(authority)


def test_a_record_comes_back_as_it_was_sealed(ann: Someone, bob: Someone) -> None:
    record = ann.record(addresses=("/ip4/1.2.3.4/tcp/5",))
    assert unseal(seal(ann.identity, ann.membership, record), bob.membership, time.time()) == record


def test_a_record_of_somebody_else_is_refused(ann: Someone, bob: Someone) -> None:
    with pytest.raises(ValueError, match="another peer's key"):
        unseal(ann.seal(peer=bob.identity.name), bob.membership, time.time())


def test_a_record_that_was_altered_is_refused(ann: Someone, bob: Someone) -> None:
    sealed = msgspec.msgpack.decode(ann.seal(), type=Sealed)
    body = msgspec.msgpack.encode(ann.record(port=6))
    forged = msgspec.msgpack.encode(msgspec.structs.replace(sealed, body=body))
    with pytest.raises(ValueError, match="the signature is wrong"):
        unseal(forged, bob.membership, time.time())


def test_a_record_of_a_peer_without_a_pass_is_refused(ann: Someone, bob: Someone) -> None:
    stranger = Identity.new()
    record = ann.record(peer=stranger.name)
    for proof in (b"", ann.membership.proof):
        data = seal(stranger, Membership(ann.membership.run, proof), record)
        with pytest.raises(ValueError, match="pass"):
            unseal(data, bob.membership, time.time())


def test_a_record_of_another_run_is_refused(bob: Someone) -> None:
    with pytest.raises(ValueError, match="another run"):
        unseal(Someone(Authority.new()).seal(), bob.membership, time.time())


@pytest.mark.parametrize("off_s", [-1.0, 100 * TTL_S])
def test_a_record_that_has_expired_or_lasts_too_long_is_refused(ann: Someone, bob: Someone, off_s: float) -> None:
    with pytest.raises(ValueError, match="expired"):
        unseal(ann.seal(expires_s=time.time() + off_s), bob.membership, time.time())


@pytest.mark.parametrize("data", [b"", b"\xc1", b"x" * (MAX_SEALED_BYTES + 1), msgspec.msgpack.encode([1, 2, 3, 4])])
def test_nonsense_is_refused(bob: Someone, data: bytes) -> None:
    with pytest.raises(ValueError, match="record"):
        unseal(data, bob.membership, time.time())


def test_peers_that_know_one_address_come_to_know_everybody(authority: Authority) -> None:
    async def run() -> None:
        learned: dict[str, list[str]] = {}
        directories: list[Gossip] = []
        for _ in range(4):
            one = Someone(authority)
            heard = learned.setdefault(one.identity.name, [])
            bootstrap = directories[0].addresses if directories else ()
            own = one.record()

            def learn(record: PeerRecord, heard: list[str] = heard) -> None:
                heard.append(record.peer)

            directories.append(Gossip(one.identity, one.membership, own, bootstrap, learn))
            await directories[-1].start()
            await directories[-1].announce()
        names = {each.own.peer for each in directories}
        for each in directories:
            assert {record.peer for record in await each.peers()} == names
            assert set(learned[each.own.peer]) == names - {each.own.peer}
            await each.close()

    asyncio.run(asyncio.wait_for(run(), LONG_S))


def test_a_bootstrap_peer_that_does_not_answer_or_talks_nonsense_is_passed_over(
    ann: Someone, authority: Authority
) -> None:
    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff" * 64)
        writer.close()

    async def run() -> None:
        babbler = await asyncio.start_server(babble, "127.0.0.1", 0)
        closed = await asyncio.start_server(babble, "127.0.0.1", 0)
        ports = [server.sockets[0].getsockname()[1] for server in (babbler, closed)]
        closed.close()
        bootstrap = (*(f"127.0.0.1:{port}" for port in ports), "nonsense", "127.0.0.1:none")
        mine = Gossip(ann.identity, ann.membership, ann.record(), bootstrap, lambda _: None)
        await mine.start()
        await mine.announce()
        assert [record.peer for record in await mine.peers()] == [ann.identity.name]
        await mine.close()
        babbler.close()

    asyncio.run(asyncio.wait_for(run(), LONG_S))


def test_whoever_is_revoked_is_no_longer_listed_nor_passed_on(ann: Someone, bob: Someone, authority: Authority) -> None:
    async def run() -> None:
        carl = Someone(authority)
        directories: list[Gossip] = []
        for one in (ann, bob, carl):
            bootstrap = directories[0].addresses if directories else ()
            directories.append(Gossip(one.identity, one.membership, one.record(), bootstrap, lambda _: None))
            await directories[-1].start()
            await directories[-1].announce()
        first, second, third = directories
        assert bob.identity.name in {record.peer for record in await first.peers()}
        for one in (ann, carl):
            one.membership.take_list(authority.pass_list(1, (), (authority.revoked(bob.identity.key_id, 1.0),)))
        await second.announce()  # it goes on telling of itself
        for one_of_them in (first, third):
            assert {record.peer for record in await one_of_them.peers()} == {ann.identity.name, carl.identity.name}
        for each in directories:
            await each.close()

    asyncio.run(asyncio.wait_for(run(), LONG_S))


# -------------------------------------------------------------------------------------------------------- who may call


async def called(directory: Gossip, records: list[bytes]) -> bytes:
    """What a caller is told; b'' when it is hung up on."""
    host, _, port = directory.addresses[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        words = msgspec.msgpack.encode(records)
        writer.write(len(words).to_bytes(4, "big") + words)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def renamed(peer: str, incarnation: str) -> str:
    fields = peer.split(".")
    return ".".join((fields[0], incarnation, *fields[2:]))


def forgeries(run: str, proof: bytes, count: int) -> list[bytes]:
    forged = [Identity.new() for _ in range(count)]
    return [
        seal(one, Membership(run, proof), PeerRecord(run, one.name, "127.0.0.1", 5, expires_s=time.time() + TTL_S))
        for one in forged
    ]


@asynccontextmanager
async def serving(one: Someone, learnt: list[PeerRecord] | None = None) -> AsyncIterator[Gossip]:
    directory = Gossip(one.identity, one.membership, one.record(), (), (learnt if learnt is not None else []).append)
    await directory.start()
    try:
        yield directory
    finally:
        await directory.close()


def test_who_brings_no_good_record_is_told_nothing_and_costs_a_budget_of_signatures(
    ann: Someone, bob: Someone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "RECORDS_FROM_ONE", Allowance(per_s=1e-9, at_once=30.0))
    forged = forgeries(ann.membership.run, ann.membership.proof, 200)

    async def run() -> None:
        async with serving(ann) as there:
            assert await called(there, []) == b""
            for at in range(0, len(forged), 4):
                assert await called(there, forged[at : at + 4]) == b""
            assert there._records.verified <= 30
            assert await called(there, forged) == b"", "more than a caller may bring"

    asyncio.run(asyncio.wait_for(run(), LONG_S))


def test_a_revoked_caller_is_told_of_one_peer_that_will_tell_it_why(
    ann: Someone, bob: Someone, authority: Authority
) -> None:
    async def run() -> None:
        learnt: list[PeerRecord] = []
        carl, stranger = Someone(authority), Someone(Authority.new())
        async with serving(ann, learnt) as there:
            assert await called(there, [carl.seal()])
            ann.membership.take_list(authority.pass_list(1, (), (authority.revoked(bob.identity.key_id, 1.0),)))
            answer = await called(there, [bob.seal()])
            (data,) = msgspec.msgpack.decode(answer[4:], type=list[bytes])
            assert unseal(data, bob.membership, time.time()).peer == ann.identity.name
            forged = seal(stranger.identity, ann.membership, bob.record())
            assert await called(there, [forged]) == b"", "who only says to be that peer"
            assert [record.peer for record in learnt] == [carl.identity.name]

    asyncio.run(asyncio.wait_for(run(), LONG_S))


def test_a_member_is_told_everything_and_comes_to_be_known(ann: Someone, bob: Someone) -> None:
    async def run() -> None:
        learnt: list[PeerRecord] = []
        async with serving(ann, learnt) as there:
            answer = await called(there, [bob.seal()])
            records = msgspec.msgpack.decode(answer[4:], type=list[bytes])
            names = {unseal(data, ann.membership, time.time()).peer for data in records}
            assert names == {ann.identity.name, bob.identity.name}
            assert [record.peer for record in learnt] == [bob.identity.name]

    asyncio.run(asyncio.wait_for(run(), LONG_S))


def test_callers_that_never_speak_lock_nobody_out(ann: Someone, bob: Someone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "EXCHANGE_S", 600.0)

    async def run() -> None:
        async with serving(ann) as there:
            host, _, port = there.addresses[0].rpartition(":")
            silent = [socket.create_connection((host, int(port)), 60) for _ in range(directory.CALLERS + 50)]
            assert await called(there, [bob.seal()])
            assert len(there._callers.unverified) <= directory.CALLERS
            for sock in silent:
                sock.close()

    asyncio.run(asyncio.wait_for(run(), LONG_S))


@pytest.mark.slow
def test_forty_peers_behind_one_address_find_one_another_beside_silent_callers_from_there(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "EXCHANGE_S", 600.0)

    async def run() -> None:
        directories: list[Gossip] = []
        silent: list[socket.socket] = []
        for _ in range(40):
            one = Someone(authority)
            bootstrap = directories[0].addresses if directories else ()
            directories.append(Gossip(one.identity, one.membership, one.record(), bootstrap, lambda _: None))
            await directories[-1].start()
            if len(directories) == 1:
                host, _, port = directories[0].addresses[0].rpartition(":")
                silent = [socket.create_connection((host, int(port)), 60) for _ in range(directory.CALLERS)]
        await asyncio.gather(*(each.announce() for each in directories))
        for each in directories:
            while len(await each.peers()) < len(directories):
                pass
        for each in directories:
            await each.close()
        for sock in silent:
            sock.close()

    asyncio.run(asyncio.wait_for(run(), LONG_S))


def test_nine_thousand_names_of_one_key_leave_look_ups_as_they_were(ann: Someone, bob: Someone) -> None:
    async def run() -> None:
        async with serving(ann) as there:
            forged = [
                seal(bob.identity, bob.membership, bob.record(peer=renamed(bob.identity.name, f"{number:x}")))
                for number in range(100)
            ]
            for at in range(0, len(forged), 4):
                await called(there, forged[at : at + 4])
            assert len(await there.peers()) <= 1 + KEY_RECORDS

    asyncio.run(asyncio.wait_for(run(), LONG_S))


def test_the_nodes_own_loop_does_nothing_of_it(ann: Someone) -> None:
    """Whatever strangers bring is read, parsed and verified in another thread."""
    forged = forgeries(ann.membership.run, ann.membership.proof, 40)
    host_of: dict[str, int] = {}

    async def run() -> None:
        async with serving(ann) as there:
            plain = there._records.add

            def add(*args: object, **more: object) -> PeerRecord:
                host_of["thread"] = threading.get_ident()
                return plain(*args, **more)  # type: ignore[arg-type]

            there._records.add = add  # type: ignore[method-assign,assignment]
            for at in range(0, len(forged), 4):
                await called(there, forged[at : at + 4])
            assert host_of["thread"] != threading.get_ident()

    asyncio.run(asyncio.wait_for(run(), LONG_S))


def test_who_has_not_announced_itself_for_long_is_told_all_the_same(ann: Someone, bob: Someone) -> None:
    """A visitor looks for peers for minutes; a machine was asleep."""

    async def run() -> None:
        async with serving(ann) as there:
            mine = Gossip(bob.identity, bob.membership, bob.record(), there.addresses, lambda _: None)
            await mine.start()
            mine.own = msgspec.structs.replace(mine.own, expires_s=time.time() - 1)
            mine._records.own(mine.own, mine._sealed)
            assert {record.peer for record in await mine.peers()} == {ann.identity.name, bob.identity.name}
            await mine.close()

    asyncio.run(asyncio.wait_for(run(), LONG_S))


def test_closing_leaves_no_thread(ann: Someone) -> None:
    async def run() -> None:
        before = set(threading.enumerate())
        async with serving(ann) as there:
            await there.announce()
        assert set(threading.enumerate()) <= before
        await there.close()  # twice does no harm

    asyncio.run(asyncio.wait_for(run(), LONG_S))
