"""Where the system has no BBR a stream of bulk has several connections: what comes over them is in order, and they end together."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
from tests.transport.test_strangers import call, held, make, started

from shoal.core.messages import BoundaryTensor
from shoal.transport.base import Blob, Incoming, Limits, Lost
from shoal.transport.identity.identity import Identity
from shoal.transport.streams import receiver
from shoal.transport.streams.carrier import LANES
from shoal.transport.streams.receiver import IncomingStream
from shoal.transport.tls import TlsTransport
from shoal.transport.wire import FRAGMENT_BYTES, NUMBERS, Malformed, encode, fragment_head

assert held  # a fixture
TENSORS = 24


def without_bbr() -> TlsTransport:
    transport = make()
    plain = transport._tls.socket
    transport._tls.socket = partial(_cubic, plain)  # type: ignore[method-assign]
    return transport


def _cubic(plain: Any, route: Any) -> socket.socket:
    sock: socket.socket = plain(route)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return sock


def tensor(index: int) -> tuple[BoundaryTensor, tuple[Blob, ...]]:
    data = bytes([index]) * (3 * FRAGMENT_BYTES + 1000 * index)
    return BoundaryTensor(0, 1, index, 1, False), (Blob("uint8", (len(data),), data),)


async def indices(transport: TlsTransport, count: int) -> list[int]:
    got: list[int] = []
    while len(got) < count:
        item = await transport.receive()
        if isinstance(item, Incoming):
            assert isinstance(item.message, BoundaryTensor)
            assert bytes(item.blobs[0].data) == bytes(tensor(item.message.index)[1][0].data)
            got.append(item.message.index)
    return got


async def lanes_to(transport: TlsTransport, peer: str) -> list[Any]:
    """Once all of them are there."""
    while True:
        stream = transport._receiver._streams.get((peer, "bulk"))
        if stream is not None and len(stream.connections) == LANES:
            return stream.connections
        await asyncio.sleep(0.01)


def test_tensors_over_several_connections_come_whole_and_in_order() -> None:
    async def story() -> None:
        async with started(without_bbr(), make()) as (sender, other):
            for index in range(TENSORS):
                sender.send(other.name, *tensor(index))
            assert await indices(other, TENSORS) == list(range(TENSORS))
            await lanes_to(other, sender.name)
            for index in range(TENSORS):  # over all of them by now
                sender.send(other.name, *tensor(index))
            assert await indices(other, TENSORS) == list(range(TENSORS))

    asyncio.run(story())


def test_when_one_of_them_breaks_the_stream_is_lost_and_the_next_message_makes_another() -> None:
    async def story() -> None:
        async with started(without_bbr(), make()) as (sender, other):
            sender.send(other.name, *tensor(0))
            assert await indices(other, 1) == [0]
            connections = list(await lanes_to(other, sender.name))
            connections[2].engine.fail_if(lambda each: each is connections[2], ConnectionError("cut"))
            while not isinstance(await sender.receive(), Lost):
                pass
            while not all(each.closed for each in connections):
                await asyncio.sleep(0.01)
            sender.send(other.name, *tensor(1))
            assert await indices(other, 1) == [1]
            assert not set(await lanes_to(other, sender.name)) & set(connections)

    asyncio.run(story())


def test_with_bbr_it_is_one() -> None:
    async def story() -> None:
        async with started(make(), make()) as (sender, other):
            sender.send(other.name, *tensor(0))
            assert await indices(other, 1) == [0]
            assert len(other._receiver._streams[sender.name, "bulk"].connections) == 1

    asyncio.run(story())


def test_a_fragment_whose_predecessors_never_come_ends_the_stream(
    held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "EARLY_S", 0.2)

    async def story() -> None:
        async with started(make()) as (victim,):
            liar = Identity.new()
            sock = await asyncio.to_thread(call, held, victim, liar, "bulk")
            piece = b"".join(encode(*tensor(0), Limits()).pieces(0, 1000))
            with suppress(OSError):
                sock.sendall(bytes(fragment_head(0, 1, len(piece))) + piece)
            lost = await victim.receive()
            assert isinstance(lost, Lost) and "before fragment 1" in lost.reason

    asyncio.run(story())


def test_a_fragment_that_came_before_is_malformed() -> None:
    stream = IncomingStream(1, Limits(), bulk=True)
    assert stream.may_read(0, 0) and not stream.may_read(0, 1) and stream.may_read(1, 0)
    stream.begin(0)
    with pytest.raises(Malformed, match="fragment 0 of rank 0 again"):
        stream.may_read(0, 0)
    stream.end(0, Any)  # type: ignore[arg-type]
    assert stream.may_read(0, 1)
    with pytest.raises(Malformed):
        stream.may_read(0, NUMBERS - 1)
