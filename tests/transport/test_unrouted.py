"""Messages to a peer whose address is not known yet wait for it, within bounds, and are Lost after a while."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.transport.test_tls import bulk, make, take

from shoal.core.messages import Cancelled, Chunk, ReduceChunk, Withdraw, WithdrawState
from shoal.transport.base import Incoming, Limits, Lost, Unknown
from shoal.transport.identity.identity import Identity
from shoal.transport.streams import presence

MESSAGE = Cancelled(0, 1, 2, 0, 0)


def run(story: Any) -> None:
    asyncio.run(story())


def test_an_answer_to_a_peer_whose_record_is_late_arrives_when_its_address_is_learned() -> None:
    async def story() -> None:
        a, b = make(), make()
        await a.start()
        await b.start()
        tensor, blobs = bulk(0, 100)
        assert a.send(b.name, MESSAGE) and a.send(b.name, tensor, blobs) and a.send(b.name, Cancelled(0, 1, 3, 0, 0))
        assert await take(a) == Unknown(b.name), "the node is to look it up, once"
        a.learn(b.name, b.address)
        arrived = [await take(b) for _ in range(3)]
        assert all(isinstance(each, Incoming) and each.peer == a.name for each in arrived)
        control = [each.message for each in arrived if not each.blobs]
        assert control == [MESSAGE, Cancelled(0, 1, 3, 0, 0)], "in the order in which they were sent"
        await a.close()
        await b.close()

    run(story)


def test_a_peer_that_nobody_finds_is_lost_after_a_while_and_what_waited_is_dropped(monkeypatch: Any) -> None:
    monkeypatch.setattr(presence, "LOOK_UP_S", 0.2)

    async def story() -> None:
        a, b = make(), make()
        await a.start()
        await b.start()
        a.send(b.name, MESSAGE)
        assert await take(a) == Unknown(b.name)
        lost = await take(a)
        assert isinstance(lost, Lost) and lost.peer == b.name and "was not found in 0.2 s" in lost.reason
        a.learn(b.name, b.address)
        a.send(b.name, Cancelled(0, 1, 9, 0, 0))
        assert (await take(b)).message == Cancelled(0, 1, 9, 0, 0), "the first one is gone"
        await a.close()
        await b.close()

    run(story)


def test_what_waits_for_a_peer_that_is_forgotten_is_never_sent(monkeypatch: Any) -> None:
    monkeypatch.setattr(presence, "LOOK_UP_S", 0.1)

    async def story() -> None:
        a, there = make(), Identity.new().name
        await a.start()
        a.send(there, MESSAGE)
        assert await take(a) == Unknown(there)
        a.forget(there)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(a.receive(), 0.3)
        await a.close()

    run(story)


def test_waiting_is_bounded_in_peers_and_in_bytes(monkeypatch: Any) -> None:
    monkeypatch.setattr(presence, "PEERS", 2)

    async def story() -> None:
        a = make(Limits(queued_bytes=5000))
        first, second, third = (Identity.new().name for _ in range(3))
        await a.start()
        tensor, blobs = bulk(0, 4000)
        assert a.send(first, tensor, blobs)
        assert not a.send(first, tensor, blobs), "more than may wait for one peer"
        assert a.send(second, MESSAGE)
        assert not a.send(third, MESSAGE)
        events = [await take(a) for _ in range(3)]
        assert events[:2] == [Unknown(first), Unknown(second)]
        assert isinstance(events[2], Lost) and events[2].peer == third
        await a.close()

    run(story)


def test_chunks_of_a_state_are_withdrawn_for_one_peer_alone() -> None:
    async def story() -> None:
        a, b, c = make(), make(), make()
        for one in (a, b, c):
            await one.start()
        _, blobs = bulk(0, 100)
        for peer in (b, c):
            a.send(peer.name, Chunk(0, 5, 1, 0), blobs)
            a.send(peer.name, Chunk(0, 5, 1, 1, shard="s"), blobs)
        a.withdraw(WithdrawState(b.name).voids)
        for peer in (b, c):
            assert await take(a) == Unknown(peer.name)
        for peer in (b, c):
            a.learn(peer.name, peer.address)
        assert (await take(b)).message == Chunk(0, 5, 1, 1, shard="s")
        assert [(await take(c)).message.chunk for _ in range(2)] in ([0, 1], [1, 0])
        for one in (a, b, c):
            await one.close()

    run(story)


def test_what_was_withdrawn_is_not_sent() -> None:
    """Chunks of a round that is void wait for an address; what else does is sent."""

    async def story() -> None:
        a, b = make(), make()
        await a.start()
        await b.start()
        _, blobs = bulk(0, 100)
        for round_ in (7, 8):
            a.send(b.name, ReduceChunk(0, 1, round_, 0), blobs)
        a.withdraw(Withdraw(0, 1, 7).voids)
        assert await take(a) == Unknown(b.name)
        a.learn(b.name, b.address)
        assert (await take(b)).message == ReduceChunk(0, 1, 8, 0)
        await a.close()
        await b.close()

    run(story)
