"""Records are believed only when signed by the peer they speak of, of this run, admitted and fresh; gossip spreads them."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from shoal.transport.directory import MAX_SEALED_BYTES, TTL_S, Gossip, Record, Sealed, seal, unseal
from shoal.transport.identity import Identity
from shoal.transport.invite import Authority, Membership, read_invite

LONG_S = 60.0


class Someone:
    """A member of a run."""

    def __init__(self, authority: Authority) -> None:
        self.identity = Identity.new()
        text = authority.invite((), time.time() + 3600)
        self.membership: Membership = read_invite(text, 0.0).membership(self.identity)

    def record(self, **fields: object) -> Record:
        record = Record(self.membership.run, self.identity.name, "127.0.0.1", 5, expires_s=time.time() + TTL_S)
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

            def learn(record: Record, heard: list[str] = heard) -> None:
                heard.append(record.peer)

            directories.append(Gossip(one.identity, one.membership, own, bootstrap, learn))
            await directories[-1].start()
            await directories[-1].announce()
        names = {directory.own.peer for directory in directories}
        for directory in directories:
            assert {record.peer for record in await directory.peers()} == names
            assert set(learned[directory.own.peer]) == names - {directory.own.peer}
            await directory.close()

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
        directory = Gossip(ann.identity, ann.membership, ann.record(), bootstrap, lambda _: None)
        await directory.start()
        await directory.announce()
        assert [record.peer for record in await directory.peers()] == [ann.identity.name]
        await directory.close()
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
        for directory in (first, third):
            assert {record.peer for record in await directory.peers()} == {ann.identity.name, carl.identity.name}
        for directory in directories:
            await directory.close()

    asyncio.run(asyncio.wait_for(run(), LONG_S))
