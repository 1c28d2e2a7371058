"""What every network promises, over every network we have (transports.py)."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
import tracemalloc
from typing import Any

import msgspec
import pytest
from tests.contract.transports import NETS, introduce, lost, run, started, take

from shoal.core.messages import BoundaryTensor, Cancelled, Chunk, Forward, Lead, ReduceChunk
from shoal.transport.base import MAX_CONTROL_BYTES, Blob, Incoming, Limits
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Authority, read_invite
from shoal.transport.streams import handshake, presence, receive_queue
from shoal.transport.wire import BlobHead, Head, encode

MIB = 1 << 20


DAEMONS = ("libp2p", "auto")  # every test starts some


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name in DAEMONS else name for name in NETS])
def net(request: pytest.FixtureRequest) -> Any:
    return NETS[request.param]()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs this may be very busy."""
    monkeypatch.setattr(handshake, "CONNECT_S", 60.0)


@pytest.fixture
def secure(net: Any) -> Any:
    if not net.secure:
        pytest.skip("nobody is checked in this network")
    return net


def control(index: int) -> Cancelled:
    return Cancelled(0, 1, index, 0, 0)


def bulk(index: int, data: bytes) -> tuple[BoundaryTensor, tuple[Blob, ...]]:
    return BoundaryTensor(0, 1, index, 1, False), (Blob("uint8", (len(data),), data),)


def heard(item: Incoming) -> tuple[str, object]:
    return item.peer, item.message


def raw(head: bytes) -> bytes:
    return len(head).to_bytes(4, "big") + head


def head_of(nbytes: int, shape: tuple[int, ...], dtype: str = "uint8", codec: str = "raw") -> bytes:
    return raw(
        msgspec.msgpack.encode(Head(BoundaryTensor(0, 1, 2, 1, False), (BlobHead(dtype, shape, codec, nbytes),)))
    )


def test_messages_arrive_once_and_in_order(net: Any) -> None:
    async def story() -> None:
        async with started(net.make(Identity.new()), net.make(Identity.new())) as (a, b):
            for index in range(300):
                a.send(b.name, control(index))
                if index % 10 == 0:
                    a.send(b.name, *bulk(index, bytes([index // 10]) * 1000))
            a.send(b.name, *bulk(999, b"end"))
            a.send(b.name, control(999))
            got = [await take(b, a) for _ in range(332)]
            assert all(isinstance(item, Incoming) and item.peer == a.name for item in got)
            assert [i.message.index for i in got if not i.blobs] == [*range(300), 999]
            assert [i.message.index for i in got if i.blobs] == [*range(0, 300, 10), 999]
            b.send(a.name, control(7))
            assert (await take(a, b)).message == control(7)

    run(story)


def test_large_blobs_arrive_as_they_were_sent(net: Any) -> None:
    async def story() -> None:
        async with started(net.make(Identity.new()), net.make(Identity.new())) as (a, b):
            x, grad = os.urandom(8 * MIB), os.urandom(8 * MIB)
            blobs = (
                Blob("float32", (2, MIB), x),
                Blob("bfloat16", (4, MIB), memoryview(grad)),
                Blob("int64", (0, 3), b""),
                Blob("float32", (), b"abcd"),
            )
            a.send(b.name, BoundaryTensor(0, 1, 2, 1, False), blobs)
            got = (await take(b, a)).blobs
            assert [(blob.dtype, blob.shape, blob.codec) for blob in got] == [(s.dtype, s.shape, "raw") for s in blobs]
            assert [hashlib.sha256(blob.data).digest() for blob in got] == [
                hashlib.sha256(blob.data).digest() for blob in blobs
            ]

    run(story)


def test_control_overtakes_bulk(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        receive_queue, "BULK_LIMIT_BYTES", MIB
    )  # so that bulk cannot all be there before the reader begins

    async def story() -> None:
        async with started(net.make(Identity.new()), net.make(Identity.new())) as (a, b):
            a.send(b.name, control(0))
            a.send(b.name, *bulk(0, b"first"))  # both connections stand
            assert {type((await take(b, a)).message) for _ in range(2)} == {Cancelled, BoundaryTensor}
            data = bytes(2 * MIB)
            for index in range(32):
                a.send(b.name, *bulk(index, data))
            a.send(b.name, control(5))
            seen = [await take(b, a)]
            while not isinstance(seen[-1].message, Cancelled):
                seen.append(await take(b, a))
            assert len(seen) <= 32, "the control message came after all of the bulk"

    run(story)


def test_bulk_of_a_higher_rank_overtakes_and_ranks_keep_their_order(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader takes nothing while all is sent: what is still with the sender then comes by rank, each in order."""
    if "memory" in type(getattr(net.make(Identity.new()), "_inner", net.make(Identity.new()))).__name__.lower():
        pytest.skip("nothing waits in this network: it drops where it cannot push back")
    monkeypatch.setattr(receive_queue, "BULK_LIMIT_BYTES", MIB)

    async def story() -> None:
        async with started(net.make(Identity.new()), net.make(Identity.new())) as (a, b):
            a.send(b.name, *bulk(0, b"first"))
            await take(b)  # the connection stands
            data = bytes(3 * MIB)
            rest = (Blob("uint8", (len(data),), data),)
            for index in range(16):
                a.send(b.name, Chunk(0, 1, 0, index), rest)
            for index in range(4):
                a.send(b.name, ReduceChunk(0, 1, 0, index), (Blob("float32", (1,), b"abcd"),))
            for index in range(4):
                a.send(b.name, Forward(0, 1, index, 0, 1, 1), (Blob("float32", (1,), b"abcd"),))
                a.send(b.name, BoundaryTensor(0, 1, index, 0, True), (Blob("float32", (1,), b"abcd"),))
            messages = [item.message for item in [await take(b) for _ in range(28)] if isinstance(item, Incoming)]
            kinds = [type(message).__name__ for message in messages]
            for kind in (Chunk, ReduceChunk, Forward, BoundaryTensor):
                mine = [message for message in messages if isinstance(message, kind)]
                numbers = [getattr(m, "chunk", getattr(m, "index", 0)) for m in mine]
                assert numbers == sorted(numbers), kind
            last = len(kinds) - 1 - kinds[::-1].index("ReduceChunk")
            assert kinds[last:].count("Chunk") >= 4, "what is small and of a higher rank came after the bulk"
            assert max(kinds.index("Forward"), kinds.index("BoundaryTensor")) < last

    run(story)


def test_what_a_message_takes_on_the_line_is_told_at_both_ends(net: Any) -> None:
    async def story() -> None:
        async with started(net.make(Identity.new()), net.make(Identity.new())) as (a, b):
            for message, blobs in ((control(1), ()), bulk(1, bytes(700_000))):
                sent = a.send(b.name, message, blobs)
                got = await take(b)
                assert isinstance(got, Incoming)
                assert got.nbytes == sent == encode(message, blobs, Limits()).nbytes

    run(story)


def test_a_dead_peer_is_lost_and_sending_to_it_never_raises(net: Any) -> None:
    async def story() -> None:
        b = net.make(Identity.new())
        async with started(net.make(Identity.new())) as (a,):
            await b.start()
            introduce(a, b)
            a.send(b.name, control(1))
            await take(b, a)
            await b.close()
            assert await lost(a, b.name)
            for index in range(3):
                a.send(b.name, control(index))
                assert await lost(a, b.name)
                a.send(b.name, *bulk(index, b"x"))
                assert await lost(a, b.name)

    run(story)


def test_a_peer_nobody_knows_is_lost(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "LOOK_UP_S", 0.2)

    async def story() -> None:
        async with started(net.make(Identity.new())) as (a,):
            stranger = Identity.new().name
            a.send(stranger, control(1))
            assert await lost(a, stranger)

    run(story)


def test_a_peer_talks_to_itself(net: Any) -> None:
    async def story() -> None:
        async with started(net.make(Identity.new())) as (a,):
            a.send(a.name, control(3))
            assert heard(await take(a)) == (a.name, control(3))

    run(story)


def test_forgetting_hangs_up_and_the_peer_may_come_again(net: Any) -> None:
    async def story() -> None:
        async with started(net.make(Identity.new()), net.make(Identity.new())) as (a, b):
            b.send(a.name, control(1))
            await take(a, b)
            a.forget(b.name)
            assert await lost(b, a.name)
            a.forget(b.name)  # twice does no harm
            introduce(a, b)
            a.send(b.name, control(2))
            assert (await take(b, a)).message == control(2)
            b.send(a.name, control(3))
            assert (await take(a, b)).message == control(3)

    run(story)


def test_a_restarted_peer_is_another_peer(net: Any) -> None:
    async def story() -> None:
        key = Identity.new()
        before, after = Identity(key.key, "1"), Identity(key.key, "2")
        b = net.make(before)
        async with started(net.make(Identity.new())) as (a,):
            await b.start()
            introduce(a, b)
            a.send(b.name, control(1))
            await take(b, a)
            port = net.port(b)
            await b.close()
            assert await lost(a, before.name)
            async with started(net.make(after, port=port)) as (b,):
                b.learn(a.name, a.address)
                b.send(a.name, control(2))
                assert heard(await take(a, b)) == (after.name, control(2))
                a.send(before.name, control(3))  # its address leads to the new one now
                assert await lost(a, before.name)
                a.learn(after.name, b.address)
                a.send(after.name, control(4))
                assert heard(await take(b, a)) == (a.name, control(4))

    run(story)


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (head_of(2**31, (2**31,)), "bulk"),
        ((2**32 - 1).to_bytes(4, "big"), "control"),
        ((MAX_CONTROL_BYTES + 1).to_bytes(4, "big"), "bulk"),
    ],
    ids=["blob", "head", "head-by-one"],
)
def test_oversized_data_is_refused_before_memory_is_taken_and_its_sender_named(
    net: Any, what: bytes, kind: str
) -> None:
    async def story() -> None:
        rogue = Identity.new()
        async with started(net.make(Identity.new(), Limits(blob_bytes=MIB))) as (a,):
            tracemalloc.start()
            try:
                await net.inject(rogue, a, what, kind)
                assert "bytes" in (await lost(a, rogue.name)).reason
                assert tracemalloc.get_traced_memory()[1] < 64 * MIB
            finally:
                tracemalloc.stop()

    run(story)


@pytest.mark.parametrize(
    "what",
    [
        raw(b"\xc1\xc1\xc1"),
        raw(b"\x93\x01\x02\x03"),
        raw(b""),
        raw(msgspec.msgpack.encode([["Elect", 1, 2], []])),
        raw(msgspec.msgpack.encode([["Lead", -1, 2, 3], []])),
        raw(msgspec.msgpack.encode([["Lead", 1, 2, 3], [["uint8", [1], "raw", 1]]])) + b"x",
        head_of(8, (3,), "float32") + bytes(8),
        head_of(4, (4,), "complex64") + bytes(4),
        head_of(4, (4,), codec="zip") + bytes(4),
        head_of(1, (1,) * 9) + bytes(1),
        raw(msgspec.msgpack.encode([["BoundaryTensor", 0, 1, 2, 1, False], [["uint8", [1], "raw", 1]] * 5])) + bytes(5),
    ],
)
def test_malformed_data_is_refused_its_sender_named_and_others_go_on(net: Any, what: bytes) -> None:
    async def story() -> None:
        rogue = Identity.new()
        async with started(net.make(Identity.new()), net.make(Identity.new())) as (a, b):
            await net.inject(rogue, a, what, "bulk")
            assert (await lost(a, rogue.name)).reason
            b.send(a.name, control(1))
            assert heard(await take(a, b)) == (b.name, control(1))

    run(story)


def test_what_others_would_refuse_is_not_sent(net: Any) -> None:
    async def story() -> None:
        async with started(net.make(Identity.new(), Limits(blob_bytes=MIB)), net.make(Identity.new())) as (a, b):
            blob = Blob("uint8", (4,), b"abcd")
            for message, blobs in (
                (Lead(1, 2, 3), (blob,)),
                (BoundaryTensor(0, 1, 2, 1, False), (Blob("uint8", (5,), b"abcd"),)),
                (BoundaryTensor(0, 1, 2, 1, False), (blob,) * 5),
                bulk(0, bytes(MIB + 1)),
            ):
                with pytest.raises(ValueError):
                    a.send(b.name, message, blobs)

    run(story)


def test_a_slow_reader_gets_everything_in_the_end(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with started(net.make(Identity.new()), net.make(Identity.new())) as (a, b):
            if "memory" not in type(getattr(b, "_inner", b)).__name__.lower():  # which drops where it cannot push back
                monkeypatch.setattr(receive_queue, "BULK_LIMIT_BYTES", MIB)
            data = bytes(MIB)
            for index in range(40):
                a.send(b.name, *bulk(index, data))
            for index in range(20):  # control passes meanwhile
                a.send(b.name, control(index))
                b.send(a.name, control(index))
                assert (await take(a, b)).message == control(index)
            got = [await take(b, a) for _ in range(60)]
            assert [item.message.index for item in got if item.blobs] == [*range(40)]

    run(story)


def test_closing_leaves_no_task_and_no_thread(net: Any) -> None:
    async def story() -> None:
        before = set(threading.enumerate())
        async with started(net.make(Identity.new()), net.make(Identity.new())) as (a, b):
            a.send(b.name, control(1))
            a.send(b.name, *bulk(1, bytes(MIB)))
            await take(b, a)
            await take(b, a)
        await a.close()  # twice does no harm
        a.send(b.name, control(2))  # and neither does this
        assert set(threading.enumerate()) <= before
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(story)


# ------------------------------------------------------------------------------------------------------ who may come in


def test_a_member_is_admitted(secure: Any) -> None:
    async def story() -> None:
        async with started(secure.make(Identity.new())) as (a,):
            assert await secure.knock(a, Identity.new()) == ""

    run(story)


def test_strangers_and_impostors_are_refused_with_the_reason(secure: Any) -> None:
    async def story() -> None:
        me, other = Identity.new(), Identity.new()
        elsewhere = Authority.new()
        foreign = read_invite(elsewhere.invite((), time.time() + 60), now=0.0).membership(me)
        late = Identity(me.key)
        expired = secure.membership(late, expires=time.time() - 60)
        forged = bytearray(secure.membership(me).proof)
        forged[-1] ^= 1
        forged_grant = bytearray(secure.membership(me).proof)
        forged_grant[80] ^= 1
        async with started(secure.make(Identity.new())) as (a,):
            for changes, reason in (
                ({"proof": b""}, "no pass"),
                ({"proof": b"abc"}, "malformed pass"),
                ({"proof": bytes(forged)}, "forged"),
                ({"proof": bytes(forged_grant)}, "forged"),
                ({"proof": foreign.proof}, "another run"),
                ({"proof": foreign.proof, "run": foreign.run}, "it belongs to another run"),
                ({"proof": expired.proof, "name": late.name}, "expired"),
                ({"name": f"{me.key_id}.1"}, "by which invite"),
                ({"name": f"{me.key_id}.1.{'a' * 12}.{secure.invite.grant.peers}"}, "by which invite"),
                ({"name": f"{me.key_id}.1.{secure.invite.grant.id}.999"}, "by which invite"),
                ({"proof": secure.membership(other).proof}, "belongs to another peer"),
                ({"name": other.name}, "holds the key of"),
                ({"name": other.name, "proof": secure.membership(other).proof}, "holds the key of"),
                ({"name": "p1"}, "not a peer's name"),
                ({"to": other.name}, "it wants"),
                ({"protocol": 999}, "protocol"),
            ):
                assert reason in await secure.knock(a, me, **changes), changes
            member = secure.make(Identity.new())
            async with started(member):  # and those who belong still come in
                member.learn(a.name, a.address)
                member.send(a.name, control(1))
                assert heard(await take(a, member)) == (member.name, control(1))

    run(story)


def test_blobs_among_control_messages_are_refused(secure: Any) -> None:
    async def story() -> None:
        rogue = Identity.new()
        async with started(secure.make(Identity.new())) as (a,):
            await secure.inject(rogue, a, head_of(4, (4,)) + b"abcd", "control")
            assert "among control" in (await lost(a, rogue.name)).reason

    run(story)


def test_nothing_is_told_to_a_peer_that_is_another_than_asked_for(secure: Any) -> None:
    async def story() -> None:
        expected = Identity.new().name
        async with started(secure.make(Identity.new()), secure.make(Identity.new())) as (a, b):
            a.learn(expected, b.address)
            a.send(expected, control(1))
            assert (await lost(a, expected)).reason
            a.send(b.name, control(2))
            assert (await take(b, a)).message == control(2)

    run(story)


def test_a_port_that_is_taken_is_named(secure: Any) -> None:
    async def story() -> None:
        async with started(secure.make(Identity.new())) as (a,):
            port = secure.port(a)
            second = secure.make(Identity.new(), port=port)
            with pytest.raises(ValueError, match=str(port)):
                await second.start()
            await second.close()

    run(story)
